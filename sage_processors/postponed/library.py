"""Tells code of libraries from a user's code.

The libraries are torch, diffusers, transformers, peft, accelerate and this package. Their functions do not keep their
arguments, and PyTorch counts their writes. Nothing is known of a user's own module, hook or patched function.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from types import CodeType
from typing import Any


PACKAGES = ("accelerate", "diffusers", "peft", "sage_kernels", "sage_processors", "torch", "transformers")
# Files whose frames lie between a module's forward and the function that called the module
_CALLING = ("torch/nn/modules/module.py", "accelerate/hooks.py", "diffusers/hooks/hooks.py")

_STANDARD = os.path.dirname(os.__file__)

_is_library: dict[str, bool] = {}


class _Kinds(dict[str, bool | None]):
    """Kinds of source files: True for a library's, False for another one, None for one of `_CALLING`."""

    def __missing__(self, name: str) -> bool | None:
        found = None if name.replace("\\", "/").endswith(_CALLING) else is_library_file(name)
        return self.setdefault(name, found)


_kinds = _Kinds()


@functools.cache
def _folder(package: str) -> str | None:
    module = sys.modules.get(package)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else spec.origin.removesuffix("__init__.py")


def is_library_file(name: str) -> bool:
    """Return True for a source file of one of `PACKAGES`."""
    known = _is_library.get(name)
    if known is None:
        folders = [folder for folder in map(_folder, PACKAGES) if folder]
        known = _is_library[name] = any(name.startswith(folder) for folder in folders)
    return known


def is_library_function(function: Any) -> bool:
    """Return True for a Python function or method whose code is in one of `PACKAGES`."""
    code = getattr(function, "__code__", None)
    return isinstance(code, CodeType) and is_library_file(code.co_filename)


def is_pythons_function(function: Any) -> bool:
    """Return True for a function of Python's standard library that is written in Python."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(_STANDARD) and "-packages" not in file


def is_library_class(kind: type) -> bool:
    """Return True for a class that one of `PACKAGES` defines."""
    return kind.__module__.partition(".")[0] in PACKAGES


def is_called_by_library(depth: int) -> bool:
    """Return True if code of a library called the module whose forward is `depth` frames up the stack.

    Frames of torch.nn.Module.__call__ and of hooks that move weights are skipped. Frames are looked up by number as
    far as possible: going from one frame to the next costs three times as much.
    """
    caller = sys._getframe(depth + 1)
    if (found := _kinds[caller.f_code.co_filename]) is not None:
        return found  # forward was called directly, not through __call__
    caller = sys._getframe(depth + 3)  # behind _call_impl and _wrapped_call_impl
    while (found := _kinds[caller.f_code.co_filename]) is None and caller.f_back is not None:
        caller = caller.f_back
    return bool(found)
