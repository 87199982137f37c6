"""One launch that closes a denoising step for all call sites: its statistics are kept and plan the next step.

What sage_processors/scales.py does in some hundred tensor operations, for the rule "timestep": each of them is a
launch that the host takes longer for than the GPU, and the next step waits for all.
"""

import torch
import triton
import triton.language as tl

from ..recipe import CHANNEL_FLOOR, V_AMAX_FLOOR, V_CODE
from ..state import (
    COUNT_CALLS,
    COUNT_FIELDS,
    COUNT_KEY_MAX,
    COUNT_KEY_MIN,
    COUNT_PLAN_KEY_A,
    COUNT_PLAN_KEY_B,
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
from .launch import launch
from .primitives import INT8_MAX, nan_unless_finite


_CALLS = tl.constexpr(COUNT_CALLS)
_COUNTS = tl.constexpr(COUNT_FIELDS)
_KEY_MAX = tl.constexpr(COUNT_KEY_MAX)
_KEY_MIN = tl.constexpr(COUNT_KEY_MIN)
_PLAN_KEY_A = tl.constexpr(COUNT_PLAN_KEY_A)
_PLAN_KEY_B = tl.constexpr(COUNT_PLAN_KEY_B)
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
    """max |q|, max k, min k and max |v| of a head: [WIDTH] each."""
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
    """As scale_rules.ranges: bounded away from 0 relative to the largest channel."""
    return tl.maximum(amax, tl.max(amax, 0) * _CHANNEL_FLOOR)


@triton.jit(do_not_specialize=["rows", "width"])
def _plan_step_kernel(
    plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, table_ptr, table_run_ptr, run_ptr, totals_ptr, is_channel_ptr,
    finished_ptr, next_ptr, rows, width, margin, growth, v_floor,
    WIDTH: tl.constexpr, FIELDS: tl.constexpr,
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

    # what the step saw
    stats = stats_ptr + row * (_STATS * width)
    q, high, low, v = _load_stats(stats, channels, width)
    fields = tl.arange(0, FIELDS)
    count = counts_ptr + row * _COUNTS
    counts = tl.load(count + fields, mask=fields < _KEY_MAX, other=0)
    calls = tl.sum(tl.where(fields == _CALLS, counts, 0), 0)
    reached = tl.where(is_channel, q + tl.abs(high) + tl.abs(low) + v * 0.0, 0.0)
    seen = (calls > 0) & _all_finite(reached)

    # keep it under its noise level; a run's first step in a bin replaces what an earlier run left
    entry_run = tl.load(table_run_ptr + finished * rows + row)
    entry = table_ptr + (finished * rows + row) * (_STATS * width)
    next_run = tl.load(table_run_ptr + following * rows + row)
    q_e, high_e, low_e, v_e = _load_stats(table_ptr + (following * rows + row) * (_STATS * width), channels, width)
    if seen:
        q_b, high_b, low_b, v_b = _load_stats(entry, channels, width)
        same = entry_run == run
        _store_stats(
            entry, channels, width,
            tl.where(same, tl.maximum(q_b, q), q), tl.where(same, tl.maximum(high_b, high), high),
            tl.where(same, tl.minimum(low_b, low), low), tl.where(same, tl.maximum(v_b, v), v),
        )  # fmt: skip
        tl.store(table_run_ptr + finished * rows + row, run)
        if finished == following:
            next_run = run

    # an earlier run's statistics at the next noise level, unless the head outgrew its plan; else this step's
    center = tl.load(plan + _CENTER * width, mask=inside, other=0.0)
    weight = tl.load(plan + _K_WEIGHT * width, mask=inside, other=0.0)
    furthest = tl.where(is_channel, tl.maximum(high - center, center - low) * weight, 0.0)
    outgrown = (old_scale > 0) & (tl.max(furthest, 0) > growth) & seen
    earlier = (next_run > 0) & (next_run < run) & (outgrown == 0)
    known = earlier | seen
    q_s = tl.where(is_channel, tl.where(earlier, q_e, q), 0.0)
    high_s = tl.where(earlier, high_e, high) * 0.5
    low_s = tl.where(earlier, low_e, low) * 0.5
    v_s = tl.where(is_channel, tl.where(earlier, v_e, v), 0.0)

    # the plan: scales._plan
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
    if known:  # a layer that was skipped keeps its plan: it is merely a step older
        written = good & is_channel
        tl.store(plan + _CENTER * width, tl.where(written, center, 0.0), mask=inside)
        tl.store(plan + _K_WEIGHT * width, tl.where(written, k_weight, 0.0), mask=inside)
        tl.store(plan + _Q_WEIGHT * width, tl.where(written, q_weight, 0.0), mask=inside)
        tl.store(plan + _V_SCALE * width, tl.where(written, v_scale, 0.0), mask=inside)
        tl.store(plan_scale_ptr + row, tl.where(good, scale, 0.0))
    if seen:  # the shapes of this step's calls: the plan holds for those only
        tl.store(count + _PLAN_KEY_A, tl.load(count + _KEY_MAX))
        tl.store(count + _PLAN_KEY_B, tl.load(count + _KEY_MIN))

    # ready for the next step: state.clear_step
    total = totals_ptr + row * _KEY_MAX + fields
    is_counted = fields < _KEY_MAX
    tl.store(total, tl.load(total, mask=is_counted, other=0) + counts, mask=is_counted)
    tl.store(count + fields, tl.where(fields == _KEY_MIN, _LARGEST_KEY, _NO_KEY), mask=fields <= _KEY_MIN)
    nothing = tl.zeros([WIDTH], tl.float32)
    _store_stats(stats, channels, width, nothing, nothing - float("inf"), nothing + float("inf"), nothing)


def launch_plan_step(
    state: HeadState, table, table_run, run, totals, is_channel, finished, following, *, margin, growth, v_floor
) -> None:
    """On the state's device and its current stream; in place. With R heads in all, D channels of the widest:

    Args:
        table: fp32 [bins, R, 4, D], statistics by noise level. table_run: int32 [bins, R], the run that left them.
        run: int32 [], the number of the running one. totals: int64 [R, 7], counts of all steps.
        is_channel: bool [R, D], channels that heads have.
        finished, following: int64 [1], noise level of the step that is done and of the next.
        margin: of the planned scale. growth: codes that a head may reach before it distrusts the table.
        v_floor: least amax of a channel of V over the head's largest.
    """
    rows, _, width = state.plan.shape
    with torch.cuda.device_of(table):
        launch(
            _plan_step_kernel, rows,
            *state[:4], table, table_run, run, totals, is_channel.view(torch.uint8), finished, following,
            rows, width, float(margin), float(growth), float(v_floor),
            WIDTH=triton.next_power_of_2(width), FIELDS=16, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
