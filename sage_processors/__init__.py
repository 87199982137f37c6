"""INT8 attention for Hugging Face models, with scales that follow the denoising steps.

    import sage_processors as sp
    handle = pipe.set_attn_processor(sp.SageAttnProcessor())

Importing this package needs torch alone. Everything else is imported on first use.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import Any

from .diffusion.host.model_methods import add_model_methods
from .diffusion.host.pipeline_method import add_pipeline_method
from .loading.config import SageConfig
from .loading.register import register
from .option_groups import Keep, LayerRule, Linears, Scaling, Skip
from .options import HANDED_IN, SageAttnProcessor
from .patching.on_import import when_imported
from .unsupported import UnsupportedAttentionError, UnsupportedLinearError
from .version import __version__ as __version__


# name -> its module, imported on first use (PEP 562). Type checkers read the same names in __init__.pyi.
_HOMES = {
    "BackendReport": "diffusion.reports.backend_report",
    "Calibration": "calibration.search",
    "Handle": "diffusion.handle",
    "Int8KVCache": "language.kv_cache",
    "Int8KVCacheError": "language.quantized_kv",
    "ChangedInputError": "postponed.tensor",
    "LanguageHandle": "language.generation.handle",
    "LinearSwap": "linears.swap",
    "Probe": "diffusion.reports.probe",
    "Report": "diffusion.reports.report",
    "apply": "entry",
    "attention_report": "language.attention",
    "calibrate": "calibration.search",
    "diffusers_backend_report": "diffusion.reports.backend_report",
    "handle_of": "entry",
    "processors_for": "diffusion.by_name",
    "quantize_linears": "linears.quantize",
    "register_diffusers_backend": "diffusion.calls.backend",
    "register_transformers": "language.attention",
    "sage_class": "diffusion.calls.sage_class",
    "unregister_diffusers_backend": "diffusion.calls.backend",
}
_MODULES = {
    "feature_distance": "evaluation.feature_distance",
    "hard_variants": "evaluation.hard_variants",
    "metrics": "evaluation.metrics",
    "pipelines": "pipelines",
    "quality": "evaluation.quality",
    "videos": "evaluation.videos",
}
_FOR_OTHER_FILES = {"read_policy": "calibration.policy_files"}
__all__ = [
    "SageAttnProcessor", "SageConfig", "Keep", "LayerRule", "Linears", "Scaling", "Skip", "UnsupportedAttentionError",
    "UnsupportedLinearError", *_HOMES,
]  # fmt: skip


HANDED_IN.update(
    {name: functools.partial(getattr, sys.modules[__name__], name) for name in ("apply", *_FOR_OTHER_FILES)}
)
add_pipeline_method()
add_model_methods()
register()


def _meet_transformers() -> None:
    """Register our attention names with transformers, and let its continuous batching run them."""
    try:
        importlib.import_module(f"{__name__}.language.attention")
        importlib.import_module(f"{__name__}.language.generation.batching")
    except ImportError as error:  # an unknown version of transformers must still be importable beside this package
        logging.getLogger(__name__).warning("INT8 attention is not available in this transformers: %s", error)


def _meet_generate() -> None:
    """Let transformers' `generate` make an Int8KVCache, and replay decode steps over one that it is given."""
    try:
        importlib.import_module(f"{__name__}.language.generation.default_cache")
    except ImportError as error:
        logging.getLogger(__name__).warning("generate makes no INT8 cache in this transformers: %s", error)


when_imported("transformers.modeling_utils", _meet_transformers, ready="ALL_ATTENTION_FUNCTIONS")
when_imported("transformers.generation.utils", _meet_generate, ready="GenerationMixin")


def __getattr__(name: str) -> Any:
    homes = _HOMES | _FOR_OTHER_FILES
    if name in homes:
        return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name.startswith("Sage"):  # Sage<Name> of any processor class of diffusers
        return importlib.import_module(f"{__name__}.diffusion.by_name").sage_class_by_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
