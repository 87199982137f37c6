"""A processor's own code with our attention functions, rebuilt when a function it uses is replaced.

Other libraries may replace functions while a program runs (patching/patched.py). If they replace the processor's
`__call__` or an attention function, its layers run the replacement, in 16 bit.
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
    """The `__call__` of one processor class with stand-ins, shared by the layers of all models.

    Attributes:
        inner: the code with the stand-ins.
        calls: number of attention calls in the code.
        is_of_libraries: True if all functions that the code uses by name come from a library. Only these may be given
            postponed results.
        reads_masks: True if the code asks which tokens of a mask are valid, so that lengths follow from its values.
        imported: what the code imports when it runs.
        has_nested: True if the code defines a rotary embedding that was replaced (heads/nested_rotary.py).
        is_replaced: True if `__call__` or an attention function was replaced. `inner` must not be used then.
        rotary: name of the rotary embedding function in the code, if that can be postponed; NESTED for one that the
            code defines.
        joins_heads: True if norms of heads may be postponed: the code has such a rotary embedding, or none.
        face: the function that models see as `__call__`, if any. Its signature has to be right: models drop keyword
            arguments, such as masks and rotary embeddings, that it does not have.
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
        self.rotary: str | None = None
        self.joins_heads = False

    def _bind(self) -> None:
        bound = rebind(self._fn, self._ops)
        self._made_of |= dict.fromkeys(bound.made_of)  # earlier functions stay: they may be put back
        watch = Watch()
        for function in self._made_of:
            watch.function(function, bound.seen if function.__globals__ is self._fn.__globals__ else None)
        for module, name in bound.imported:
            watch.attribute(module, name)
        self.calls = self.calls or bound.calls
        if bound.calls == self.calls:
            self._whole = watch
        self._watch, self._bound_calls, self.inner = watch, bound.calls, bound.function
        self.reads_masks, self.has_nested = bound.reads_masks, bound.has_nested
        self.imported = [vars(module).get(name) for module, name in bound.imported]
        self.is_of_libraries = all(map(is_library_function, watch.functions()))

    def look(self) -> None:
        """Rebuild the code if a function it uses was replaced or put back."""
        if self._watch.changed():
            self._bind()
        self.is_replaced = self._bound_calls != self.calls or (self.calls > 0 and self._own.changed())
        there = self._base.__call__
        if self.face is not None and there is not self._shown:
            self.face.__signature__ = inspect.signature(there)
            self._shown = there

    def names(self) -> list[str]:
        """Return the names of replaced functions that forbid the use of `inner`."""
        return self._own.names() + self._whole.names() if self.is_replaced else []


class Patches:
    """A check for functions that were replaced since layers of one processor class were swapped.

    Attributes: found: True if attention was replaced; the layers' calls then run in 16 bit.
    """

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._sdpa = Watch(methods=[(F, "scaled_dot_product_attention")])  # called by diffusers' own back ends
        self.found = False
        self.look()

    def look(self) -> None:
        """Check again. Called before each forward of a model."""
        self._binding.look()
        self.found = self._binding.is_replaced or (self._binding.calls > 0 and self._sdpa.changed())

    def note(self) -> str:
        """Return a remark for the report of these layers; "" if nothing was replaced."""
        names = self._binding.names() + self._sdpa.names()
        return f"replaced after the swap: {', '.join(dict.fromkeys(names))}" if self.found else ""
