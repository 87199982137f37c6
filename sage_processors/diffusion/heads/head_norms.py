"""RMSNorms of query and key heads, computed together with the rotary embedding behind them."""

from __future__ import annotations

from typing import Any

from sage_kernels.checks import MAX_HEAD_DIM

from ...linears.compiled.graph_fusion import fuse_in_compiled_code
from ...linears.leftovers import give_back_norm
from ...linears.modules import is_swapped, norm_class, put_class
from ...linears.postponed.norm_layers import NormState, norm_form
from ...patching.owner import Owner
from ...postponed.tensor import Operand
from .head_fusion import fuse_heads
from .postponed_heads import HeadSource, Norm, Part, PostponedHeads


# Children of an attention module that norm heads before a rotary embedding
NAMES = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class HeadNormState(NormState):
    """Of one norm in front of attention. source: as of the rotary embedding's."""

    is_of_attention = True
    copies_weights = True  # a few bytes; else offloading, which changes no number, would change how heads are rounded

    def __init__(self, label, kind, plus_one):
        super().__init__(label, kind, plus_one)
        self.source = HeadSource(label)

    def _waiting(self, x, dtype, forward, vectors, parameters):
        if self.kind != "rms" or vectors["bias"] is not None or not self.source.is_postponed or dtype != x.dtype:
            return None
        if x.dim() != 4 or x.shape[3] % 2 or x.shape[3] > MAX_HEAD_DIM or x.stride(3) != 1:
            return None
        weight = vectors["weight"]
        if weight is not None and weight.shape != x.shape[3:]:
            return None
        part = Part(Operand(x), Norm(weight, vectors["eps"], tuple(parameters)), None)
        return PostponedHeads(x.shape, dtype, x.device, (part,), None, (self.source,), forward)


class HeadNorms:
    """The norms of one model that wait for attention: the same objects, with another class.

    Compiled code never sees what waits: inside of it a norm is what it was, for head_fusion.py to find, and outside of
    it what waits is in the hands of attention processors alone.
    """

    def __init__(self) -> None:
        self._swapped: dict[int, Any] = {}
        self._owner = Owner()

    def put(self, layers, label) -> None:
        """Let the head norms of attention layers wait, where the processor's rotary embedding does.

        label: name in the model -> name in messages.
        """
        if any(layer.sage._sage_rotary for layer in layers):
            fuse_in_compiled_code(fuse_heads)
        for layer in layers:
            for name in NAMES if layer.sage._sage_rotary else ():
                module = layer.module._modules.get(name)
                form = None if module is None or is_swapped(module) else norm_form(module)
                if form is not None:
                    state = HeadNormState(label(f"{layer.name}.{name}"), *form)
                    state.owner = self._owner
                    object.__setattr__(module, "_sage_norm", state)
                    cls: Any = type(module)
                    put_class(module, norm_class(cls))
                    self._swapped[id(module)] = module

    def remove(self) -> None:
        """Put their own classes back. Harmless when repeated."""
        for module in self._swapped.values():
            if is_swapped(module):
                give_back_norm(module)
        self._swapped, self._owner.is_there = {}, False
