"""RMSNorms of query and key heads, postponed and computed together with the rotary embedding."""

from __future__ import annotations

from typing import Any

from sage_kernels.checks import MAX_HEAD_DIM

from ...linears.compiled.graph_fusion import fuse_in_compiled_code
from ...linears.leftovers import give_back_norm
from ...linears.modules import is_swapped, norm_class
from ...linears.postponed.norm_layers import NormState, norm_form
from ...patching.derived import derive_class
from ...patching.patched import Owner
from ...postponed.tensor import Operand
from .head_fusion import fuse_heads
from .postponed_heads import HeadSource, Norm, PostponedHeads, Segment


# Submodules of an attention module that normalise its heads before the rotary embedding
NAMES = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


class HeadNormState(NormState):
    """State of one swapped norm in front of attention.

    Attributes: source: a HeadSource, as the rotary embedding behind the norm has one.
    """

    is_of_attention = True
    # A few bytes. Without the copy, offloading would change how heads are rounded, though it changes no weight.
    copies_weights = True

    def __init__(self, label, kind, plus_one):
        super().__init__(label, kind, plus_one)
        self.source = HeadSource(label)

    def _waiting(self, x, dtype, forward, vectors, parameters):
        if self.kind != "rms" or vectors["bias"] is not None or not self.source.is_postponed or dtype != x.dtype:
            return None
        across = x.dim() == 3  # one norm of all heads, which are split afterwards: `unflatten` checks their size
        if x.dim() not in (3, 4) or x.stride(-1) != 1:
            return None
        if not across and (x.shape[3] % 2 or x.shape[3] > MAX_HEAD_DIM):
            return None
        weight = vectors["weight"]
        if weight is not None and weight.shape != x.shape[-1:]:
            return None
        segment = Segment(Operand(x), Norm(weight, vectors["eps"], tuple(parameters), across), None)
        return PostponedHeads(x.shape, dtype, x.device, (segment,), None, (self.source,), forward)


class HeadNorms:
    """Swaps the class of one model's head norms, so that their results can be postponed until attention.

    The modules stay the same objects. Compiled code never sees a postponed result: there a norm runs as it did, and
    head_fusion.py finds it in the graph. In eager code only attention processors hold postponed results.
    """

    def __init__(self) -> None:
        self._swapped: dict[int, Any] = {}
        self._owner = Owner()

    def put(self, layers, label) -> None:
        """Swap the head norms of those layers that have a rotary embedding of a known kind, or none.

        Args: layers: the denoiser's attention layers. label: function from a module's name in the model to its name
            in messages.
        """
        if any(layer.sage._sage_binding.rotary for layer in layers):
            fuse_in_compiled_code(fuse_heads)
        for layer in layers:
            for name in NAMES if layer.sage._sage_binding.joins_heads else ():
                module = layer.module._modules.get(name)
                form = None if module is None or is_swapped(module) else norm_form(module)
                if form is not None:
                    state = HeadNormState(label(f"{layer.name}.{name}"), *form)
                    state.owner = self._owner
                    object.__setattr__(module, "_sage", state)
                    derive_class(module, norm_class)
                    self._swapped[id(module)] = module

    def remove(self) -> None:
        """Give the norms their own classes back. May be called more than once."""
        for module in self._swapped.values():
            if is_swapped(module):
                give_back_norm(module)
        self._swapped, self._owner.is_there = {}, False
