"""INT8 attention for Hugging Face pipelines, with scales that follow the denoising trajectory.

    import sage_processors as sp
    handle = pipe.set_attn_processor(sp.SageAttnProcessor())

Importing this needs torch alone; everything else is imported when it is used.
"""

from __future__ import annotations

import importlib
import sys
import types

from ._pipeline_method import add_pipeline_method


__version__ = "0.1.0"

_HOMES = {
    "SageAttnProcessor": "config",
    "UnsupportedAttentionError": "config",
    "Handle": "apply",
    "apply": "apply",
    "handle_of": "apply",
    "processors_for": "apply",
    "Report": "report",
    "sage_class": "processors",
}
_MODULES = (
    "apply",
    "by_name",
    "carry",
    "cli",
    "config",
    "discovery",
    "doctor",
    "metrics",
    "part",
    "pipelines",
    "processors",
    "quality",
    "rebind",
    "report",
    "scale_files",
    "scales",
    "timestep",
)
__all__ = [
    "SageAttnProcessor",
    "UnsupportedAttentionError",
    "Handle",
    "Report",
    "apply",
    "handle_of",
    "processors_for",
    "sage_class",
]


class _Package(types.ModuleType):
    """Importing the submodule apply.py must not hide the function `apply`, in whatever order things are imported."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value.apply if name == "apply" and isinstance(value, types.ModuleType) else value)


sys.modules[__name__].__class__ = _Package
add_pipeline_method()


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
