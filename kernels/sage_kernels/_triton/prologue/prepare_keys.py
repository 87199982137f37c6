"""Quantise K in the prologue: subtract the centre, apply the balance, round, record statistics.

Q is quantised inside the attention kernel; here only its balance is stored. A head without a plan, or with a plan that
does not fit this call, takes centre and balance from a sample of its tokens (sample_heads.py).
"""

import triton
import triton.language as tl

from ...facts.masking import FAINT
from ...facts.state import (
    COUNT_BELOW,
    COUNT_CALLS,
    COUNT_DYNAMIC,
    COUNT_FIELDS,
    COUNT_KEY_MAX,
    COUNT_KEY_MIN,
    COUNT_KEYS,
    COUNT_MISFIT,
    COUNT_OUTSIDE,
    COUNT_PLAN_KEY_A,
    COUNT_PLAN_KEY_B,
    COUNT_STEADY,
    PLAN_CENTER,
    PLAN_FIELDS,
    PLAN_K_WEIGHT,
    PLAN_Q_WEIGHT,
    STAT_FIELDS,
    STAT_K_MAX,
    STAT_K_MIN,
)
from ..primitives import (
    INT8_MAX,
    RELAXED,
    SHRINK_LIMIT,
    dynamic_scale,
    load_tokens,
    nan_unless_finite,
    planned_scale,
    round_to_codes,
)
from ..sequences import keys_of, rows_of, sequence_of, slot_of
from .sample_heads import plan_fits, sampled_balance, sampled_center


_CALLS = tl.constexpr(COUNT_CALLS)
_DYNAMIC = tl.constexpr(COUNT_DYNAMIC)
_OUTSIDE = tl.constexpr(COUNT_OUTSIDE)
_KEYS = tl.constexpr(COUNT_KEYS)
_BELOW = tl.constexpr(COUNT_BELOW)
_MISFIT = tl.constexpr(COUNT_MISFIT)
_KEY_MAX = tl.constexpr(COUNT_KEY_MAX)
_KEY_MIN = tl.constexpr(COUNT_KEY_MIN)
_PLAN_KEY_A = tl.constexpr(COUNT_PLAN_KEY_A)
_PLAN_KEY_B = tl.constexpr(COUNT_PLAN_KEY_B)
_STEADY = tl.constexpr(COUNT_STEADY)
_COUNTS = tl.constexpr(COUNT_FIELDS)
_CENTER = tl.constexpr(PLAN_CENTER)
_K_WEIGHT = tl.constexpr(PLAN_K_WEIGHT)
_Q_WEIGHT = tl.constexpr(PLAN_Q_WEIGHT)
_PLANS = tl.constexpr(PLAN_FIELDS)
_STATS = tl.constexpr(STAT_FIELDS)
_STAT_K_MAX = tl.constexpr(STAT_K_MAX)
_STAT_K_MIN = tl.constexpr(STAT_K_MIN)
_FAINT = tl.constexpr(FAINT)


@triton.jit
def _counted(tokens, seq_kv, reach_ptr, HAS_MASK: tl.constexpr):
    """Return a mask of the keys that count for scales."""
    counted = tokens < seq_kv
    if HAS_MASK:
        counted = tl.load(reach_ptr + tokens) > _FAINT  # it is -inf beyond the sequence
    return counted


@triton.jit
def _smooth(k, counted, center, weight, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SOME_HIDDEN: tl.constexpr):
    """Return keys [ROWS, WIDTH] less the centre, times weight; zero beyond head_dim and if not counted."""
    x = (k - center[None, :]) * weight[None, :]
    if SOME_HIDDEN:
        x = tl.where(counted, x, 0.0)
    if HEAD_DIM != WIDTH:
        x = tl.where((tl.arange(0, WIDTH) < HEAD_DIM)[None, :], x, 0.0)
    return x


@triton.jit
def _to_fp32_again(k):
    """Convert k to fp32 in a form the compiler does not merge with the first conversion.

    Merged, the fp32 values would stay in registers all the time, twice as many as k takes.
    """
    if k.dtype == tl.bfloat16:
        k = (k.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        k = k.to(tl.float32)
    return k


@triton.jit
def _load_tile(
    tile, k_base, stride_ks, end, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load a key tile as a tuple of slices of ROWS keys, in their own dtype; zero from key `end` on."""
    slices = ()
    for step in tl.static_range(BLOCK_N // ROWS):
        tokens = tile * BLOCK_N + step * ROWS + tl.arange(0, ROWS)
        slices = slices + (load_tokens(k_base, tokens, stride_ks, end, HEAD_DIM, WIDTH, True),)
    return slices


@triton.jit
def _prepare_tile(
    slices, tile, seq_kv, reach_ptr, center, weight, planned, head_amax, codes_ptr, scale_ptr,
    k_max, k_min, outside, below, counts,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SCALING: tl.constexpr,
    MASKED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Quantise one key tile, and return the statistics with this tile included.

    slices: from `_load_tile`. They stay in registers until their scale is known, so K is read from memory once.
    codes_ptr, scale_ptr: the tile's first code and scale.
    """
    SOME_HIDDEN: tl.constexpr = MASKED or HAS_MASK
    STEPS: tl.constexpr = BLOCK_N // ROWS
    first = tile * BLOCK_N
    slice_rows = tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH)[None, :]
    top = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)  # by element of a slice; a NaN stays
    low = tl.full([ROWS, WIDTH], float("inf"), tl.float32)
    keys = tl.zeros([ROWS], tl.int32)  # how many count for scales
    if SCALING != "per_token":
        for step in tl.static_range(STEPS):
            tokens = first + step * ROWS + slice_rows
            highest = slices[step].to(tl.float32)
            lowest = highest
            if SOME_HIDDEN:
                counted = _counted(tokens, seq_kv, reach_ptr, HAS_MASK)
                highest = tl.where(counted[:, None], highest, float("-inf"))
                lowest = tl.where(counted[:, None], lowest, float("inf"))
                keys += counted.to(tl.int32)
            top = tl.maximum(top, highest, propagate_nan=tl.PropagateNan.ALL)
            low = tl.minimum(low, lowest)
        # even rounded, centring keeps the order of a channel's keys: so the largest |x| comes from one of these two
        seen = (top >= low) | (top != top)
        reach = tl.maximum(
            tl.abs(_smooth(top, seen, center, weight, HEAD_DIM, WIDTH, SOME_HIDDEN)),
            tl.abs(_smooth(low, seen, center, weight, HEAD_DIM, WIDTH, SOME_HIDDEN)),
            propagate_nan=tl.PropagateNan.ALL,
        )
        # compared as integers NaN is the largest: one reduction finds the maximum and whether there is a NaN
        amax = tl.max(tl.max(reach.to(tl.int32, bitcast=True), 1), 0).to(tl.float32, bitcast=True)
        lost = amax * 0.0
        if SCALING == "per_head":
            amax = head_amax
        scale, inverse = planned_scale(amax, planned)
        tl.store(scale_ptr, scale + lost)
        if SCALING == "planned":
            k_max = tl.maximum(k_max, top)
            k_min = tl.minimum(k_min, low)
            number = BLOCK_N
            if SOME_HIDDEN:
                number = tl.sum(keys, 0)
            counts += number
            below += tl.where((planned > 0) & (amax < SHRINK_LIMIT * INT8_MAX), number, 0)
    FP8: tl.constexpr = codes_ptr.dtype.element_ty == tl.float8e4nv
    for step in tl.static_range(STEPS):
        rows = step * ROWS + slice_rows
        counted = _counted(first + rows, seq_kv, reach_ptr, HAS_MASK)[:, None]
        x = _smooth(_to_fp32_again(slices[step]), counted, center, weight, HEAD_DIM, WIDTH, SOME_HIDDEN)
        if SCALING == "per_token":
            scale, inverse = dynamic_scale(tl.max(tl.abs(x), 1))
            tl.store(scale_ptr + rows, scale + nan_unless_finite(x, 1))
            inverse = inverse[:, None]
        tl.store(codes_ptr + rows[:, None] * WIDTH + channels, round_to_codes(x * inverse, FP8))
    if SCALING == "planned":
        if (planned > 0) & (amax > INT8_MAX):
            beyond = tl.zeros([ROWS, WIDTH], tl.int32)
            for step in tl.static_range(STEPS):
                counted = _counted(first + step * ROWS + slice_rows, seq_kv, reach_ptr, HAS_MASK)[:, None]
                x = _smooth(_to_fp32_again(slices[step]), counted, center, weight, HEAD_DIM, WIDTH, SOME_HIDDEN)
                beyond += (tl.abs(x) > INT8_MAX).to(tl.int32)
            outside += tl.sum(tl.sum(beyond, 1), 0)
    return k_max, k_min, outside, below, counts


@triton.jit
def _prepare_span(
    q_base, k_base, k_int_ptr, k_scale_ptr, center_ptr, q_weight_ptr, head_amax_ptr,
    plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr, shape_key, state_width,
    stride_qs, stride_qh, stride_ks, reach_ptr, extent_ptr, extent_at, b, h, head_of_batch, first_tile, first, end,
    seq_q, seq_kv, group,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, SCALING: tl.constexpr,
    SMOOTH: tl.constexpr, STORE_CENTER: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Quantise tiles `first` to `end` (exclusive) of one head.

    q_base, k_base: the head's first row. b, h: its sample and number. head_of_batch: the row of its centre and balance
    in the buffers. first_tile: the head's first tile in the buffers.
    """
    channels = tl.arange(0, WIDTH)
    is_channel = channels < HEAD_DIM
    # sampled rows loaded at once: 32 numbers a thread
    SAMPLED: tl.constexpr = 4 * ROWS if 4 * ROWS < 128 else 128
    FIT_ROWS: tl.constexpr = ROWS // 2 if ROWS // 2 < 32 else 32
    head_offset = head_of_batch.to(tl.int64)
    extent = seq_kv
    if HAS_MASK:  # extent has one number for each padded row of reach
        extent = tl.load(extent_ptr + extent_at // (tl.cdiv(seq_kv, BLOCK_N) * BLOCK_N))
        reach_ptr += extent_at

    center = tl.zeros([WIDTH], tl.float32)
    weight = tl.full([WIDTH], 1.0, tl.float32)
    q_weight = weight
    planned = tl.zeros([], tl.float32)
    misfit = False
    row = 0
    last = tl.minimum(end * BLOCK_N, seq_kv)
    if SCALING == "planned":
        # start loading the first tile before the plan is read and checked
        slices = _load_tile(first, k_base, stride_ks, last, HEAD_DIM, WIDTH, BLOCK_N, ROWS)
        row = tl.load(row_ptr) + h
        count = counts_ptr + row * _COUNTS
        planned = tl.load(plan_scale_ptr + row)
        plan = plan_ptr + row * (_PLANS * state_width) + channels
        center = tl.load(plan + _CENTER * state_width, mask=is_channel, other=0.0)
        weight = tl.load(plan + _K_WEIGHT * state_width, mask=is_channel, other=0.0)
        q_weight = tl.load(plan + _Q_WEIGHT * state_width, mask=is_channel, other=0.0)
        fits = (tl.load(count + _PLAN_KEY_A) == shape_key) | (tl.load(count + _PLAN_KEY_B) == shape_key)
        fits = fits & (planned > 0)
        misfit = fits & (
            plan_fits(
                q_base, stride_qs, stride_qh, seq_q, group, k_base, stride_ks, extent, reach_ptr, center, weight,
                q_weight, tl.load(count + _STEADY), HEAD_DIM, WIDTH, FIT_ROWS, HAS_MASK,
            )
            == 0
        )  # fmt: skip
        planned = tl.where(fits & (misfit == 0), planned, 0.0)
    if (planned == 0) & (SMOOTH or SCALING == "planned"):  # no plan that fits
        if SMOOTH:
            center = sampled_center(k_base, stride_ks, extent, reach_ptr, HEAD_DIM, WIDTH, SAMPLED, HAS_MASK)
        else:
            center = tl.zeros([WIDTH], tl.float32)
        weight = sampled_balance(
            q_base, stride_qs, stride_qh, seq_q, group, k_base, stride_ks, seq_kv, extent, reach_ptr, center,
            HEAD_DIM, WIDTH, SAMPLED // 2, HAS_MASK,  # Q and K are sampled at once
        )  # fmt: skip
        q_weight = tl.div_rn(tl.full([WIDTH], 1.0, tl.float32), weight)
    if first == 0:
        tl.store(q_weight_ptr + head_offset * WIDTH + channels, q_weight)
        if SCALING == "planned":
            if b == 0:
                tl.atomic_add(count + _CALLS, 1, sem=RELAXED)
                tl.atomic_add(count + _DYNAMIC, (planned == 0.0).to(tl.int32), sem=RELAXED)
                tl.atomic_max(count + _KEY_MAX, shape_key, sem=RELAXED)
                tl.atomic_min(count + _KEY_MIN, shape_key, sem=RELAXED)
    if STORE_CENTER:
        if first == 0:
            tl.store(center_ptr + head_offset * WIDTH + channels, center)

    head_amax = planned
    if SCALING == "per_head":
        head_amax = tl.load(head_amax_ptr + head_offset)
    k_max = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    k_min = tl.full([ROWS, WIDTH], float("inf"), tl.float32)
    outside = tl.zeros([], tl.int32)
    below = tl.zeros([], tl.int32)
    counts = tl.zeros([], tl.int32)
    SCALES: tl.constexpr = BLOCK_N if SCALING == "per_token" else 1
    if SCALING != "planned":  # only now: sampling needs the registers
        slices = _load_tile(first, k_base, stride_ks, last, HEAD_DIM, WIDTH, BLOCK_N, ROWS)
    whole = tl.minimum(end, seq_kv // BLOCK_N)
    # no software pipeline: its registers are worth more as further programs with loads in flight
    for tile in tl.range(first, whole, num_stages=1):
        k_max, k_min, outside, below, counts = _prepare_tile(
            slices, tile, seq_kv, reach_ptr, center, weight, planned, head_amax,
            k_int_ptr + (first_tile + tile) * (BLOCK_N * WIDTH), k_scale_ptr + (first_tile + tile) * SCALES,
            k_max, k_min, outside, below, counts, HEAD_DIM, WIDTH, BLOCK_N, ROWS, SCALING, False, HAS_MASK,
        )  # fmt: skip
        slices = _load_tile(tile + 1, k_base, stride_ks, last, HEAD_DIM, WIDTH, BLOCK_N, ROWS)
    if whole < end:
        k_max, k_min, outside, below, counts = _prepare_tile(
            slices, whole, seq_kv, reach_ptr, center, weight, planned, head_amax,
            k_int_ptr + (first_tile + whole) * (BLOCK_N * WIDTH), k_scale_ptr + (first_tile + whole) * SCALES,
            k_max, k_min, outside, below, counts, HEAD_DIM, WIDTH, BLOCK_N, ROWS, SCALING, True, HAS_MASK,
        )  # fmt: skip
    if SCALING == "planned":
        stat = stats_ptr + row * (_STATS * state_width) + channels
        tl.atomic_max(stat + _STAT_K_MAX * state_width, tl.max(k_max, 0), mask=is_channel, sem=RELAXED)
        tl.atomic_min(stat + _STAT_K_MIN * state_width, tl.min(k_min, 0), mask=is_channel, sem=RELAXED)
        count = counts_ptr + row * _COUNTS
        tl.atomic_add(count + _KEYS, counts * HEAD_DIM, sem=RELAXED)
        if outside > 0:
            tl.atomic_add(count + _OUTSIDE, outside, sem=RELAXED)
        if below > 0:
            tl.atomic_add(count + _BELOW, below * HEAD_DIM, sem=RELAXED)
        if misfit:
            tl.atomic_add(count + _MISFIT, counts * HEAD_DIM, sem=RELAXED)


@triton.jit
def prepare_keys(
    program, q_ptr, k_ptr, k_int_ptr, k_scale_ptr, center_ptr, q_weight_ptr, head_amax_ptr,
    plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr, shape_key, state_width,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, reach_ptr, extent_ptr, stride_rb, stride_rh,
    cu_q_ptr, cu_k_ptr, sequences, left, seq_q, seq_kv, kv_heads, group, programs_per_head, tiles,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, SCALING: tl.constexpr,
    SMOOTH: tl.constexpr, STORE_CENTER: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Quantise `tiles` key tiles of one head (if PACKED, of one sequence) into the buffers of `Prepared`."""
    chunk = program % programs_per_head
    head_of_batch = program // programs_per_head  # b * H_kv + h
    b = (head_of_batch // kv_heads).to(tl.int64)
    h = head_of_batch % kv_heads
    k_base = k_ptr + b * stride_kb + h.to(tl.int64) * stride_kh
    q_base = q_ptr + b * stride_qb + (h * group).to(tl.int64) * stride_qh
    if PACKED:
        # slots of `tiles` tiles each are laid out as those of single tiles: so a program has one sequence
        i = sequence_of(chunk, cu_k_ptr, sequences, seq_kv, tiles * BLOCK_N)
        first_q, rows = rows_of(i, cu_q_ptr, sequences, seq_q)
        first_k, keys, start, _ = keys_of(i, cu_k_ptr, sequences, seq_kv, rows, left, HAS_LEFT)
        first = (chunk - slot_of(i, start, tiles * BLOCK_N)) * tiles
        end = tl.minimum(first + tiles, tl.cdiv(keys, BLOCK_N))
        if (first >= 0) & (first < end) & (rows > 0):
            slots = seq_kv // BLOCK_N + sequences + 1
            _prepare_span(
                q_base + first_q.to(tl.int64) * stride_qs, k_base + first_k.to(tl.int64) * stride_ks,
                k_int_ptr, k_scale_ptr, center_ptr, q_weight_ptr, head_amax_ptr,
                plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr, shape_key, state_width,
                stride_qs, stride_qh, stride_ks, reach_ptr, extent_ptr, 0, b, h, i * kv_heads + h,
                h.to(tl.int64) * slots + slot_of(i, start, BLOCK_N), first, end, rows, keys, group,
                HEAD_DIM, WIDTH, BLOCK_N, SCALING, SMOOTH, STORE_CENTER, HAS_MASK, ROWS,
            )  # fmt: skip
    else:
        n_tiles = tl.cdiv(seq_kv, BLOCK_N)
        _prepare_span(
            q_base, k_base, k_int_ptr, k_scale_ptr, center_ptr, q_weight_ptr, head_amax_ptr,
            plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr, shape_key, state_width,
            stride_qs, stride_qh, stride_ks, reach_ptr, extent_ptr, b * stride_rb + h * stride_rh, b, h,
            head_of_batch, head_of_batch.to(tl.int64) * n_tiles, chunk * tiles,
            tl.minimum((chunk + 1) * tiles, n_tiles), seq_q, seq_kv, group,
            HEAD_DIM, WIDTH, BLOCK_N, SCALING, SMOOTH, STORE_CENTER, HAS_MASK, ROWS,
        )  # fmt: skip
