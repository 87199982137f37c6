"""Input checks of `mixed_attention`: which argument, what it got, what is expected, before any launch."""

from __future__ import annotations

from typing import Any

from ..facts.recipe import BLOCK, DEFAULT_RECIPE, Mixed
from .attention import check_attention_inputs, check_masking, check_options


_MOST_BLOCKS = 2**15 - 1  # lists of blocks are int16


def check_mixed(q: Any, k: Any, v: Any, options: Any, causal: Any, scale: Any) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless it is a call of `mixed_attention`."""
    if not isinstance(options, Mixed):
        raise TypeError(f"options: got {type(options).__name__}, expected sage_kernels.Mixed")
    check_options(DEFAULT_RECIPE, "per_token", scale, None)
    check_attention_inputs(q, k, v)
    check_masking(q, k, None, causal, None, None)
    if k.shape[1] > BLOCK * _MOST_BLOCKS:
        raise NotImplementedError(
            f"k: got {k.shape[1]} tokens, expected at most {BLOCK * _MOST_BLOCKS} with recipe 'mixed'; use "
            f"sage_attention with recipe={DEFAULT_RECIPE!r}"
        )
