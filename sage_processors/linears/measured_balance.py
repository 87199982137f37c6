"""Balances of activations, measured on a run of the model: norms' outputs, and what attention returns.

Some channels of these are many times larger than the others in every token. Weights tell of few of them. One run does:
a channel's factor is its size to the power of SHARE over that of the weights' column to the power of 1 - SHARE. Layers
behind an activation function are left out: what is large there changes from text to text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from .balance import column_norms
from .postponed.norm_layers import norm_width
from .weights.layers import is_in_attention, linear_layers, repeated_blocks
from .weights.linear_state import linear_state


# A half makes the product of both errors least. Those of weights count for more: they are the same in every token, and
# in decoding, where activations stay in 16 bit, they are all that there is.
SHARE = 0.45
STEPS = 16  # values of a factor from one power of two to the next, each rounded to bf16; 64 are no better
RECENT = 4  # norms whose outputs a linear layer is taken to read
MOST = 10.0  # largest exponent of a factor, in powers of two: fp16 holds activations times it


class _Read:
    """Sizes of one activation, and the layers that read it."""

    def __init__(self) -> None:
        self.squares: Any = 0.0
        self.names: list[str] = []


Source = Literal["norms", "attention"]


def measured_balances(
    model: nn.Module, run: Callable[[], object], sources: Sequence[Source] = ("norms", "attention")
) -> dict[str, torch.Tensor]:
    """Run the model and return {name of a linear layer: balance fp32 [K]}.

    Layers that read one norm share a tensor. Models whose blocks end in a norm, such as BERT, have no balance: their
    channels differ less, and the embeddings of a trained one (MiniLM) were 1.5 times as far from fp32's with it.

    Args: run: calls the model with inputs like those that it is for; their number and order do not matter. sources:
        of the activations that are measured.
    """
    sizes = _Sizes(model, sources)
    hooks = sizes.hooks()
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[str, torch.Tensor] = {}
    with torch.inference_mode(False):  # calls in any mode read the vectors
        for read in [] if sizes.has_post_norm() else sizes.reads.values():
            weights: list[Any] = [_weight_of(sizes.layers[name]) for name in read.names]
            vector = _vector(read.squares, [weight for weight in weights if not weight.is_meta])
            found |= dict.fromkeys(read.names, vector) if vector is not None else {}
    return found


class _Sizes:
    """Collects the sizes of activations' channels in a run of a model.

    Attributes: layers: {name: linear layer}. reads: {id of what made an activation, or of its only reader: _Read}.
    """

    def __init__(self, model: nn.Module, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.layers = dict(linear_layers(model))
        self.reads: dict[int, _Read] = {}
        owners = dict(model.named_modules())
        self._named = {id(module): name for name, module in self.layers.items()}
        self._norms = [x for x in owners.values() if not isinstance(x, nn.Linear) and norm_width(x) is not None]
        self._behind_attention = {id(x) for name, x in self.layers.items() if is_in_attention(name, owners)}
        self._blocks = [owners[name[:-1]] for name in repeated_blocks(model) if name]
        # the latest norms' outputs, and the norms' ids: Qwen3 has norms of heads between the readers of one norm
        self._normed: deque[tuple[Any, int]] = deque(maxlen=RECENT)
        self._other: Any = (None, 0)  # the latest other activation, and its reader's id
        self._ends: list[bool] = []  # of each block's call: its output is a norm's

    def hooks(self) -> list[Any]:
        """Register the hooks that look on, and return their handles."""
        found = [module.register_forward_hook(self._after_norm) for module in self._norms]
        found += [module.register_forward_pre_hook(self._before_linear) for module in self.layers.values()]
        return found + [module.register_forward_hook(self._after_block) for module in self._blocks]

    def has_post_norm(self) -> bool:
        """Return True if all blocks that ran end in a norm."""
        return bool(self._ends) and all(self._ends)

    def _after_norm(self, module: Any, _: Any, output: Any) -> None:
        self._normed.append((output, id(module)))

    def _after_block(self, module: Any, _: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        self._ends.append(bool(self._normed) and output is self._normed[-1][0])

    def _before_linear(self, module: Any, args: Any) -> None:
        if not args:
            return
        x = args[0]
        key = next((key for output, key in self._normed if x is output), None)
        if key is None:
            if x is self._other[0]:  # of several readers, as an encoder's states: these have no balance
                self.reads.pop(self._other[1], None)
                return
            key = id(module)
            self._other = x, key
            if key not in self._behind_attention or "attention" not in self._sources:
                return
        elif "norms" not in self._sources:
            return
        read, name = self.reads.setdefault(key, _Read()), self._named[id(module)]
        if not read.names or name == read.names[0]:  # once for all layers that read it
            read.squares = read.squares + x.detach().float().reshape(-1, x.shape[-1]).square().sum(0)
        if name not in read.names:
            read.names.append(name)


def _weight_of(module: Any) -> torch.Tensor:
    """Return the weight [N, K] of a linear layer, dequantised if the 16-bit one was dropped."""
    state = linear_state(module)
    if state is None or not state.dropped:
        return module.weight.detach()
    balance = None if state.balance is None else state.balance.vector
    return state.storage.dequantized(state.index, torch.bfloat16, balance)


def _vector(squares: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the balance [K] for an activation with these sums of squares, or None for none."""
    if not weights:
        return None
    columns = torch.stack([column_norms(weight).square() for weight in weights]).sum(0)
    sizes = squares.clamp_min(squares.amax() * 2.0**-40), columns.clamp_min(columns.amax() * 2.0**-40)
    exponents = (SHARE * sizes[0].log2() - (1 - SHARE) * sizes[1].log2()) / 2
    exponents = ((exponents - exponents.median()) * STEPS).round().div(STEPS).clamp(-MOST, MOST)
    if not (exponents.isfinite().all() and exponents.any()):
        return None
    return torch.exp2(-exponents).bfloat16().float()  # exact in bf16, so that a bf16 activation times it rounds once
