"""The mixed attention kernel: ordinary key blocks in a cheap format, promoted ones in 16 bit.

A program computes one block of query rows. Both kinds of key blocks share one online softmax. There are three loops,
by the lists of select.py: over ordinary blocks that all rows see completely, over ordinary blocks that need a mask,
and over promoted blocks. P·V is in 16 bit throughout, sums are in fp32.
"""

import triton
import triton.language as tl

from ..attention.softmax import masked_softmax_step
from ..primitives import load_tokens
from .formats import base_codes, packed_codes


_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _visible(tile, rows, seq_kv, offset, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Return which keys of a block the rows see, broadcastable to [BLOCK_Q, BLOCK]."""
    keys = tile * BLOCK + tl.arange(0, BLOCK)
    seen = (keys < seq_kv)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None] + offset)
    return seen


@triton.jit
def _ordinary_scores(q_codes, q_groups, row_scale, codes_ptr, group_scale_ptr, k_scale_ptr, tile, zero,
                     BASE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
                     PACKED_FP4: tl.constexpr):  # fmt: skip
    """Return scores in base 2 [BLOCK_Q, BLOCK] of one ordinary key block.

    zero: start value of the sum. Triton 3.6 and 3.7 can't compile dot_scaled for sm_100 in a loop if they know that it
    is zero.
    """
    keys = tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, WIDTH)
    if PACKED_FP4:
        GROUP: tl.constexpr = 16 if BASE == "nvfp4" else 32
        k = tl.load(codes_ptr + keys[None, :] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[:, None])
        groups = tl.arange(0, WIDTH // GROUP)[None, :]
        k_groups = tl.load(group_scale_ptr + keys[:, None] * (WIDTH // GROUP) + groups)
        sums = tl.zeros([BLOCK_Q, BLOCK], tl.float32) + zero
        scores = tl.dot_scaled(q_codes, q_groups, "e2m1", k, k_groups, "e2m1", acc=sums)
    else:
        k = tl.load(codes_ptr + keys[None, :] * WIDTH + channels[:, None])
        if BASE == "int8" or BASE == "int4":
            scores = tl.dot(q_codes, k, out_dtype=tl.int32).to(tl.float32)
        else:
            scores = tl.dot(q_codes, k)
    return scores * tl.load(k_scale_ptr + keys)[None, :] * row_scale[:, None]


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "heads", "group", "offset"])
def _mixed_attention_kernel(
    q_ptr, k_ptr, v_ptr, codes_ptr, group_scale_ptr, k_scale_ptr, center_ptr, q_weight_ptr, lists_ptr, numbers_ptr,
    out_ptr, lse_ptr, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    stride_vb, stride_vs, stride_vh, seq_q, seq_kv, heads, group, offset, softmax_scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    BASE: tl.constexpr, CAUSAL: tl.constexpr, PROMOTES: tl.constexpr, RETURN_LSE: tl.constexpr,
    PACKED_FP4: tl.constexpr,
):  # fmt: skip
    """Mixed attention of BLOCK_Q query rows of one head; a program for each such block of all heads.

    codes_ptr, group_scale_ptr, k_scale_ptr, center_ptr, q_weight_ptr: written by `_prepare_mixed_kernel`. lists_ptr,
    numbers_ptr: written by `_select_blocks_kernel`. out_ptr: [B, S_q, H, D], lse_ptr: fp32 [B, S_q, H], contiguous.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    m_tiles = tl.cdiv(seq_q, BLOCK_Q)
    n_tiles = tl.cdiv(seq_kv, BLOCK)
    m_tile = tl.program_id(0) % m_tiles
    if CAUSAL:
        m_tile = m_tiles - 1 - m_tile  # a head's longest first, so that the last to run are short
    head_of_batch = tl.program_id(0) // m_tiles
    b = (head_of_batch // heads).to(tl.int64)
    h = head_of_batch % heads
    h_kv = (h // group).to(tl.int64)
    kv_head = b * (heads // group) + h_kv
    rows = m_tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    channels = tl.arange(0, WIDTH)

    q_base = q_ptr + b * stride_qb + h.to(tl.int64) * stride_qh
    q = load_tokens(q_base, rows, stride_qs, seq_q, HEAD_DIM, WIDTH, True).to(tl.float32)
    x = q * tl.load(q_weight_ptr + kv_head * WIDTH + channels)[None, :]
    if PACKED_FP4:
        q_codes, q_groups, q_scale = packed_codes(x, BASE, BLOCK_Q, WIDTH)
    else:
        q_codes, q_scale = base_codes(x, BASE, BLOCK_Q, WIDTH)
        q_groups = q_scale
    row_scale = q_scale * (softmax_scale * LOG2_E)
    # centring K lowered every score of a row by q·c: do the same to promoted blocks, and give it back to the LSE
    center = tl.load(center_ptr + kv_head * WIDTH + channels)
    shift = tl.sum(q * center[None, :], 1) * (softmax_scale * LOG2_E)
    zero = tl.minimum(seq_q, 0).to(tl.float32)

    place = head_of_batch.to(tl.int64) * m_tiles + m_tile
    lists = lists_ptr + place * n_tiles
    plain = tl.load(numbers_ptr + place * 3)
    ordinary = tl.load(numbers_ptr + place * 3 + 1)
    k_base = k_ptr + b * stride_kb + h_kv * stride_kh
    v_base = v_ptr + b * stride_vb + h_kv * stride_vh
    first_key = kv_head * n_tiles * BLOCK
    k_scales = k_scale_ptr + first_key
    if PACKED_FP4:
        codes = codes_ptr + first_key * (WIDTH // 2)
        group_scales = group_scale_ptr + first_key * (WIDTH // (16 if BASE == "nvfp4" else 32))
    else:
        codes = codes_ptr + first_key * WIDTH
        group_scales = group_scale_ptr

    reference = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    for i in tl.range(0, plain, num_stages=STAGES):
        tile = tl.load(lists + i).to(tl.int32)
        values = _ordinary_scores(q_codes, q_groups, row_scale, codes, group_scales, k_scales, tile, zero,
                                  BASE, WIDTH, BLOCK_Q, BLOCK, PACKED_FP4)  # fmt: skip
        new = tl.maximum(reference, tl.max(values, 1))
        p = tl.exp2(values - new[:, None])
        rescale = tl.exp2(reference - new)
        running_sum = tl.fma(running_sum, rescale, tl.sum(p, 1))
        reference = new
        v = load_tokens(v_base, tile * BLOCK + tl.arange(0, BLOCK), stride_vs, seq_kv, HEAD_DIM, WIDTH, False)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    for i in tl.range(plain, ordinary, num_stages=1):
        tile = tl.load(lists + i).to(tl.int32)
        values = _ordinary_scores(q_codes, q_groups, row_scale, codes, group_scales, k_scales, tile, zero,
                                  BASE, WIDTH, BLOCK_Q, BLOCK, PACKED_FP4)  # fmt: skip
        seen = _visible(tile, rows, seq_kv, offset, BLOCK, CAUSAL)
        p, reference, running_sum, rescale = masked_softmax_step(
            values, seen, reference, reference, running_sum, 0.0
        )  # fmt: skip
        v = load_tokens(v_base, tile * BLOCK + tl.arange(0, BLOCK), stride_vs, seq_kv, HEAD_DIM, WIDTH, True)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    if PROMOTES:
        promoted = tl.load(numbers_ptr + place * 3 + 2)
        # load Q again, from an address that the compiler can't tell is the same: else Q stays in registers all along
        again = q_base + tl.minimum(seq_q, 0)
        q_16 = load_tokens(again, rows, stride_qs, seq_q, HEAD_DIM, WIDTH, True).to(v_ptr.dtype.element_ty)
        for i in tl.range(0, promoted, num_stages=1):
            tile = tl.load(lists + n_tiles - 1 - i).to(tl.int32)
            tokens = tile * BLOCK + tl.arange(0, BLOCK)
            v = load_tokens(v_base, tokens, stride_vs, seq_kv, HEAD_DIM, WIDTH, True)
            k = load_tokens(k_base, tokens, stride_ks, seq_kv, HEAD_DIM, WIDTH, True).to(v.dtype)
            scores = tl.dot(q_16, tl.trans(k))
            values = scores * (softmax_scale * LOG2_E) - shift[:, None]
            seen = _visible(tile, rows, seq_kv, offset, BLOCK, CAUSAL)
            p, reference, running_sum, rescale = masked_softmax_step(
                values, seen, reference, reference, running_sum, 0.0
            )  # fmt: skip
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])

    # a row that sees no key gives 0; a NaN in the sum stays NaN
    acc = tl.where((running_sum == 0.0)[:, None], 0.0, tl.div_rn(acc, tl.zeros_like(acc) + running_sum[:, None]))
    is_row = rows < seq_q
    out_row = (b * seq_q + rows) * heads + h
    inside = is_row[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM + channels[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)
    if RETURN_LSE:
        lse = (reference + tl.log2(running_sum) + shift) * _LN_2
        tl.store(lse_ptr + out_row, tl.where(running_sum == 0.0, float("-inf"), lse), mask=is_row)
