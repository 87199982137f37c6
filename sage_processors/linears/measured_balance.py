"""Balances of norms' outputs, measured on a run of the model.

Some channels of a norm's output are many times larger than the others in every token. Weights tell of few of them. One
run does: a channel's factor is its size to the power of SHARE over that of the weights' column to the power of
1 - SHARE. Layers behind attention or an activation are left out: what is large there
changes from text to text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .balance import column_norms
from .postponed.norm_layers import norm_width
from .weights.layers import linear_layers
from .weights.linear_state import linear_state


# A half makes the product of both errors least. Those of weights count for more: they are the same in every token, and
# in decoding, where activations stay in 16 bit, they are all that there is.
SHARE = 0.45
STEPS = 16  # values of a factor from one power of two to the next; 64 are no better
MOST = 10.0  # largest exponent of a factor, in powers of two: fp16 holds activations times it


class _Read:
    """Sizes of one norm's output, and the layers that read it."""

    def __init__(self) -> None:
        self.squares: Any = 0.0
        self.names: list[str] = []


def measured_balances(model: nn.Module, run: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Run the model and return {name of a linear layer: balance fp32 [K]}.

    Layers that read one norm share a tensor.

    Args: run: calls the model with inputs like those that it is for; their number and order do not matter.
    """
    layers = dict(linear_layers(model))
    named = {id(module): name for name, module in layers.items()}
    reads: dict[int, _Read] = {}
    latest: list[Any] = [None, 0]  # a norm's output, and the norm

    def after_norm(module: Any, _: Any, output: Any) -> None:
        latest[:] = output, id(module)

    def before_linear(module: Any, args: Any) -> None:
        if not args or args[0] is not latest[0]:
            return
        read, name = reads.setdefault(latest[1], _Read()), named[id(module)]
        if not read.names or name == read.names[0]:  # once for all layers that read it
            read.squares = read.squares + args[0].detach().float().flatten(0, -2).square().sum(0)
        if name not in read.names:
            read.names.append(name)

    norms = [m for m in model.modules() if not isinstance(m, nn.Linear) and norm_width(m) is not None]
    hooks = [module.register_forward_hook(after_norm) for module in norms]
    hooks += [module.register_forward_pre_hook(before_linear) for module in layers.values()]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[str, torch.Tensor] = {}
    for read in reads.values():
        weights: list[Any] = [_weight_of(layers[name]) for name in read.names]
        vector = _vector(read.squares, [weight for weight in weights if not weight.is_meta])
        found |= dict.fromkeys(read.names, vector) if vector is not None else {}
    return found


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
    return torch.exp2(-exponents) if exponents.isfinite().all() and exponents.any() else None
