"""Attention forward in Triton: scores in INT8 or FP8, P·V in 16 bit, FP8 or INT8, sums in fp32.

One program computes one tile of query rows of one head: it quantises its rows of Q, then loops over the key tiles.

The loop is rotated: P(j - 1)·V(j - 1) is issued right after Q·K(j), so the tensor cores work during the softmax of
tile j. There are two such loops. The first is over key tiles that all rows of the program see completely, the second
over those that need a mask (causal or sliding window, mask tensor, ragged end). So complete tiles pay nothing for
masking. Hidden tiles are not visited.

REFERENCE names the softmax reference, the value (log2) subtracted from a row's scores before the exponential:
    "running"   the largest score so far (online softmax)
    "first"     the largest score of the first key tile (16-bit P)
    "lagged"    the row's largest score in the previous call, from the state (FP8 P)
    "tile"      the largest score of each key tile, so that P uses all of its levels in every tile (INT8 P)
"first" and "lagged" wait for no max and rescale nothing. A third loop computes everything again, with a running max,
if such a reference did not fit.
"""

import triton
import triton.language as tl

from ...facts import recipe
from ...facts.state import COUNT_FIELDS, COUNT_REDONE, COUNT_TRIED
from ..primitives import (
    E4M3_OF_INT8,
    RELAXED,
    dynamic_scale,
    load_tokens,
    nan_unless_finite,
    round_to_codes,
)
from ..prologue.prepare_value_codes import sums_of, value_numbers
from ..prologue.prepare_values import KEYS as _STEP_KEYS
from ..sequences import keys_of, rows_of, sequence_of, slot_of
from .operands import (
    add_product,
    band_tiles,
    load_keys,
    load_values,
    record_queries,
    score_product,
    store_nothing,
    tile_at,
    to_midrange,
)
from .softmax import (
    ADDED_BITS_LIMIT,
    CODES_ADDED_BITS_LIMIT,
    P_CODE_EXPONENT,
    P_EXPONENT_LIMIT,
    P_SIGNED_EXPONENT,
    fixed_softmax_step,
    least_reference,
    masked_step,
    online_softmax_step,
    outgrown,
)


_COUNTS = tl.constexpr(COUNT_FIELDS)
_TRIED = tl.constexpr(COUNT_TRIED)
_REDONE = tl.constexpr(COUNT_REDONE)
_P_EXPONENT = tl.constexpr(recipe.P_EXPONENT)
_LAGGED_EXPONENT = tl.constexpr(recipe.LAGGED_EXPONENT)
_LAGGED_LOWEST = tl.constexpr(recipe.LAGGED_LOWEST)
_LAGGED_HIGHEST = tl.constexpr(recipe.LAGGED_HIGHEST)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=[
    "seq_q", "seq_kv", "heads", "group", "state_width", "left", "right", "offset",
    "reach_step_b", "reach_step_h", "list_step_b", "list_step_h", "list_step_m", "sequences",
])  # fmt: skip
def _attention_fwd_kernel(
    q_ptr, keys, k_scale_ptr, values, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr,
    stats_ptr, row_ptr, counts_ptr, row_max_ptr, v_scale_ptr, state_width,
    stride_qb, stride_qs, stride_qh, stride_vb, stride_vs, stride_vh,
    mask_ptr, reach_ptr, tiles_ptr, numbers_ptr, sinks_ptr, stride_mb, stride_mh, stride_mq, stride_mk,
    reach_step_b, reach_step_h, list_step_b, list_step_h, list_step_m, left, right, offset, softcap,
    cu_q_ptr, cu_k_ptr, sequences, seq_q, seq_kv, heads, group, softmax_scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SCALING: tl.constexpr, RETURN_LSE: tl.constexpr, USE_TMA: tl.constexpr, MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, REFERENCE: tl.constexpr, KEEPS_MAX: tl.constexpr, PV: tl.constexpr,
    TILE_ADDS_BITS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
    QK: tl.constexpr, SUMS_CODES: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_M query rows of one head; a program for each such tile of all heads.

    q_ptr: [B, S_q, H, D]. keys: codes of K, [rows, WIDTH], padded to whole tiles. values: V [B, S_kv, H_kv, D] in 16
    bit, or 8-bit codes of V as the prologue lays them out. keys and values are pointers, or descriptors with USE_TMA.
    k_scale_ptr: quantisation scales of K, one a key tile, or one a key with SCALING "per_token". center_ptr,
    q_weight_ptr: fp32 [B·H_kv, WIDTH], K's centre and the factor of Q's channels (1 / balance). stats_ptr, row_ptr,
    counts_ptr, row_max_ptr: of HeadState. reach_ptr, tiles_ptr, numbers_ptr: of MaskTiles. out_ptr: [B, S_q, H, D],
    lse_ptr: fp32 [B, S_q, H], both contiguous. Pointers that a variant has no use for are not read.
    """
    if PACKED:  # seq_q and seq_kv are totals of all sequences, until one sequence's replace them
        slots = seq_q // BLOCK_M + sequences + 1
        slot = tl.program_id(0) % slots
        if HAS_RIGHT:
            slot = slots - 1 - slot
        h = tl.program_id(0) // slots
        h_kv = h // group
        head_of_batch = h
        b = sequence_of(slot, cu_q_ptr, sequences, seq_q, BLOCK_M)
        kv_head_of_batch = b * (heads // group) + h_kv
        # from here on lengths, rows and window are those of sequence b
        k_tile = h_kv * (seq_kv // BLOCK_N + sequences + 1)
        first_step = h_kv * (seq_kv // _STEP_KEYS + sequences + 1)
        first_out, seq_q = rows_of(b, cu_q_ptr, sequences, seq_q)
        first_row = (slot - slot_of(b, first_out, BLOCK_M)) * BLOCK_M
        if (first_row < 0) | (first_row >= seq_q):
            return
        first_key, seq_kv, start, offset = keys_of(b, cu_k_ptr, sequences, seq_kv, seq_q, left, HAS_LEFT)
        k_tile += slot_of(b, start, BLOCK_N)
        first_step += slot_of(b, start, _STEP_KEYS)
        if seq_kv <= 0:  # the prologue prepared nothing for a sequence without keys
            store_nothing(
                out_ptr, lse_ptr, sinks_ptr, first_out, first_row, seq_q, h, heads,
                BLOCK_M, HEAD_DIM, WIDTH, RETURN_LSE, HAS_SINKS,
            )  # fmt: skip
            return
        b_of_rows = b * 0
        q_first = first_out.to(tl.int64) * stride_qs
        if PV == "16bit" and not USE_TMA:  # added here once, not in every turn of the loop
            values += first_key.to(tl.int64) * stride_vs
            first_key = 0
    else:
        m_tiles = tl.cdiv(seq_q, BLOCK_M)
        m_tile = tl.program_id(0) % m_tiles
        if HAS_RIGHT:
            m_tile = m_tiles - 1 - m_tile  # a head's longest tiles first: the last to run are then short
        first_row = m_tile * BLOCK_M
        head_of_batch = tl.program_id(0) // m_tiles  # b * H + h
        b = head_of_batch // heads
        h = head_of_batch % heads
        h_kv = h // group
        kv_head_of_batch = b * (heads // group) + h_kv
        k_tile = kv_head_of_batch * tl.cdiv(seq_kv, BLOCK_N)
        first_step = kv_head_of_batch * tl.cdiv(seq_kv, _STEP_KEYS)
        first_key = 0
        b_of_rows = b
        q_first = b.to(tl.int64) * stride_qb
        first_out = b.to(tl.int64) * seq_q
    n_tiles = tl.cdiv(seq_kv, BLOCK_N)
    k_row = k_tile * BLOCK_N
    offs_m = first_row + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, WIDTH)
    SCALE_PER_KEY: tl.constexpr = SCALING == "per_token"
    SCALES_AT_ONCE: tl.constexpr = 128
    LOG2_E: tl.constexpr = 1.4426950408889634
    INT8_PV: tl.constexpr = PV == "int8" or PV == "int8_tensor"
    CODE_EXPONENT: tl.constexpr = P_CODE_EXPONENT if PV == "int8" else P_SIGNED_EXPONENT
    EXPONENT: tl.constexpr = CODE_EXPONENT if INT8_PV else _P_EXPONENT if PV == "fp8_e4m3" else 0.0
    LAGGED: tl.constexpr = REFERENCE == "lagged"
    FIXED: tl.constexpr = REFERENCE == "first" or LAGGED
    TILE: tl.constexpr = REFERENCE == "tile"
    # P·V right after the softmax of the same tile: beside tiles this large, registers have no room for an earlier P
    AT_ONCE: tl.constexpr = INT8_PV and TILE_ADDS_BITS
    ADDS_BITS: tl.constexpr = TILE_ADDS_BITS and not FIXED and not SCALE_PER_KEY and QK == "int8"

    # quantise Q: [BLOCK_M, WIDTH]
    q_base = q_ptr + q_first + h.to(tl.int64) * stride_qh
    q = load_tokens(q_base, offs_m, stride_qs, seq_q, HEAD_DIM, WIDTH, True).to(tl.float32)
    x = q * tl.load(q_weight_ptr + kv_head_of_batch * WIDTH + channels)[None, :]
    if SCALING == "planned":
        record_queries(q, stats_ptr, row_ptr, h_kv, state_width, channels, HEAD_DIM)
    amax = tl.max(tl.abs(x), 1)
    if SCALING == "per_block":
        amax = tl.zeros_like(amax) + tl.max(amax, 0)
    if SCALING == "per_head":
        amax = tl.zeros_like(amax) + tl.load(q_amax_ptr + head_of_batch)
    q_scale, inverse = dynamic_scale(amax)
    q_codes = round_to_codes(x * inverse[:, None], QK == "fp8_e4m3")
    row_scale = (q_scale + nan_unless_finite(q, 1)) * (softmax_scale * LOG2_E)
    if QK == "fp8_e4m3":
        row_scale = row_scale * (1.0 / (E4M3_OF_INT8 * E4M3_OF_INT8))
    # Centring K lowered every score of a row by q·c. LSE, soft cap, sinks and kept maxima get it back. Base 2.
    shift = tl.zeros([BLOCK_M], tl.float32)
    if RETURN_LSE or SOFTCAP or HAS_SINKS or KEEPS_MAX:
        center = tl.load(center_ptr + kv_head_of_batch * WIDTH + channels)
    if RETURN_LSE or SOFTCAP or HAS_SINKS:
        shift = tl.sum(q * center[None, :], 1) * (softmax_scale * LOG2_E)

    if KEEPS_MAX:
        midrange = to_midrange(center, stats_ptr, row_ptr, h_kv, state_width, channels, HEAD_DIM)
        kept_shift = tl.sum(q * midrange[None, :], 1) * (softmax_scale * LOG2_E)

    # the key tiles to visit: from the mask's list, or computed from the causal or sliding window
    first = 0
    first_full = 0
    reach = reach_ptr
    mask_rows = mask_ptr
    if MASK == "none":
        first, first_full, full, visited = band_tiles(
            first_row, seq_q, seq_kv, left, right, offset,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT,
        )  # fmt: skip
    else:
        which = b * list_step_b + h * list_step_h + (first_row // BLOCK_M) * list_step_m
        tiles_ptr += which.to(tl.int64) * n_tiles
        full = tl.load(numbers_ptr + which * 2)
        visited = tl.load(numbers_ptr + which * 2 + 1)
        reach += b.to(tl.int64) * reach_step_b + h_kv * reach_step_h
        mask_rows += b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh
    plain = full
    if SOFTCAP:
        plain = 0  # all tiles take the loop with a mask

    # quantisation scales of K: one a key tile, or one a key
    offs_n = tl.arange(0, BLOCK_N)
    if SCALE_PER_KEY:
        k_scales = k_scale_ptr + k_row + offs_n
        scale_step = BLOCK_N
    else:
        k_scales = k_scale_ptr + k_tile
        scale_step = 1
    if ADDS_BITS:
        largest_scale = tl.zeros([SCALES_AT_ONCE], tl.float32)
        for start in range(0, n_tiles, SCALES_AT_ONCE):
            at = start + tl.arange(0, SCALES_AT_ONCE)
            largest_scale = tl.maximum(largest_scale, tl.load(k_scales + at, mask=at < n_tiles, other=0.0))
        LIMIT: tl.constexpr = CODES_ADDED_BITS_LIMIT if INT8_PV else ADDED_BITS_LIMIT
        plain = tl.where(tl.max(largest_scale, 0) * tl.max(row_scale, 0) > LIMIT, 0, plain)

    v_sums = v_scale_ptr
    if INT8_PV:
        v_sums = sums_of(v_scale_ptr, kv_head_of_batch, seq_kv, BLOCK_N, WIDTH)
    reference = tl.full([BLOCK_M], float("-inf"), tl.float32)
    top = reference
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    is_row = offs_m < seq_q
    row_max = row_max_ptr + head_of_batch.to(tl.int64) * seq_q + offs_m
    if LAGGED:
        earlier = tl.load(row_max, mask=is_row, other=0.0) - kept_shift
        # a kept NaN or -inf says nothing about this call: 0 is as good a guess as any
        reference = tl.where(tl.abs(earlier) < P_EXPONENT_LIMIT, earlier - _LAGGED_EXPONENT, 0.0)
    tile = tile_at(0, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
    scores = score_product(q_codes, load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA), QK)
    p, reference, running_sum, top, rescale = masked_step(
        scores, row_scale, tl.load(k_scales + tile * scale_step), shift, softcap, mask_rows, reach, offs_m,
        tile * BLOCK_N + offs_n, stride_mq, stride_mk, left, right, offset, seq_q, seq_kv, reference, running_sum, top,
        MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT, SCALE_PER_KEY, SOFTCAP, EXPONENT, LAGGED, TILE, SUMS_CODES,
    )  # fmt: skip
    # The condition is always true, which the compiler can't know: so the row scales are moved into the scores' layout
    # once, not once a tile. It is false where the sum is NaN, and there either choice leaves NaN in the output.
    row_scale = tl.where(running_sum > -1.0, row_scale, running_sum if LAGGED else reference)
    if LAGGED:
        reference = tl.where(running_sum > -1.0, reference, top)
    LATE: tl.constexpr = PV != "16bit"  # rescale acc as the next product is added
    rescale = tl.full([BLOCK_M], 1.0, tl.float32)
    if AT_ONCE:
        v = load_values(
            values, v_sums, b_of_rows, tile * BLOCK_N, first_key, h_kv, first_step, seq_kv,
            reach, stride_vb, stride_vs, stride_vh, BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, True, MASK, PV, PACKED, PARTS,
        )  # fmt: skip
        acc = add_product(acc, rescale, p, v, PV, BLOCK_M, BLOCK_N, PARTS, ASM)
    for i in tl.range(1, plain, num_stages=STAGES):
        before = tile_at(i - 1, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        tile = tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        codes = load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA)
        scores = score_product(q_codes, codes, QK)
        key_scale = tl.load(k_scales + tile * scale_step)
        v = load_values(
            values, v_sums, b_of_rows, (tile if AT_ONCE else before) * BLOCK_N, first_key, h_kv, first_step, seq_kv,
            reach, stride_vb, stride_vs, stride_vh, BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, False, MASK, PV, PACKED, PARTS,
        )  # fmt: skip
        if not AT_ONCE:
            acc = add_product(acc, rescale, p, v, PV, BLOCK_M, BLOCK_N, PARTS, ASM)
        if FIXED:
            if LAGGED:  # read after the loop only, so nothing waits for it
                top = tl.maximum(top, tl.max(scores, 1).to(tl.float32) * (row_scale * key_scale))
            p, running_sum = fixed_softmax_step(scores, row_scale, key_scale, reference, running_sum, SCALE_PER_KEY)
        else:
            p, reference, running_sum, rescale = online_softmax_step(
                scores, row_scale, key_scale, reference, least_reference(reference, top, TILE), running_sum,
                SCALE_PER_KEY, EXPONENT, ADDS_BITS, SUMS_CODES,
            )  # fmt: skip
            if TILE:
                top = tl.maximum(top, reference)
            if not LATE:
                acc = acc * rescale[:, None]
            if AT_ONCE:
                acc = add_product(acc, rescale, p, v, PV, BLOCK_M, BLOCK_N, PARTS, ASM)
    for i in tl.range(tl.maximum(plain, 1), visited, num_stages=1):
        before = tile_at(i - 1, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        tile = tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        codes = load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA)
        scores = score_product(q_codes, codes, QK)
        v = load_values(
            values, v_sums, b_of_rows, (tile if AT_ONCE else before) * BLOCK_N, first_key, h_kv, first_step, seq_kv,
            reach, stride_vb, stride_vs, stride_vh, BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, True, MASK, PV, PACKED, PARTS,
        )  # fmt: skip
        if not AT_ONCE:
            acc = add_product(acc, rescale, p, v, PV, BLOCK_M, BLOCK_N, PARTS, ASM)
        p, reference, running_sum, top, factor = masked_step(
            scores, row_scale, tl.load(k_scales + tile * scale_step), shift, softcap, mask_rows, reach, offs_m,
            tile * BLOCK_N + offs_n, stride_mq, stride_mk, left, right, offset, seq_q, seq_kv, reference, running_sum,
            top, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT, SCALE_PER_KEY, SOFTCAP, EXPONENT, LAGGED, TILE, SUMS_CODES,
        )  # fmt: skip
        if not LAGGED:
            rescale = factor
        if not LATE:
            acc = acc * factor[:, None]
        if AT_ONCE:
            acc = add_product(acc, rescale, p, v, PV, BLOCK_M, BLOCK_N, PARTS, ASM)
    if not AT_ONCE:
        tile = tile_at(tl.maximum(visited, 1) - 1, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        v = load_values(
            values, v_sums, b_of_rows, tile * BLOCK_N, first_key, h_kv, first_step, seq_kv,
            reach, stride_vb, stride_vs, stride_vh, BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, True, MASK, PV, PACKED, PARTS,
        )  # fmt: skip
        acc = add_product(acc, rescale, p, v, PV, BLOCK_M, BLOCK_N, PARTS, ASM)
    if FIXED:
        if LAGGED:
            # compare each row's largest score with the range of e4m3; -inf: the row saw no key, or only NaN
            fits = (top <= reference + _LAGGED_HIGHEST) & (top >= reference + _LAGGED_LOWEST)
            fits = fits | (top == float("-inf")) | (offs_m >= seq_q)
            again = tl.min(fits.to(tl.int32), 0) == 0
        else:
            again = outgrown(acc, running_sum)
        if SCALING == "planned":
            count = counts_ptr + (tl.load(row_ptr) + h_kv) * _COUNTS
            tl.atomic_add(count + _TRIED, 1, sem=RELAXED)
            tl.atomic_add(count + _REDONE, again.to(tl.int32), sem=RELAXED)
        if again:  # rare: compute everything again with a running max, tile after tile
            reference = tl.full([BLOCK_M], float("-inf"), tl.float32)
            running_sum = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
            for i in tl.range(0, visited, num_stages=1):
                tile = tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
                v = load_values(
                    values, v_sums, b_of_rows, tile * BLOCK_N, first_key, h_kv, first_step, seq_kv, reach,
                    stride_vb, stride_vs, stride_vh, BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, True, MASK, PV, PACKED, PARTS,
                )  # fmt: skip
                codes = load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA)
                scores = score_product(q_codes, codes, QK)
                p, reference, running_sum, top, factor = masked_step(
                    scores, row_scale, tl.load(k_scales + tile * scale_step), shift, softcap, mask_rows, reach, offs_m,
                    tile * BLOCK_N + offs_n, stride_mq, stride_mk, left, right, offset, seq_q, seq_kv, reference,
                    running_sum, top,
                    MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT, SCALE_PER_KEY, SOFTCAP, EXPONENT, False, False, False,
                )  # fmt: skip
                if not LATE:
                    acc = acc * factor[:, None]
                acc = add_product(acc, factor, p, v, PV, BLOCK_M, BLOCK_N, PARTS, ASM)
            top = tl.where(tl.abs(reference) < P_EXPONENT_LIMIT, reference + EXPONENT, reference)
    elif KEEPS_MAX:
        top = tl.where(tl.abs(reference) < P_EXPONENT_LIMIT, reference + EXPONENT, reference)
    if KEEPS_MAX:
        # any finite number will do for a row that saw no key, or a NaN
        kept = top + kept_shift
        tl.store(row_max, tl.where(tl.abs(kept) < float("inf"), kept, 0.0), mask=is_row)
    if LAGGED:
        reference = tl.where(top == float("-inf"), top, reference)  # -inf, as with a running max, if no key was seen

    if SOFTCAP:
        shift = shift * 0.0  # capped scores hold q·c already
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + h) * LOG2_E - shift
        new_reference = tl.maximum(reference, sink)
        finite = tl.where(new_reference == float("-inf"), 0.0, new_reference)
        rescale = tl.exp2(reference - finite)
        acc = acc * rescale[:, None]
        sink_weight = tl.exp2(sink - finite)
        running_sum = tl.fma(running_sum, rescale, sink_weight)
        reference = new_reference
    share = running_sum * 0.0 + 1.0  # of the softmax weights, the part of the keys: a sink has no value
    if INT8_PV and HAS_SINKS:
        share = (running_sum - sink_weight) / running_sum
    sees_nothing = (running_sum == 0.0) & (reference == float("-inf"))
    out = tl.where(sees_nothing[:, None], 0.0, acc / running_sum[:, None])
    if INT8_PV:
        v_scale, center_v = value_numbers(v_scale_ptr, kv_head_of_batch, seq_kv, channels, BLOCK_N, WIDTH)
        largest: tl.constexpr = 65504.0 if out_ptr.dtype.element_ty == tl.float16 else 3.38e38
        out = tl.fma(out, v_scale[None, :], share[:, None] * center_v[None, :])
        out = tl.clamp(out, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        out = tl.where(sees_nothing[:, None], 0.0, out)
    if PV == "fp8_e4m3":
        v_scale = tl.load(v_scale_ptr + kv_head_of_batch * WIDTH + channels)
        # rounded weights may push a mean of finite values beyond the largest finite number
        largest: tl.constexpr = 65504.0 if out_ptr.dtype.element_ty == tl.float16 else 3.38e38
        out = tl.clamp(out * v_scale[None, :], -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    out_row = (first_out + offs_m).to(tl.int64) * heads + h  # contiguous [B, S_q, H, D]
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + channels[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (channels < HEAD_DIM)[None, :],
    )
    if RETURN_LSE:
        tl.store(lse_ptr + out_row, (reference + tl.log2(running_sum) + shift) * _LN_2, mask=is_row)
