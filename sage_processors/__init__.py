"""INT8 attention for Hugging Face pipelines, with scales that follow the denoising trajectory.

    import sage_processors as sp
    handle = pipe.set_attn_processor(sp.SageAttnProcessor())

Importing this needs torch alone; everything else is imported when it is used.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types

from ._on_import import when_imported
from ._pipeline_method import add_pipeline_method


__version__ = "0.1.0"

_HOMES = {
    "SageAttnProcessor": "config",
    "UnsupportedAttentionError": "config",
    "Probe": "probe",
    "Calibration": "calibration",
    "calibrate": "calibration",
    "Handle": "apply",
    "apply": "apply",
    "handle_of": "apply",
    "Int8KVCache": "kv_cache",
    "Int8KVCacheError": "kv_cache",
    "processors_for": "apply",
    "Report": "report",
    "sage_class": "processors",
    "attention_report": "transformers_attention",
    "register_transformers": "transformers_attention",
}
_MODULES = (
    "apply",
    "attention_cost",
    "by_name",
    "calibrate_command",
    "calibration",
    "carry",
    "class_lists",
    "cli",
    "command_checks",
    "config",
    "discovery",
    "doctor",
    "drawing",
    "event_counter",
    "feature_distance",
    "following",
    "forwards",
    "hard_variants",
    "kv_cache",
    "language",
    "metrics",
    "part",
    "picture_report",
    "pipelines",
    "policy",
    "probe",
    "processors",
    "progress_bar",
    "quality",
    "rebind",
    "report",
    "scale_files",
    "scale_rules",
    "scales",
    "strict_json",
    "timestep",
    "transformers_attention",
    "transformers_call",
    "transformers_choice",
    "transformers_counts",
    "transformers_masks",
    "transformers_visible",
    "whole_file",
    "windows",
)
__all__ = [
    "SageAttnProcessor",
    "UnsupportedAttentionError",
    "Calibration",
    "Handle",
    "Int8KVCache",
    "Int8KVCacheError",
    "Probe",
    "Report",
    "apply",
    "attention_report",
    "calibrate",
    "handle_of",
    "processors_for",
    "register_transformers",
    "sage_class",
]


class _Package(types.ModuleType):
    """Importing the submodule apply.py must not hide the function `apply`, in whatever order things are imported."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value.apply if name == "apply" and isinstance(value, types.ModuleType) else value)


sys.modules[__name__].__class__ = _Package
add_pipeline_method()


def _meet_transformers():
    """Importing the module registers its names."""
    try:
        importlib.import_module(f"{__name__}.transformers_attention")
    except ImportError as error:  # a transformers of another time must stay importable beside this package
        logging.getLogger(__name__).warning("INT8 attention is not available in this transformers: %s", error)


when_imported("transformers.modeling_utils", _meet_transformers, ready="ALL_ATTENTION_FUNCTIONS")


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name.startswith("Sage"):  # Sage<Name> of any processor class of diffusers
        return importlib.import_module(f"{__name__}.by_name").sage_class_by_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
