"""Centre and balance of heads before a rotation, from a sample of their tokens.

A Hadamard rotation spreads what is large in single channels over all of them. Where all keys share a large mean, or a
channel is large in every token, it spreads that, too, and the prologue, which comes later, can't take it back.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...facts import numerics
from ...facts.masking import UNLIMITED
from ..launch import buffer, launch
from ..primitives import head_width
from ..sequences import Packed, keys_of, packed_arguments, rows_of
from .mask_tiles import MaskTiles
from .sample_heads import sampled_balance, sampled_center


_WIDEST = tl.constexpr(numerics.WIDEST_BALANCE)
# tokens of a sample loaded at once: all, as there are few programs and each waits for its loads
_ROWS = 128


class PreBalance(NamedTuple):
    """Vectors of each sample (or packed sequence) and key/value head, fp32 [samples, H_kv, width].

    Q becomes Q · q_factor, and K becomes (K - center) · k_factor.
    """

    center: torch.Tensor
    k_factor: torch.Tensor
    q_factor: torch.Tensor


@triton.jit(do_not_specialize=["sequences", "left", "seq_q", "seq_kv", "kv_heads", "group", "reach_width"])
def _pre_balance_kernel(
    q_ptr, k_ptr, center_ptr, k_factor_ptr, q_factor_ptr, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks,
    stride_kh, reach_ptr, extent_ptr, stride_rb, stride_rh, cu_q_ptr, cu_k_ptr, sequences, left, seq_q, seq_kv,
    kv_heads, group, reach_width,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_MASK: tl.constexpr, CENTERED: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Compute the vectors of one head. Grid: samples · key/value heads."""
    b = tl.program_id(0) // kv_heads
    h = tl.program_id(0) % kv_heads
    q_base = q_ptr + (h * group).to(tl.int64) * stride_qh
    k_base = k_ptr + h.to(tl.int64) * stride_kh
    if PACKED:
        first, seq_q = rows_of(b, cu_q_ptr, sequences, seq_q)
        q_base += first.to(tl.int64) * stride_qs
        first, seq_kv, _, _ = keys_of(b, cu_k_ptr, sequences, seq_kv, seq_q, left, HAS_LEFT)
        k_base += first.to(tl.int64) * stride_ks
    else:
        q_base += b.to(tl.int64) * stride_qb
        k_base += b.to(tl.int64) * stride_kb
    channels = tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * WIDTH + channels
    center = tl.zeros([WIDTH], tl.float32)
    factor = center + 1.0
    extent = seq_kv
    if HAS_MASK:
        row = b * stride_rb + h * stride_rh
        extent = tl.load(extent_ptr + row // reach_width)
        reach_ptr += row
    if (seq_q > 0) & (seq_kv > 0):
        center = sampled_center(k_base, stride_ks, extent, reach_ptr, HEAD_DIM, WIDTH, ROWS, HAS_MASK)
        factor = sampled_balance(
            q_base, stride_qs, stride_qh, seq_q, group, k_base, stride_ks, seq_kv, extent, reach_ptr, center,
            HEAD_DIM, WIDTH, ROWS, HAS_MASK,
        )  # fmt: skip
        factor = tl.minimum(tl.maximum(factor, 1.0 / _WIDEST), _WIDEST)
    tl.store(center_ptr + at, center if CENTERED else center * 0.0)
    tl.store(k_factor_ptr + at, factor)
    tl.store(q_factor_ptr + at, tl.div_rn(tl.full([WIDTH], 1.0, tl.float32), factor))


def launch_pre_balance(
    q: torch.Tensor, k: torch.Tensor, *, mask: MaskTiles, packed: Packed | None, left: int, centered: bool
) -> PreBalance:
    """Find the vectors of Q and K [B, S, H, D].

    left: sliding window of packed sequences, as in `launch_prologue`. centered: False leaves centres at 0.
    """
    kv_heads, head_dim = k.shape[2:]
    samples = k.shape[0] if packed is None else packed.sequences
    width = head_width(head_dim)
    found = PreBalance(*(buffer(samples, kv_heads, width, device=k.device) for _ in range(3)))
    none, has_mask = found.center, mask.reach is not None
    launch(
        _pre_balance_kernel, samples * kv_heads,
        q, k, *found, *q.stride()[:3], *k.stride()[:3],
        mask.reach if has_mask else none, mask.extent if has_mask else none, *mask.reach_strides,
        *packed_arguments(packed, none), left, q.shape[1], k.shape[1], kv_heads, q.shape[2] // kv_heads,
        mask.reach.shape[2] if has_mask else 1,
        HEAD_DIM=head_dim, WIDTH=width, ROWS=_ROWS, HAS_MASK=has_mask, CENTERED=centered, PACKED=packed is not None,
        HAS_LEFT=packed is not None and left != UNLIMITED, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return found
