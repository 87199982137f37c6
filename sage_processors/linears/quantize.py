"""The linear layers of any module in 8 bit, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import nn

from ..option_checks import one_of
from ..option_groups import LinearFormat
from .measured_balance import measured_balances
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
    gated: Literal["8bit", "16bit"] = "8bit",
    calibration: Callable[[], object] | None = None,
) -> LinearSwap:
    """Run the linear layers of a transformers model, or of any module, in 8 bit.

    Args:
        model: any nn.Module; layers outside of its repeated blocks, embeddings, routers and lm_head stay in 16 bit.
        linears: "int8", "fp8" or "none", for layers that no pattern of `layers` matches.
        layers: {name pattern: format}, or pairs. The first match counts, also for protected and small layers.
        min_features, drop_weights: as in `sage_processors.Linears`.
        on_unsupported: as in SageAttnProcessor.
        gated: "16bit": layers behind a gated activation, such as SwiGLU's down_proj, run in 16 bit in calls of many
            rows, unless `layers` names them or their 16-bit weight is dropped. `apply` does that in language models.
        calibration: a function that runs the model once, such as `lambda: model(ids)`. Outputs of norms and of
            attention are balanced by what it shows. `apply` runs language models on random tokens. None: by the
            weights alone.
    Returns: a LinearSwap: report(), refresh(), remove(). Calling it again replaces the options.
    Raises: TypeError, ValueError for options of a wrong type or value. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)
    names = [c.name for c in choose(model, label=str, linears="none")]
    one_of("gated", gated, ("8bit", "16bit"))
    pairs = checked_options(names, linears, layers, min_features, on_unsupported, drop_weights)
    if (earlier := swap_of(model)) is not None:
        earlier.remove()
    measured = {} if calibration is None else measured_balances(model, calibration)
    options: dict[str, Any] = {"linears": linears, "layers": pairs, "min_features": min_features, "gated": gated}
    swap = LinearSwap(model, measured=measured, on_unsupported=on_unsupported, drop_weights=drop_weights, **options)
    if drop_weights:
        swap.drop()
    return swap
