"""Gradients of attention by PyTorch's flash backward kernels, for an INT8 forward.

From the forward's output and log-sum-exp. These kernels compute the probabilities again, in 16 bit (fp32 on a CPU).
Nothing of the backward is in 8 bit: only the output and the log-sum-exp hold the rounding of the forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import compat
from ..reference.backward import ref_attention_backward


_FUSED_HEAD_DIM = 192  # beyond it the kernel needs more shared memory than some GPUs have


def has_fused_backward(q: torch.Tensor, attn_mask: torch.Tensor | None = None) -> bool:
    """Return True if PyTorch has a backward kernel for such a call that holds no score matrix.

    Shapes, dtypes and flags alone decide. q: [B, S_q, H, D]. On a CPU always. On CUDA for fp16 and bf16, D <= 192, no
    mask, compute capability 8.0 or newer.
    """
    if q.device.type == "cpu":
        return compat.flash_backward_for_cpu is not None
    return (
        compat.flash_backward is not None
        and attn_mask is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[3] <= _FUSED_HEAD_DIM
        and torch.version.hip is None
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    causal: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v, by PyTorch's kernel or else by `ref_attention_backward`.

    Arguments as of `ref_attention_backward`. out and lse are those of all keys even where k and v are only a part of
    them (ring attention): the gradients of the parts add up.
    """
    if attn_mask is not None:
        q, k, v, attn_mask = _without_hidden_keys(q, k, v, attn_mask)
    if not has_fused_backward(q, attn_mask):
        return ref_attention_backward(
            grad_out, q, k, v, out, lse, scale=scale, attn_mask=attn_mask, causal=causal
        )  # fmt: skip
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    if not causal or q.shape[1] == k.shape[1]:
        dq, dk, dv = _fused(grad_out, q, k, v, out, lse, attn_mask, scale, bool(causal))
    else:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for rows, keys, triangle in _pieces(q.shape[1], k.shape[1], causal):
            by_row, by_key = (x[:, rows] for x in (grad_out, q, out, lse)), (x[:, keys] for x in (k, v))
            (grad_rows, q_rows, out_rows, lse_rows), (k_part, v_part) = by_row, by_key
            parts = _fused(grad_rows, q_rows, k_part, v_part, out_rows, lse_rows, None, scale, triangle)
            for whole, place, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
                whole[:, place] += part
    if groups > 1:
        dk, dv = (x.unflatten(2, (-1, groups)).sum(3, dtype=torch.float32).to(x.dtype) for x in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _without_hidden_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zero K and V where a mask of keys hides them: they may hold NaN there, and 0 · NaN is not 0.

    The mask is returned with four dimensions.
    """
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if mask.shape[1] == mask.shape[2] == 1:
        seen = (mask if mask.dtype == torch.bool else mask > -torch.inf)[:, 0, 0, :, None, None]
        k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    return q, k, v, mask


def _pieces(seq_q: int, seq_kv: int, causal: str) -> list[tuple[slice, slice, bool]]:
    """Split a causal call of two lengths into pieces (rows, keys, is_triangle): a square and a rectangle.

    Row i of the square sees its keys up to i; all rows of the rectangle see all of its keys. PyTorch's kernels
    disagree about the end from which rows are counted where the lengths differ, so they never get such a call.
    """
    every = slice(None)
    side = min(seq_q, seq_kv)
    if causal == "top_left":
        square = (slice(0, side), slice(0, side), True)
        return [square] if seq_kv > seq_q else [square, (slice(side, None), every, False)]
    square = (slice(seq_q - side, None), slice(seq_kv - side, None), True)
    return [square] if seq_q > seq_kv else [square, (every, slice(0, seq_kv - side), False)]


def _fused(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    triangle: bool,
) -> list[torch.Tensor]:
    """Return dq, dk, dv [B, S, H, D] of one piece, computed by PyTorch's kernel."""
    head_dim = q.shape[3]
    lse = lse.transpose(1, 2).contiguous()
    given: Any = [x.transpose(1, 2) for x in (grad_out, q, k, v, out)]
    if q.device.type == "cpu":
        if mask is not None:
            lse = torch.where(lse == -torch.inf, torch.inf, lse)  # as in the reference
            if mask.dtype == torch.bool:
                mask = torch.zeros((), dtype=torch.float32, device="cpu").where(mask, -torch.inf)
            mask = mask.float().expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        found = compat.flash_backward_for_cpu(*given, lse, 0.0, triangle, attn_mask=mask, scale=scale)
        return [x.transpose(1, 2) for x in found]
    # channels of zeros change nothing: the scale is given
    given = [_padded(x, -head_dim % 8) for x in given]
    state = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty((), dtype=torch.uint64, device=q.device)
    lengths = q.shape[1], k.shape[1]
    found = compat.flash_backward(*given, lse, None, None, *lengths, 0.0, triangle, *state, scale=scale)
    return [x[..., :head_dim].transpose(1, 2) for x in found]


def _padded(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Append zeros to the channels of each head, and make the channels contiguous."""
    if channels:
        return F.pad(x, (0, channels))
    return x if x.stride(-1) == 1 else x.contiguous()
