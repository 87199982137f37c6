"""Add the key tiles that lists left out to finished rows, each tile as its mean key and value.

Two launches. The first averages the codes of K and the values of each key tile, before attention. The second runs
after it: an online softmax over the pooled keys of the tiles that a query tile left out, merged into `out` and `lse`
by their log-sum-exps. Both are alike for every format of P·V. Specification: ../../reference/skipping.py.
"""

import torch
import triton
import triton.language as tl

from ...facts.numerics import LOG2_E, pv_dtype
from ...facts.skipping import SkipState
from ..launch import buffer, launch
from ..primitives import load_tokens
from ..prologue.prologue import Prepared
from .skip_tiles import ROWS, quantize_rows


_AT_ONCE = 64  # pooled keys of a step
_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit(do_not_specialize=["seq_kv", "kv_heads"])
def _pool_tiles_kernel(
    codes_ptr, v_ptr, keys_ptr, values_ptr, stride_vb, stride_vs, stride_vh, seq_kv, kv_heads,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Average the codes and the values of one key tile of one head, to [WIDTH] each."""
    which = tl.program_id(0).to(tl.int64)
    n_tiles = tl.cdiv(seq_kv, BLOCK_N)
    head = which // n_tiles
    first = (which % n_tiles).to(tl.int32) * BLOCK_N
    channels = tl.arange(0, WIDTH)
    keys = tl.minimum(seq_kv - first, BLOCK_N).to(tl.float32)
    codes = codes_ptr + which * (BLOCK_N * WIDTH) + tl.arange(0, BLOCK_N)[:, None] * WIDTH + channels[None, :]
    mean = tl.sum(tl.load(codes).to(tl.int32), 0).to(tl.float32)  # zeros beyond the sequence
    mean = tl.div_rn(mean, mean * 0.0 + keys)
    tl.store(keys_ptr + which * WIDTH + channels, mean.to(tl.float16))
    v_base = v_ptr + head // kv_heads * stride_vb + head % kv_heads * stride_vh
    v = load_tokens(v_base, first + tl.arange(0, BLOCK_N), stride_vs, seq_kv, HEAD_DIM, WIDTH, True).to(tl.float32)
    tl.store(values_ptr + which * WIDTH + channels, (tl.sum(v, 0) / keys).to(values_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "heads", "group", "m_tiles"])
def _compensate_kernel(
    q_ptr, keys_ptr, k_scale_ptr, values_ptr, q_weight_ptr, center_ptr, left_out_ptr, numbers_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, seq_q, seq_kv, heads, group, m_tiles, softmax_scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compensate ROWS query rows of one head."""
    part = tl.program_id(0) % PARTS
    which = tl.program_id(0) // PARTS  # query tile, counted over all heads
    head_of_batch = which // m_tiles
    b = head_of_batch // heads
    h = head_of_batch % heads
    kv_head_of_batch = b * (heads // group) + h // group
    n_tiles = tl.cdiv(seq_kv, BLOCK_N)
    first_row = (which % m_tiles * PARTS + part) * ROWS
    number = n_tiles - tl.load(numbers_ptr + which * 2 + 1)
    if (number == 0) | (first_row >= seq_q):
        return
    offs_m = first_row + tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH)
    q, q_int, row_scale = quantize_rows(
        q_ptr, q_weight_ptr, b, h, kv_head_of_batch, offs_m, stride_qb, stride_qs, stride_qh, seq_q, softmax_scale,
        HEAD_DIM, WIDTH,
    )  # fmt: skip
    # the centre lowered every score of the row, but not its log-sum-exp
    center = tl.load(center_ptr + kv_head_of_batch * WIDTH + channels)
    shift = tl.sum(q * center[None, :], 1) * softmax_scale
    codes = q_int.to(tl.float16)
    left_out_ptr += which.to(tl.int64) * n_tiles
    k_scale_ptr += kv_head_of_batch * n_tiles
    keys_ptr += (kv_head_of_batch * n_tiles).to(tl.int64) * WIDTH
    values_ptr += (kv_head_of_batch * n_tiles).to(tl.int64) * WIDTH
    full_tile = tl.log2(tl.full([], BLOCK_N, tl.float32))
    last_tile = tl.log2((seq_kv - (n_tiles - 1) * BLOCK_N).to(tl.float32))
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in tl.range(0, number, AT_ONCE, num_stages=STAGES):
        place = first + tl.arange(0, AT_ONCE)
        tile = tl.load(left_out_ptr + place, mask=place < number, other=0)
        keys = tl.load(keys_ptr + tile[None, :] * WIDTH + channels[:, None])
        scale = tl.load(k_scale_ptr + tile)
        weight = tl.where(place < number, tl.where(tile < n_tiles - 1, full_tile, last_tile), float("-inf"))
        scores = tl.dot(codes, keys) * (row_scale[:, None] * scale[None, :]) + weight[None, :]
        new_top = tl.maximum(top, tl.max(scores, 1))
        rescale = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * rescale + tl.sum(p, 1)
        values = tl.load(values_ptr + tile[:, None] * WIDTH + channels[None, :])
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
        top = new_top

    is_row = offs_m < seq_q
    out_row = (b.to(tl.int64) * seq_q + offs_m) * heads + h  # contiguous [B, S_q, H, D]
    inside = is_row[:, None] & (channels < HEAD_DIM)[None, :]
    outs = out_ptr + out_row[:, None] * HEAD_DIM + channels[None, :]
    visited = tl.load(lse_ptr + out_row, mask=is_row, other=0.0) * _LOG2_E - shift
    new_top = tl.maximum(top, visited)
    rescale = tl.exp2(top - new_top)
    weight = tl.exp2(visited - new_top)
    total = total * rescale + weight
    out = acc * rescale[:, None] + tl.load(outs, mask=inside, other=0.0).to(tl.float32) * weight[:, None]
    tl.store(outs, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + out_row, (new_top + tl.log2(total) + shift) * _LN_2, mask=is_row)


def launch_pool_tiles(v, prepared: Prepared, *, seq_kv: int, block_n: int, width: int, dtype: torch.dtype):
    """Average codes and values by key tile: fp16 and pv_dtype(dtype) [B·H_kv, tiles, width].

    Args:
        v: [B, S_kv, H_kv, D] in 16 bit or fp32, the last stride 1.
        dtype: of q.
    """
    batch, _, kv_heads, head_dim = v.shape
    shape = (batch * kv_heads, -(-seq_kv // block_n), width)
    keys = buffer(*shape, dtype=torch.float16, device=v.device)
    values = buffer(*shape, dtype=pv_dtype(dtype), device=v.device)
    launch(
        _pool_tiles_kernel, shape[0] * shape[1],
        prepared.codes, v, keys, values, v.stride(0), v.stride(1), v.stride(2), seq_kv, kv_heads,
        HEAD_DIM=head_dim, WIDTH=width, BLOCK_N=block_n, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return keys, values


def launch_compensate(
    q, pooled, prepared: Prepared, left_out, numbers, out, lse, skip: SkipState, *, kv_heads: int, seq_kv: int,
    scale: float, width: int,
) -> None:  # fmt: skip
    """Add the mean keys and values of skipped tiles to `out` and `lse`, in place.

    Args:
        pooled: of `launch_pool_tiles`.
        left_out, numbers: int32 [lists, tiles], and those of the MaskTiles, both of `launch_skip_tiles`.
    """
    batch, seq_q, heads, head_dim = q.shape
    m_tiles = skip.lists.shape[2]
    rows = min(ROWS, skip.block_q)
    parts = skip.block_q // rows
    launch(
        _compensate_kernel, batch * heads * m_tiles * parts,
        q, pooled[0], prepared.scale, pooled[1], prepared.q_weight, prepared.center, left_out, numbers, out, lse,
        q.stride(0), q.stride(1), q.stride(2), seq_q, seq_kv, heads, heads // kv_heads, m_tiles,
        float(scale) * LOG2_E,
        HEAD_DIM=head_dim, WIDTH=width, ROWS=rows, PARTS=parts, BLOCK_N=skip.block_k, AT_ONCE=_AT_ONCE, STAGES=2,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
