"""The pass over K for mixed attention: codes of all key blocks, and numbers to rank them by."""

import triton
import triton.language as tl

from ..primitives import load_tokens
from ..prologue.sample_heads import sampled_balance, sampled_center
from .formats import base_codes, packed_codes


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "kv_heads", "group", "chunks", "tiles"])
def _prepare_mixed_kernel(
    q_ptr, k_ptr, codes_ptr, group_scale_ptr, k_scale_ptr, center_ptr, q_weight_ptr, blocks_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, seq_q, seq_kv, kv_heads, group, chunks, tiles,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SAMPLED: tl.constexpr, BASE: tl.constexpr,
    SELECTOR: tl.constexpr, PACKED_FP4: tl.constexpr,
):  # fmt: skip
    """Quantise `tiles` key blocks of one head, and write the selector's numbers of each block.

    blocks_ptr: fp32 [B·H_kv, blocks, 2, WIDTH], of centred keys: their mean ("block_mean"), or maxima and minima
    ("quest").
    """
    chunk = tl.program_id(0) % chunks
    head_of_batch = (tl.program_id(0) // chunks).to(tl.int64)
    b, h = head_of_batch // kv_heads, head_of_batch % kv_heads
    channels = tl.arange(0, WIDTH)
    k_base = k_ptr + b * stride_kb + h * stride_kh
    q_base = q_ptr + b * stride_qb + h * group * stride_qh
    center = sampled_center(k_base, stride_ks, seq_kv, k_ptr, HEAD_DIM, WIDTH, SAMPLED, False)
    weight = sampled_balance(
        q_base, stride_qs, stride_qh, seq_q, group, k_base, stride_ks, seq_kv, seq_kv, k_ptr, center,
        HEAD_DIM, WIDTH, SAMPLED // 2, False,
    )  # fmt: skip
    if chunk == 0:
        tl.store(center_ptr + head_of_batch * WIDTH + channels, center)
        one = tl.full([WIDTH], 1.0, tl.float32)
        tl.store(q_weight_ptr + head_of_batch * WIDTH + channels, tl.div_rn(one, weight))
    n_tiles = tl.cdiv(seq_kv, BLOCK)
    rows = tl.arange(0, BLOCK)
    for tile in tl.range(chunk * tiles, tl.minimum((chunk + 1) * tiles, n_tiles), num_stages=1):
        tokens = tile * BLOCK + rows
        k = load_tokens(k_base, tokens, stride_ks, seq_kv, HEAD_DIM, WIDTH, True).to(tl.float32)
        inside = (tokens < seq_kv)[:, None] & (channels < HEAD_DIM)[None, :]
        centred = tl.where(inside, k - center[None, :], 0.0)
        first = (head_of_batch * n_tiles + tile) * BLOCK
        at = (first + rows)[:, None]
        if PACKED_FP4:
            GROUP: tl.constexpr = 16 if BASE == "nvfp4" else 32
            codes, group_scales, scale = packed_codes(centred * weight[None, :], BASE, BLOCK, WIDTH)
            groups = tl.arange(0, WIDTH // GROUP)[None, :]
            tl.store(group_scale_ptr + at * (WIDTH // GROUP) + groups, group_scales)
            tl.store(codes_ptr + at * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :], codes)
        else:
            codes, scale = base_codes(centred * weight[None, :], BASE, BLOCK, WIDTH)
            tl.store(codes_ptr + at * WIDTH + channels[None, :], codes)
        tl.store(k_scale_ptr + first + rows, scale)
        block = blocks_ptr + (head_of_batch * n_tiles + tile) * (2 * WIDTH) + channels
        if SELECTOR == "block_mean":
            number = tl.minimum(seq_kv - tile * BLOCK, BLOCK).to(tl.float32)
            total = tl.sum(centred, 0)
            tl.store(block, tl.div_rn(total, total * 0.0 + number))
        elif SELECTOR == "quest":
            high = tl.max(tl.where(inside, centred, float("-inf")), 0)
            low = tl.min(tl.where(inside, centred, float("inf")), 0)
            is_channel = channels < HEAD_DIM
            tl.store(block, tl.where(is_channel, high, 0.0))
            tl.store(block + WIDTH, tl.where(is_channel, low, 0.0))
