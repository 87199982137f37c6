"""Sage processor classes by name, and a model's Sage processors as a dict."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from ..options import SageAttnProcessor, options_of
from .calls.sage_class import sage_class
from .handle import Handle, remove_handles
from .host.discovery import unwrap


def _resolve_alias(cls: Any) -> type | None:
    """Return the processor class behind a name of diffusers; None for any other object.

    A deprecated name is a class with a `__new__` that makes an object of another class.
    """
    if isinstance(cls, type) and "__call__" not in dir(cls) and "__new__" in vars(cls):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                cls = type(cls())
            except (TypeError, ValueError, ImportError):
                return None  # needs arguments or an accelerator; the class it stands for has to be named
    return cls if isinstance(cls, type) and "__call__" in dir(cls) else None


def sage_class_by_name(name: str) -> type:
    """Return the class `Sage<Name>` for the diffusers processor class `<Name>`.

    Raises: AttributeError if diffusers has no such processor class.
    """
    base_name = name.removeprefix("Sage")
    import diffusers

    root = Path(diffusers.__file__).parent
    # Some names are defined in several files. The model's own file has the shortest name (transformer_wan.py). For
    # another file's class, call sage_class() with the class itself.
    files = [
        p
        for folder in ("models", "pipelines")
        for p in sorted((root / folder).rglob("*.py"), key=lambda p: (len(p.name), p.name))
    ]
    files.sort(key=lambda p: "autoencoders" in p.parts)
    if name.startswith("Sage") and base_name:
        for path in files:
            if f"\nclass {base_name}" in path.read_text(encoding="utf-8"):
                module = importlib.import_module(
                    ".".join(("diffusers", *path.relative_to(root).with_suffix("").parts))
                )
                base = _resolve_alias(getattr(module, base_name, None))
                if base is not None and base.__module__.startswith("diffusers."):
                    return sage_class(base)
    raise AttributeError(
        f"sage_processors has no {name!r}: diffusers {diffusers.__version__} has no class {base_name!r}"
    )


def processors_for(model: Any, config: SageAttnProcessor | None = None) -> dict[str, Any]:
    """Swap a model's processors and return them by name, as `model.set_attn_processor` takes them.

    For code that sets a dict, `model.set_attn_processor(processors_for(model))`. The processors are in place already,
    and belong to a handle as with `apply`: `handle_of(model)` returns it.
    Raises: TypeError for a model without set_attn_processor; `apply` takes such a model.
    """
    model = unwrap(model)
    if not hasattr(model, "set_attn_processor") or not hasattr(model, "attn_processors"):
        raise TypeError(
            f"model: got {type(model).__name__}, expected one with set_attn_processor; "
            "use sage_processors.apply(model) instead"
        )
    config = options_of(config)
    remove_handles(model)
    Handle(model, config)
    return dict(model.attn_processors)


def __getattr__(name: str) -> type:
    """Return `Sage<Name>` as an attribute of this module, so that pickle can find such classes here."""
    if name.startswith("Sage"):
        return sage_class_by_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
