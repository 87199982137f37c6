"""An attention processor's own code with other attention ops, made anew when a function that it uses is replaced.

Others may replace functions while a program runs (../patched.py). Where that is the processor's `__call__` or an
attention function, its layers run what was put there, in 16 bit.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch.nn.functional as F

from ...patching.patched import Watch
from ...postponed.library import is_library_function
from .rebind import StandIns, rebind


class Binding:
    """The `__call__` of one processor class with stand-ins. The layers of all models share it.

    Attributes:
        inner: the code with the stand-ins.
        calls: attention calls in the code.
        is_of_libraries: all functions that the code uses by name are a library's: they may be handed what waits.
        is_replaced: `__call__` or an attention function is another one than at first: `inner` is not to be used.
        face: the function that models see as `__call__`, if any. They drop keyword arguments (RoPE, masks!) that its
            signature does not have.
    """

    def __init__(self, base: Any, ops: StandIns) -> None:
        self._base, self._ops = base, ops
        self._fn: types.FunctionType = base.__call__
        self._own = Watch(methods=[(base, "__call__"), (self._fn, "__code__")])
        self._made_of: dict[types.FunctionType, None] = {}
        self.calls = 0
        self._bind()
        self.is_replaced = False
        self._shown: Any = None
        self.face: Any = None

    def _bind(self) -> None:
        bound = rebind(self._fn, self._ops)
        self._made_of |= dict.fromkeys(bound.made_of)  # also what it was made of when it was whole, and is again
        watch = Watch()
        for function in self._made_of:
            watch.function(function, bound.seen if function.__globals__ is self._fn.__globals__ else None)
        self.calls = self.calls or bound.calls
        if bound.calls == self.calls:
            self._whole = watch
        self._watch, self._bound_calls, self.inner = watch, bound.calls, bound.function
        self.is_of_libraries = all(map(is_library_function, watch.functions()))

    def look(self) -> None:
        """Follow what was replaced, or put back."""
        if self._watch.changed():
            self._bind()
        self.is_replaced = self._bound_calls != self.calls or (self.calls > 0 and self._own.changed())
        there = self._base.__call__
        if self.face is not None and there is not self._shown:
            self.face.__signature__ = inspect.signature(there)
            self._shown = there

    def names(self) -> list[str]:
        """Names of the replaced functions because of which `inner` is not to be used."""
        return self._own.names() + self._whole.names() if self.is_replaced else []


class Patches:
    """Tells which functions were replaced since some layers of one class were swapped.

    Attributes: found: attention was, which their calls run in 16 bit.
    """

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._sdpa = Watch(methods=[(F, "scaled_dot_product_attention")])  # diffusers' own back ends call it, too
        self.found = False
        self.look()

    def look(self) -> None:
        """Look again: before each forward of a model."""
        self._binding.look()
        self.found = self._binding.is_replaced or (self._binding.calls > 0 and self._sdpa.changed())

    def note(self) -> str:
        """A remark for the report of such layers; "" where nothing was found."""
        names = self._binding.names() + self._sdpa.names()
        return f"replaced after the swap: {', '.join(dict.fromkeys(names))}" if self.found else ""
