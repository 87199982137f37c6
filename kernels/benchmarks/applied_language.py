"""Ours in a language model: what the preset "fast" makes of it, or attention and linear layers by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import sage_processors as sp


@contextmanager
def by_apply(model: Any, *, min_tokens: int | None, min_features: int | None) -> Iterator[None]:
    """Put the preset "fast" into the model by `apply` inside of the with-statement."""
    more = {} if min_features is None else {"linears": sp.Linears("int8", min_features=min_features)}
    with sp.apply(model, sp.SageAttnProcessor("fast", min_tokens=min_tokens, **more)):
        yield


@contextmanager
def by_hand(
    model: Any, recipe: str, linears: str, *, min_tokens: int | None, min_features: int | None
) -> Iterator[None]:
    """Choose attention of a recipe, without rotation, and put linear layers into a format, uncalibrated.

    Layers behind gated activations are in 8 bit, too, in calls of every length.
    """
    name = f"sage_bench_{recipe}"
    sp.register_transformers(name, recipe=recipe, min_tokens=min_tokens)
    model.set_attn_implementation(name)
    try:
        with nullcontext() if linears == "none" else sp.quantize_linears(model, linears, min_features=min_features):
            yield
    finally:
        model.set_attn_implementation("sdpa")
