"""Decode attention: few queries over an INT8 KV cache, with the keys split over programs.

The time is that of reading the cache, so all instructions must fit into it. The query heads of a group share one tile
of rows, and these rows are the narrow side of the tensor cores' products (8, not 16).

Scores: each channel of Q is written as two INT8 codes (15 bits), and K's codes are used as they are. So the only error
is the cache's own rounding. The second integer product costs 16 matrix instructions for 64 keys at head_dim 128;
converting K would cost 320 instructions.

Values: an INT8 code is exact in fp16. A value's scale is added to the softmax exponent. So fp16 has to hold only the
product of probability and scale relative to the largest of its tile, however large scores and values are.
"""

import triton
import triton.language as tl

from ...facts.numerics import LOG2_E
from ..compat import gdc_launch_dependents
from ..primitives import AMAX_FLOOR, INT8_MAX, load_bias, nan_unless_finite, round_to_int
from .cache_tiles import as_fp16, load_codes, load_scales


_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(LOG2_E)
_LOW_STEPS = tl.constexpr(254.0)  # steps of the low code in one step of the high code; see reference/decode.py
_LOW_STEPS_INT = tl.constexpr(254)
_TWO_LOG2_E = tl.constexpr(2.8853900817779268)


@triton.jit
def _quantize_queries(q):
    """Write fp32 rows q [BLOCK_M, WIDTH] as scale · (high + low / 254).

    Returns: high and low, INT8 [BLOCK_M, WIDTH], and scale [BLOCK_M].
    """
    amax = tl.maximum(tl.max(tl.abs(q), 1), AMAX_FLOOR)
    ratio = q * tl.div_rn(amax * 0.0 + INT8_MAX, amax)[:, None]
    high = round_to_int(ratio)
    low = round_to_int((ratio - high.to(tl.float32)) * _LOW_STEPS)
    scale = tl.div_rn(amax, amax * 0.0 + INT8_MAX) + nan_unless_finite(q, 1)
    return high.to(tl.int8), low.to(tl.int8), scale


@triton.jit
def _step(tile, n_keys, k, v, k_scale, v_scale, high, low, row_scale, shift, positions, mask_rows, stride_mk, is_row,
          left, right, softcap, even, odd, top, total, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
          MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
          SOFTCAP: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Add one key tile to the online softmax; return the new even, odd, top and total.

    Tiles are [keys, rows] and [channels, rows]: so the tensor cores' narrow side is 8, not 16.
    top: maximum so far of score + log2(value scale), base 2, [rows].
    total: softmax sum so far, [keys, rows]. It is summed over the keys once, after the last tile, because that sum
    goes across warps.
    """
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = keys < n_keys
    k_scale = k_scale.to(tl.float32)
    v_scale = v_scale.to(tl.float32)

    scores = tl.dot(k, high.T, out_dtype=tl.int32) * _LOW_STEPS_INT + tl.dot(k, low.T, out_dtype=tl.int32)
    x = scores.to(tl.float32) * k_scale[:, None]
    weight = tl.log2(v_scale)[:, None]
    if SOFTCAP:
        x = tl.fma(x, row_scale[None, :], shift[None, :]) * tl.div_rn(softcap * 0.0 + 1.0, softcap)
        x = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(x * _TWO_LOG2_E)))  # cap · tanh
        x = x + weight
    else:
        x = tl.fma(x, row_scale[None, :], weight)
    if MASKED:
        visible = inside[:, None]
        if HAS_LEFT:
            visible = visible & (keys[:, None] >= (positions - left)[None, :])
        if HAS_RIGHT:
            visible = visible & (keys[:, None] <= (positions + right)[None, :])
        if MASK == "keys":
            bias = load_bias(mask_rows + keys.to(tl.int64) * stride_mk, inside)[:, None]
        if MASK == "rows":
            pointers = mask_rows[None, :] + keys.to(tl.int64)[:, None] * stride_mk
            bias = load_bias(pointers, is_row[None, :] & inside[:, None])
        if MASK != "none":
            visible = visible & (bias > float("-inf"))
            if HAS_BIAS:
                x = x + bias
        x = tl.where(visible, x, float("-inf"))

    tile_top = tl.max(x, 0)
    reference = tile_top
    if MASKED:  # a row that sees no key of the tile has a maximum of -inf, and -inf - -inf is NaN
        reference = tl.where(tile_top == float("-inf"), 0.0, tile_top)
    e = tl.exp2(x - reference[None, :])
    share = e * (1.0 / v_scale)[:, None]
    if MASKED:
        share = tl.where(visible, share, 0.0)  # the scale of a hidden value may be NaN
    new_top = tl.maximum(top, tile_top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - safe)
    tile_rescale = tl.exp2(tile_top - safe)
    total = tl.fma(share, tile_rescale[None, :], total * rescale[None, :])
    p = e.to(tl.float16)
    v_even, v_odd = as_fp16(v.T, ASM)
    even = tl.fma(tl.dot(v_even, p), tile_rescale[None, :], even * rescale[None, :])
    odd = tl.fma(tl.dot(v_odd, p), tile_rescale[None, :], odd * rescale[None, :])
    return even, odd, new_top, total


# Lengths change with every token: no kernel may be compiled for one of them.
_VARYING = ["seq_q", "capacity", "left", "right", "row_tiles", "stride_ksb", "stride_ksh", "stride_vsb", "stride_vsh",
            "stride_mb", "stride_mh", "stride_mq", "splits", "all_rows"]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["k_scale_ptr", "v_scale_ptr", "mask_ptr"])
def _decode_attention_kernel(
    q_ptr, k_codes_ptr, k_scale_ptr, v_words_ptr, v_scale_ptr, mean_ptr, balance_ptr, lengths_ptr, mask_ptr, sinks_ptr,
    out_ptr, lse_ptr, stride_qb, stride_qs, stride_qh,
    stride_kcb, stride_kch, stride_kcn, stride_ksb, stride_ksh, stride_ksn,
    stride_vcb, stride_vch, stride_vcn, stride_vsb, stride_vsh, stride_vsn,
    stride_mb, stride_mh, stride_mq, stride_mk, stride_length,
    seq_q, capacity, kv_heads, row_tiles, splits, all_rows, left, right, softcap, softmax_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_BALANCE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_SINKS: tl.constexpr, RING: tl.constexpr, PARTIAL: tl.constexpr, RETURN_LSE: tl.constexpr, ASM: tl.constexpr,
    EVICTION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend up to BLOCK_M rows (query, head) of one key/value head to one split of its keys.

    PARTIAL: write out [splits, B, S_q, H, D] and lse [splits, B, S_q, H], both fp32, lse base 2, for the combine step.
    OVERLAP: let the combine step's programs start when all programs here are through with their keys; they wait until
    the results are written.
    """
    which = tl.program_id(0)
    row_tile = which * 0
    if row_tiles > 1:  # programs that read the same keys are neighbours, for L2
        row_tile = which % row_tiles
        which = which // row_tiles
    split = which % splits
    head = which // splits
    # 32 bits save registers during the loop; their products with strides need 64
    sample, kv_head = head // kv_heads, head % kv_heads
    b, h_kv = sample.to(tl.int64), kv_head.to(tl.int64)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < seq_q * GROUP
    s = rows // GROUP
    h = kv_head * GROUP + rows % GROUP
    channels = tl.arange(0, WIDTH)

    # how many tokens there are, and the rows' positions among them
    seen = tl.full([], 0, tl.int64) + capacity
    if HAS_LENGTHS:
        seen = tl.maximum(tl.load(lengths_ptr + b * stride_length).to(tl.int64), 0)
    n_keys = tl.minimum(seen, capacity).to(tl.int32)
    first_slot = tl.where(seen > capacity, seen % capacity, 0)
    offset = n_keys - seq_q
    positions = offset + s

    # key tiles: begin to end are visible to some row, full_begin to full_end fully to all; then this split's share
    first_s = row_tile * BLOCK_M // GROUP
    last_s = tl.minimum(row_tile * BLOCK_M + BLOCK_M - 1, seq_q * GROUP - 1) // GROUP
    begin = 0
    end = tl.cdiv(n_keys, BLOCK_N)
    full_begin = 0
    full_end = n_keys // BLOCK_N
    if HAS_LEFT:
        begin = tl.maximum(offset + first_s - left, 0) // BLOCK_N
        full_begin = tl.cdiv(tl.maximum(offset + last_s - left, 0), BLOCK_N)
    if HAS_RIGHT:
        end = tl.minimum(end, tl.cdiv(tl.maximum(offset + last_s + right + 1, 0), BLOCK_N))
        full_end = tl.minimum(full_end, tl.maximum(offset + first_s + right + 1, 0) // BLOCK_N)
    if MASK != "none":
        full_end = 0
    share = tl.cdiv(tl.maximum(end - begin, 0), splits)
    begin = begin + split * share
    end = tl.minimum(begin + share, end)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(end, begin))
    full_end = tl.maximum(tl.minimum(full_end, end), full_begin)

    k_base = k_codes_ptr + b * stride_kcb + h_kv * stride_kch
    v_base = v_words_ptr + b * stride_vcb + h_kv * stride_vch
    k_scales = k_scale_ptr + b * stride_ksb + h_kv * stride_ksh
    v_scales = v_scale_ptr + b * stride_vsb + h_kv * stride_vsh
    q_rows = b * stride_qb + s.to(tl.int64) * stride_qs + h.to(tl.int64) * stride_qh
    inside = is_row[:, None] & (channels < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    balanced = q
    if HAS_BALANCE:
        balance = tl.load(balance_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=1.0)
        balanced = q * tl.div_rn(balance * 0.0 + 1.0, balance)[None, :]
    high, low, q_scale = _quantize_queries(balanced)
    row_scale = q_scale * (softmax_scale * _LOG2_E / _LOW_STEPS)
    shift = tl.zeros([BLOCK_M], tl.float32)
    if HAS_MEAN and (SOFTCAP or HAS_SINKS or RETURN_LSE):
        mean = tl.load(mean_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=0.0)
        shift = tl.sum(q * mean[None, :], 1) * (softmax_scale * _LOG2_E)

    mask_rows = mask_ptr + b * stride_mb
    if MASK == "rows":
        mask_rows += h.to(tl.int64) * stride_mh + s.to(tl.int64) * stride_mq
    even = tl.zeros([WIDTH // 2, BLOCK_M], tl.float32)
    odd = tl.zeros([WIDTH // 2, BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if full_begin < full_end:
        k_scale, v_scale = load_scales(
            full_begin, n_keys, first_slot, capacity, k_scales, v_scales, stride_ksn, stride_vsn, BLOCK_N, RING, False
        )
        for tile in tl.range(full_begin, full_end, num_stages=STAGES):
            # loaded one tile ahead by hand: Triton's pipeliner only does so for operands of products
            next_k_scale, next_v_scale = load_scales(
                tl.minimum(tile + 1, full_end - 1), n_keys, first_slot, capacity, k_scales, v_scales, stride_ksn,
                stride_vsn, BLOCK_N, RING, False,
            )  # fmt: skip
            k, v = load_codes(
                tile, n_keys, first_slot, capacity, k_base, v_base, stride_kcn, stride_vcn, HEAD_DIM, WIDTH, BLOCK_N,
                RING, False, EVICTION,
            )  # fmt: skip
            even, odd, top, total = _step(
                tile, n_keys, k, v, k_scale, v_scale, high, low, row_scale, shift, positions, mask_rows, stride_mk,
                is_row, left, right, softcap, even, odd, top, total, BLOCK_N, False, MASK, HAS_BIAS, HAS_LEFT,
                HAS_RIGHT, SOFTCAP, ASM,
            )  # fmt: skip
            k_scale, v_scale = next_k_scale, next_v_scale
    # without a mask only few tiles come here: a pipeline would only take registers from the loop above
    edge_stages: tl.constexpr = STAGES if MASK != "none" else 1
    for i in tl.range(0, tl.maximum(end - begin, 0) - (full_end - full_begin), num_stages=edge_stages):
        tile = begin + i
        tile += tl.where(tile >= full_begin, full_end - full_begin, 0)
        k_scale, v_scale = load_scales(
            tile, n_keys, first_slot, capacity, k_scales, v_scales, stride_ksn, stride_vsn, BLOCK_N, RING, True
        )
        k, v = load_codes(
            tile, n_keys, first_slot, capacity, k_base, v_base, stride_kcn, stride_vcn, HEAD_DIM, WIDTH, BLOCK_N,
            RING, True, EVICTION,
        )  # fmt: skip
        even, odd, top, total = _step(
            tile, n_keys, k, v, k_scale, v_scale, high, low, row_scale, shift, positions, mask_rows, stride_mk,
            is_row, left, right, softcap, even, odd, top, total, BLOCK_N, True, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT,
            SOFTCAP, ASM,
        )  # fmt: skip

    if OVERLAP:
        gdc_launch_dependents()
    total = tl.sum(total, 0)
    acc = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), (BLOCK_M, WIDTH))
    if SOFTCAP:
        shift = shift * 0.0  # the capped scores are the true ones
    if HAS_SINKS:  # counted in the first split only
        sink = tl.load(sinks_ptr + h, mask=is_row & (split == 0), other=float("-inf")) * _LOG2_E - shift
        new_top = tl.maximum(top, sink)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - safe)
        acc = acc * rescale[:, None]
        total = tl.fma(total, rescale, tl.exp2(sink - safe))
        top = new_top
    out = tl.where(((total == 0.0) & (top == float("-inf")))[:, None], 0.0, acc / total[:, None])
    lse = top + tl.log2(total) + shift
    if not RING:
        overflow = seen > capacity  # some tokens had no room in the cache: every result would be wrong
        out = tl.where(overflow, float("nan"), out)
        lse = tl.where(overflow, float("nan"), lse)
    batch_rows = ((sample * seq_q + s) * (kv_heads * GROUP) + h).to(tl.int64)  # contiguous [B, S_q, H]
    if PARTIAL:
        batch_rows += split.to(tl.int64) * all_rows
        tl.store(lse_ptr + batch_rows, lse, mask=is_row)
    elif RETURN_LSE:
        tl.store(lse_ptr + batch_rows, lse * _LN_2, mask=is_row)
    tl.store(
        out_ptr + batch_rows[:, None] * HEAD_DIM + channels[None, :], out.to(out_ptr.dtype.element_ty), mask=inside
    )
