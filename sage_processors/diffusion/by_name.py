"""`Sage<Name>` for every attention processor class of diffusers, by its name."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

from .calls.sage_class import sage_class


def _resolve_alias(cls):
    """The processor class; deprecated names of diffusers are classes whose `__new__` makes another class's object."""
    if isinstance(cls, type) and "__call__" not in dir(cls) and "__new__" in vars(cls):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                cls = type(cls())
            except (TypeError, ValueError, ImportError):
                return None  # wants arguments or an accelerator: only the name it stands for can be used
    return cls if isinstance(cls, type) and "__call__" in dir(cls) else None


def sage_class_by_name(name: str) -> type:
    """`Sage<Name>` for the diffusers processor class `<Name>`. Raises AttributeError if diffusers has none."""
    base_name = name.removeprefix("Sage")
    import diffusers

    root = Path(diffusers.__file__).parent
    # Some names are defined in several files; the model's own file has the shortest name (transformer_wan.py).
    # sage_class() takes the class itself when another one is meant.
    files = [
        p
        for part in ("models", "pipelines")
        for p in sorted((root / part).rglob("*.py"), key=lambda p: (len(p.name), p.name))
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


def __getattr__(name: str):
    """Where pickle looks for the classes that `sage_class` makes."""
    if name.startswith("Sage"):
        return sage_class_by_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
