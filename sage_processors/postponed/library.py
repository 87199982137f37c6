"""Tells code of the libraries from everybody else's.

The libraries are torch, diffusers, transformers, peft, accelerate and this package. Their functions are known not to
keep what they are handed, nor to write to it behind PyTorch's back. Nothing is known of a user's own module, hook or
patched function.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import CodeType, FrameType
from typing import Any


PACKAGES = ("accelerate", "diffusers", "peft", "sage_kernels", "sage_processors", "torch", "transformers")
# Files whose frames lie between a module's forward and the function that called the module
_CALLING = ("torch/nn/modules/module.py", "accelerate/hooks.py", "diffusers/hooks/hooks.py")

_is_library: dict[str, bool] = {}
_is_calling: dict[str, bool] = {}


@functools.cache
def _folder(package: str) -> str | None:
    module = sys.modules.get(package)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else spec.origin.removesuffix("__init__.py")


def is_library_file(name: str) -> bool:
    """True for a source file of one of `PACKAGES`."""
    known = _is_library.get(name)
    if known is None:
        folders = [folder for folder in map(_folder, PACKAGES) if folder]
        known = _is_library[name] = any(name.startswith(folder) for folder in folders)
    return known


def is_library_function(function: Any) -> bool:
    """True for a Python function, method or bound method whose code is of one of `PACKAGES`."""
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and is_library_file(code.co_filename)


def is_library_class(kind: type) -> bool:
    """True for a class that one of `PACKAGES` defines."""
    return kind.__module__.partition(".")[0] in PACKAGES


def calls_from_library(frame: FrameType | None) -> bool:
    """True where a module's forward, which runs in `frame`, was called by code of a library.

    Frames of torch.nn.Module.__call__, and of hooks that move weights, are passed over.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        is_calling = _is_calling.get(name)
        if is_calling is None:
            is_calling = _is_calling[name] = name.replace("\\", "/").endswith(_CALLING)
        if not is_calling:
            return is_library_file(name)
        frame = frame.f_back
    return False
