"""One kernel that ends a denoising step: it records the step's statistics and plans the next step.

It covers all call sites, and does the same as `planning/state.py` with tensor operations, for the rules "timestep" and
"timestep_adaptive". There it takes some two hundred small launches, which the host makes slower than the GPU runs
them, and the next step waits for all. The rules are explained there; the names here follow `planning/table.py`.
"""

import torch
import triton
import triton.language as tl

from ...facts.recipe import CHANNEL_FLOOR, V_AMAX_FLOOR, V_CODE
from ...facts.state import (
    COUNT_CALLS,
    COUNT_FIELDS,
    COUNT_KEY_MAX,
    COUNT_KEY_MIN,
    COUNT_PLAN_KEY_A,
    COUNT_PLAN_KEY_B,
    COUNT_STEADY,
    KEY_NONE,
    PLAN_CENTER,
    PLAN_FIELDS,
    PLAN_K_WEIGHT,
    PLAN_Q_WEIGHT,
    PLAN_V_SCALE,
    STAT_FIELDS,
    STAT_K_MAX,
    STAT_K_MIN,
    STAT_Q_AMAX,
    STAT_V_AMAX,
    HeadState,
)
from ..launch import launch
from ..primitives import INT8_MAX, nan_unless_finite


_CALLS = tl.constexpr(COUNT_CALLS)
_COUNTS = tl.constexpr(COUNT_FIELDS)
_KEY_MAX = tl.constexpr(COUNT_KEY_MAX)
_KEY_MIN = tl.constexpr(COUNT_KEY_MIN)
_PLAN_KEY_A = tl.constexpr(COUNT_PLAN_KEY_A)
_PLAN_KEY_B = tl.constexpr(COUNT_PLAN_KEY_B)
_STEADY = tl.constexpr(COUNT_STEADY)
_NO_KEY = tl.constexpr(KEY_NONE)
_LARGEST_KEY = tl.constexpr(2**31 - 1)
_PLANS = tl.constexpr(PLAN_FIELDS)
_CENTER = tl.constexpr(PLAN_CENTER)
_K_WEIGHT = tl.constexpr(PLAN_K_WEIGHT)
_Q_WEIGHT = tl.constexpr(PLAN_Q_WEIGHT)
_V_SCALE = tl.constexpr(PLAN_V_SCALE)
_STATS = tl.constexpr(STAT_FIELDS)
_Q_AMAX = tl.constexpr(STAT_Q_AMAX)
_K_MAX = tl.constexpr(STAT_K_MAX)
_K_MIN = tl.constexpr(STAT_K_MIN)
_V_AMAX = tl.constexpr(STAT_V_AMAX)
_CHANNEL_FLOOR = tl.constexpr(CHANNEL_FLOOR)
_V_AMAX_FLOOR = tl.constexpr(V_AMAX_FLOOR)
_V_CODE = tl.constexpr(V_CODE)


@triton.jit
def _load_stats(base, channels, width):
    """Load max |q|, max k, min k and max |v| of a head: [WIDTH] each."""
    inside = channels < width
    q = tl.load(base + _Q_AMAX * width + channels, mask=inside, other=0.0)
    high = tl.load(base + _K_MAX * width + channels, mask=inside, other=0.0)
    low = tl.load(base + _K_MIN * width + channels, mask=inside, other=0.0)
    v = tl.load(base + _V_AMAX * width + channels, mask=inside, other=0.0)
    return q, high, low, v


@triton.jit
def _store_stats(base, channels, width, q, high, low, v):
    inside = channels < width
    tl.store(base + _Q_AMAX * width + channels, q, mask=inside)
    tl.store(base + _K_MAX * width + channels, high, mask=inside)
    tl.store(base + _K_MIN * width + channels, low, mask=inside)
    tl.store(base + _V_AMAX * width + channels, v, mask=inside)


@triton.jit
def _all_finite(x):
    return nan_unless_finite(x, 0) == 0.0


@triton.jit
def _floored(amax):
    """Bound amax from below, relative to the largest channel, so that no channel's range is 0."""
    return tl.maximum(amax, tl.max(amax, 0) * _CHANNEL_FLOOR)


@triton.jit
def _clamped(new, limit, move):
    """Clamp new to [limit / move, limit · move]; unchanged where limit is 0."""
    held = tl.minimum(tl.maximum(new, limit * (1.0 / move)), limit * move)
    return tl.where(limit > 0, held, new)


@triton.jit
def _moved(q_o, high_o, low_o, v_o, q, high, low, v, is_channel, move):
    """Return the new statistics, held within the distance an entry may move in one step.

    As `planning.table.moved`. The names that end in _o are of the old entry.
    """
    old_high, old_low = high_o * 0.5, low_o * 0.5
    old_center = old_high + old_low
    room = _floored(tl.where(is_channel, old_high - old_low, 0.0))
    half_high, half_low = high * 0.5, low * 0.5
    center = half_high + half_low
    half = half_high - half_low
    held_half = _clamped(half, room, move)
    held_center = tl.minimum(tl.maximum(center, old_center - room), old_center + room)
    held_center = tl.where(room > 0, held_center, center)
    same = (held_half == half) & (held_center == center)
    return (
        tl.where(is_channel, _clamped(q, _floored(tl.where(is_channel, q_o, 0.0)), move), q),
        tl.where(same | (is_channel == 0), high, held_center + held_half),
        tl.where(same | (is_channel == 0), low, held_center - held_half),
        tl.where(is_channel, _clamped(v, _floored(tl.where(is_channel, v_o, 0.0)), move), v),
    )


@triton.jit(do_not_specialize=["rows", "width", "bins"])
def _plan_step_kernel(
    plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, table_ptr, table_run_ptr, run_ptr, totals_ptr, is_channel_ptr,
    finished_ptr, next_ptr, frozen_ptr, frozen_keys_ptr, begins_ptr, rows, width, bins,
    margin, grown, lowest, highest, v_lowest, v_highest, move, steady, v_floor,
    ADAPTS: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, WIDTH)
    inside = channels < width
    is_channel = tl.load(is_channel_ptr + row * width + channels, mask=inside, other=0) != 0
    run = tl.load(run_ptr)
    finished = tl.load(finished_ptr)
    following = tl.load(next_ptr)
    plan = plan_ptr + row * (_PLANS * width) + channels
    old_scale = tl.load(plan_scale_ptr + row)

    # the step's statistics
    stats = stats_ptr + row * (_STATS * width)
    q, high, low, v = _load_stats(stats, channels, width)
    fields = tl.arange(0, FIELDS)
    count = counts_ptr + row * _COUNTS
    counts = tl.load(count + fields, mask=fields < _KEY_MAX, other=0)
    calls = tl.sum(tl.where(fields == _CALLS, counts, 0), 0)
    reached = tl.where(is_channel, q + tl.abs(high) + tl.abs(low) + v * 0.0, 0.0)
    seen = (calls > 0) & _all_finite(reached)

    # does the step agree in size with the one that its plan was made from? (planning.table.agreeing)
    center = tl.load(plan + _CENTER * width, mask=inside, other=0.0)
    weight = tl.load(plan + _K_WEIGHT * width, mask=inside, other=0.0)
    q_weight = tl.load(plan + _Q_WEIGHT * width, mask=inside, other=0.0)
    v_scale = tl.load(plan + _V_SCALE * width, mask=inside, other=0.0)
    planned = old_scale > 0
    k_reach = tl.max(tl.where(is_channel, tl.maximum(high - center, center - low) * weight, 0.0), 0)
    k_range = tl.max(tl.where(is_channel, (high * 0.5 - low * 0.5) * weight, 0.0), 0)
    q_reach = tl.max(tl.where(is_channel, q * q_weight, 0.0), 0)
    v_reach = tl.max(tl.where(is_channel, v, 0.0), 0)
    v_full = tl.max(v_scale, 0)
    v_fits = (v_full == 0) | ((v_reach >= v_full * v_lowest) & (v_reach <= v_full * v_highest))
    agrees = planned & (k_range >= lowest) & (k_range <= highest)
    agrees = agrees & (q_reach >= old_scale * lowest) & (q_reach <= old_scale * highest) & v_fits

    # record the step in the table (planning.table.record)
    frozen = tl.load(frozen_ptr) > 0
    takes = seen & (frozen == 0)
    places = tl.arange(0, BINS)
    column = table_run_ptr + places.to(tl.int64) * rows + row
    marks = tl.load(column, mask=places < bins, other=0)
    by = tl.sum(tl.where(places == finished, marks, 0), 0)
    known = by != 0
    same_run = tl.abs(by) == run
    enters = takes & (((planned & (agrees == 0)) & (same_run | (known == 0))) == 0)
    entry = table_ptr + (finished * rows + row) * (_STATS * width)
    q_e, high_e, low_e, v_e = _load_stats(table_ptr + (following * rows + row) * (_STATS * width), channels, width)
    if enters:
        q_o, high_o, low_o, v_o = _load_stats(entry, channels, width)
        merges = known & same_run
        q_n = tl.where(merges, tl.maximum(q_o, q), q)
        high_n = tl.where(merges, tl.maximum(high_o, high), high)
        low_n = tl.where(merges, tl.minimum(low_o, low), low)
        v_n = tl.where(merges, tl.maximum(v_o, v), v)
        is_held = known & (same_run | (agrees == 0))
        q_m, high_m, low_m, v_m = _moved(q_o, high_o, low_o, v_o, q_n, high_n, low_n, v_n, is_channel, move)
        q_n, high_n = tl.where(is_held, q_m, q_n), tl.where(is_held, high_m, high_n)
        low_n, v_n = tl.where(is_held, low_m, low_n), tl.where(is_held, v_m, v_n)
        _store_stats(entry, channels, width, q_n, high_n, low_n, v_n)
        if finished == following:
            q_e, high_e, low_e, v_e = q_n, high_n, low_n, v_n
        confirmed = agrees | (known & (same_run == 0))
        mark = tl.where(confirmed, run, tl.where(known, by, -run))
        marks = tl.where(places == finished, mark, marks)
    marks = tl.where((marks == -run) & (takes & planned), tl.where(agrees, run, 0), marks)
    tl.store(column, marks, mask=places < bins)

    # plan from the table's entry at the next noise level if it may be used and the head stayed in the range of its
    # plan; otherwise from this step
    begins = tl.load(begins_ptr)
    next_by = tl.sum(tl.where(places == following, marks, 0), 0)
    usable = frozen
    if ADAPTS:
        usable = usable | (tl.abs(next_by) < run + begins)
    strayed = planned & ((k_reach > grown) | (k_range < lowest)) & seen & (begins == 0)
    earlier = (next_by != 0) & usable & (strayed == 0)
    takes_step = seen & (begins == 0)
    known = earlier | takes_step
    q_s = tl.where(is_channel, tl.where(earlier, q_e, q), 0.0)
    high_s = tl.where(earlier, high_e, high) * 0.5
    low_s = tl.where(earlier, low_e, low) * 0.5
    v_s = tl.where(is_channel, tl.where(earlier, v_e, v), 0.0)

    # write the plan (planning/plan.py: write_plan)
    center = tl.where(is_channel, high_s + low_s, 0.0)
    q_amax = _floored(q_s)
    k_amax = _floored(tl.where(is_channel, high_s - low_s, 0.0))
    balance = tl.sqrt_rn(tl.div_rn(q_amax, k_amax))
    reach = tl.max(tl.sqrt_rn(q_amax) * tl.sqrt_rn(k_amax), 0)
    scale = tl.div_rn(margin * reach, reach * 0.0 + INT8_MAX)
    k_weight = tl.div_rn(balance, balance * 0.0 + scale)
    q_weight = tl.div_rn(balance * 0.0 + 1.0, balance)
    good = known & _all_finite(k_weight) & _all_finite(q_weight) & _all_finite(center)
    good = good & (scale > 0) & (scale < float("inf"))
    v_largest = tl.max(v_s, 0)
    v_scale = tl.maximum(tl.maximum(v_s, v_largest * v_floor), _V_AMAX_FLOOR) * (1.0 / _V_CODE)  # a power of two
    v_scale = tl.where(v_largest > 0, v_scale, 0.0)
    if known | (begins != 0):  # a layer that did not run keeps its plan, one step older
        written = good & is_channel
        tl.store(plan + _CENTER * width, tl.where(written, center, 0.0), mask=inside)
        tl.store(plan + _K_WEIGHT * width, tl.where(written, k_weight, 0.0), mask=inside)
        tl.store(plan + _Q_WEIGHT * width, tl.where(written, q_weight, 0.0), mask=inside)
        tl.store(plan + _V_SCALE * width, tl.where(written, v_scale, 0.0), mask=inside)
        tl.store(plan_scale_ptr + row, tl.where(good, scale, 0.0))
    if calls > 0:
        tl.store(count + _STEADY, (seen & agrees & (k_reach <= steady)).to(tl.int32))
    if seen:  # the plan holds only for the shapes of this step's calls
        tl.store(count + _PLAN_KEY_A, tl.load(count + _KEY_MAX))
        tl.store(count + _PLAN_KEY_B, tl.load(count + _KEY_MIN))
    if begins != 0:
        tl.store(count + _STEADY, 0)
    if frozen & (begins != 0):  # a run starts from the frozen table, which holds for its own shapes
        tl.store(count + _PLAN_KEY_A, tl.load(frozen_keys_ptr + row * 2))
        tl.store(count + _PLAN_KEY_B, tl.load(frozen_keys_ptr + row * 2 + 1))

    # add up the counts and reset for the next step
    total = totals_ptr + row * _KEY_MAX + fields
    is_counted = fields < _KEY_MAX
    tl.store(total, tl.load(total, mask=is_counted, other=0) + counts, mask=is_counted)
    tl.store(count + fields, tl.where(fields == _KEY_MIN, _LARGEST_KEY, _NO_KEY), mask=fields <= _KEY_MIN)
    nothing = tl.zeros([WIDTH], tl.float32)
    _store_stats(stats, channels, width, nothing, nothing - float("inf"), nothing + float("inf"), nothing)


def launch_plan_step(
    state: HeadState, table, table_run, run, totals, is_channel, finished, following, frozen, frozen_keys, begins,
    *, margin, full, growth, outlier, move, steady, v_floor, adapts,
) -> None:  # fmt: skip
    """End a denoising step: update state, table and totals in place, on their device's current stream.

    R heads of all call sites, D channels of the widest head.

    Args:
        table: fp32 [bins, R, 4, D], statistics by noise level.
        table_run: int32 [bins, R], the run that wrote each entry, negative while unconfirmed; 0: none.
        run: int32 [], number of the current run.
        totals: int64 [R, n], counts of all steps.
        is_channel: bool [R, D], True for channels that a head really has.
        finished, following: int64 [1], bin of the noise level of the finished step and of the next one.
        frozen: int32 []. 1: plan from the table, and leave it unchanged.
        frozen_keys: int32 [R, 2], the shapes for which a frozen table holds.
        begins: int32 []. 1: the next step is the first of another run. The caller adds it to `run` afterwards.
        margin: factor of the planned scale over the measured range.
        full: largest code of K in a step that repeats the one its plan was made from.
        growth: if K reaches more than `full · growth` codes, plan the head from this step, not from the table.
        outlier: a step larger or smaller than its plan by this factor does not agree with it.
        move: the factor by which such a step may change an entry.
        steady: a head whose K reaches more than `full · steady` codes is not steady.
        v_floor: least amax of a channel of V, relative to the head's largest.
        adapts: plan from entries of earlier runs even if the table is not frozen.
    """
    (rows, _, width), bins = state.plan.shape, table.shape[0]
    with torch.cuda.device_of(table):
        launch(
            _plan_step_kernel, rows,
            *state[:4], table, table_run, run, totals, is_channel.view(torch.uint8), finished, following,
            frozen, frozen_keys, begins, rows, width, bins,
            float(margin), full * growth, full / outlier, full * outlier, V_CODE / outlier,
            V_CODE * outlier, float(move), full * steady, float(v_floor),
            ADAPTS=bool(adapts), WIDTH=triton.next_power_of_2(width), FIELDS=16, BINS=triton.next_power_of_2(bins),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
