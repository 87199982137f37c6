"""Types of the attention functions' keyword arguments, shared by their overloads.

The functions' own docstrings say what the keywords mean.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from ..facts.skipping import SkipState
from ..facts.state import HeadState


class _OfScores(TypedDict, total=False):
    """Options for the scores of any attention."""

    window: int | None
    softcap: float
    sinks: torch.Tensor | None
    scale: float | None


class _OfRecipe(_OfScores, total=False):
    """Options for the codes of Q, K and V."""

    recipe: str
    scaling: str
    rotation: str


class AttentionKeywords(_OfRecipe, total=False):
    """Keywords of `sage_attention`, apart from return_lse."""

    attn_mask: torch.Tensor | None
    causal: bool | str
    smooth_k: bool | None
    state: HeadState | None
    skip: SkipState | None
    cu_seqlens: None


class PackedKeywords(_OfRecipe, total=False):
    """Keywords of `sage_attention_varlen`, apart from return_lse."""

    causal: bool
    smooth_k: bool


class DecodeKeywords(_OfScores, total=False):
    """Keywords of `sage_decode_attention`, apart from return_lse."""

    attn_mask: torch.Tensor | None
    causal: bool | str
    lengths: torch.Tensor | None
    ring: bool
    k_balance: torch.Tensor | None
