"""The linear layers of any module in 8 bit, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from torch import nn

from ..option_groups import LinearFormat
from .swap import LinearSwap, swap_of
from .swap_checks import checked_options
from .weights.layers import choose


def quantize_linears(
    model: nn.Module,
    linears: LinearFormat = "int8",
    *,
    layers: Mapping[str, LinearFormat] | Iterable[tuple[str, LinearFormat]] = (),
    min_features: int | None = None,
    on_unsupported: Literal["fallback", "raise"] = "fallback",
    drop_weights: bool = False,
) -> LinearSwap:
    """Run the linear layers of a transformers model, or of any module, in 8 bit.

    Args:
        model: any nn.Module; layers outside of its repeated blocks, embeddings, routers and lm_head stay in 16 bit.
        linears: "int8", "fp8" or "none", for layers that no pattern of `layers` matches.
        layers: {name pattern: format}, or pairs. The first match counts, also for protected and small layers.
        min_features, drop_weights: as in `sage_processors.Linears`.
        on_unsupported: as in SageAttnProcessor.
    Returns: a LinearSwap: report(), refresh(), remove(). Calling it again replaces the options.
    Raises: TypeError, ValueError for options of a wrong type or value. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)
    names = [c.name for c in choose(model, label=str, linears="none")]
    pairs = checked_options(names, linears, layers, min_features, on_unsupported, drop_weights)
    if (earlier := swap_of(model)) is not None:
        earlier.remove()
    options: dict[str, Any] = {"linears": linears, "layers": pairs, "min_features": min_features}
    swap = LinearSwap(model, on_unsupported=on_unsupported, drop_weights=drop_weights, **options)
    if drop_weights:
        swap.drop()
    return swap
