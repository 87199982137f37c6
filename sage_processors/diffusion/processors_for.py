"""Processors in the form in which diffusers takes them: a dict by name."""

from __future__ import annotations

from typing import Any

from ..options import SageAttnProcessor
from .handle import apply
from .host.discovery import unwrap


def processors_for(model: Any, config: SageAttnProcessor | None = None) -> dict[str, Any]:
    """`{name: processor}` for diffusers' own dict form, `model.set_attn_processor(processors_for(model))`.

    The processors belong to a handle as with `apply` (`handle_of(model)` returns it); they are also in place already.
    Raises: TypeError for a model without set_attn_processor, which `apply` can still do.
    """
    model = unwrap(model)
    if not hasattr(model, "set_attn_processor") or not hasattr(model, "attn_processors"):
        raise TypeError(
            f"model: got {type(model).__name__}, expected one with set_attn_processor; "
            "use sage_processors.apply(model) instead"
        )
    apply(model, config)
    return dict(model.attn_processors)
