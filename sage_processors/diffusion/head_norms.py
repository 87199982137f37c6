"""Norms of queries and keys, head by head, that wait for attention beside the rotary embedding behind them."""

from __future__ import annotations

from sage_kernels.checks import MAX_HEAD_DIM

from ..linears.lazy import Operand
from ..linears.norms import NormState
from ..linears.swap import LinearSwap
from .lazy_heads import LazyHeads, Norm, Part, Waiting


# Children of an attention module that norm heads before a rotary embedding
NAMES = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class HeadNormState(NormState):
    """Of one norm in front of attention. waiting: as of the rotary embedding's."""

    def __init__(self, label, kind, plus_one, shared):
        super().__init__(label, kind, plus_one, shared)
        self.waiting = Waiting(label)

    def _lazy(self, x, dtype, forward, vectors):
        if self.kind != "rms" or vectors["bias"] is not None or not self.waiting.is_postponed or dtype != x.dtype:
            return None
        if x.dim() != 4 or x.shape[3] % 2 or x.shape[3] > MAX_HEAD_DIM or x.stride(3) != 1:
            return None
        weight = vectors["weight"]
        if weight is not None and weight.shape != x.shape[3:]:
            return None
        part = Part(Operand(x), Norm(weight, vectors["eps"]), None)
        return LazyHeads(x.shape, dtype, x.device, (part,), None, (self.waiting,), forward)


def postpone_head_norms(swap: LinearSwap, layer) -> None:
    """Let the head norms of a swapped attention layer wait, where its processor's rotary embedding does."""
    if not layer.sage._sage_turns_heads:
        return
    for name in NAMES:
        module = layer.module._modules.get(name)
        if module is not None:
            swap.postpone(module, f"{layer.name}.{name}", HeadNormState)
