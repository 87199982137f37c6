"""Input checks of `sage_attention_varlen`."""

from __future__ import annotations

from typing import Any

import torch

from ..facts.recipe import RECIPES
from .attention import check_attention_inputs, check_masking, check_options
from .numbers import check_window
from .tensors import DTYPES, check_tensor


def check_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, *, causal: Any,
    window: Any, softcap: Any, sinks: Any, recipe: Any, scaling: Any, scale: Any, rotation: Any,
) -> None:  # fmt: skip
    """Raise unless `sage_attention_varlen` can do this call, values of the lengths aside.

    TypeError, ValueError or NotImplementedError.
    """
    check_options(recipe, scaling, scale, None, softcap, None, rotation)
    if scaling == "per_head":
        raise NotImplementedError(
            "scaling: got 'per_head' with packed sequences, expected 'per_token' or 'per_block': a scale for each "
            "head of each sequence takes one more pass over all of them; call sage_attention for each sequence"
        )
    if not RECIPES[recipe].packed:
        raise NotImplementedError(
            f"recipe: got {recipe!r} with packed sequences, expected one with P and V in 16 bit or FP8; call "
            "sage_attention for each sequence"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(
            name, x, DTYPES, rank=3, axes="[total, H, D]",
            remedy="all sequences one behind the other; for [B, S, H, D] call sage_attention",
        )  # fmt: skip
    check_attention_inputs(q[None], k[None], v[None])
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_cu_seqlens(name, x, q.device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: got {cu_seqlens_k.shape[0]} numbers, expected cu_seqlens_q's {cu_seqlens_q.shape[0]}: one "
            "for each sequence, and the 0 before them"
        )
    for name, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, torch.SymInt))):
            raise TypeError(f"{name}: got {type(x).__name__}, expected an int or None (reading a tensor would sync)")
    if not isinstance(causal, bool):
        raise TypeError(f"causal: got {causal!r}, expected a bool: the last row of a sequence sees all of its keys")
    check_masking(q[None], q[None], None, causal, None, sinks)
    if window is not None:
        check_window(window)


def _check_cu_seqlens(name: str, x: Any, device: torch.device) -> None:
    axes = "[sequences + 1]: 0 and the end of each sequence"
    check_tensor(name, x, (torch.int32,), device, axes=axes, remedy=f"pass {name}.int()")
    if x.dim() != 1 or x.shape[0] < 2:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {axes}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: got strides {x.stride()}, expected a contiguous tensor; pass {name}.contiguous()")


def check_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> None:
    """Raise ValueError unless the cumulative lengths fit the tensors. Reads them: for tensors on a CPU."""
    for name, x, cu_seqlens, longest in (
        ("q", q, cu_seqlens_q, max_seqlen_q),
        ("k", k, cu_seqlens_k, max_seqlen_k),
    ):
        ends = cu_seqlens.tolist()
        lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
        if ends[0] != 0 or min(lengths) < 0 or ends[-1] > x.shape[0]:
            raise ValueError(
                f"cu_seqlens_{name}: got {_short(ends)}, expected 0 and ascending numbers up to {x.shape[0]}, the "
                f"tokens of {name}"
            )
        if longest is not None and max(lengths) > longest:
            raise ValueError(
                f"max_seqlen_{name}: got {longest}, expected at least {max(lengths)}, the longest of cu_seqlens_{name}"
            )


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"{str(numbers[:7])[:-1]}, ... {numbers[-1]}]"
