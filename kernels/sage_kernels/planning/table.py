"""The table of statistics by noise level, and the rules by which a step enters it.

No odd token, step or prompt may decide an entry alone. A step that agrees with the plan it ran with, which was made
from another step, enters as it is. A step that does not agree, or had no plan, moves the entry of an earlier run by at
most MOVE_LIMIT. Where there is no entry, a step without a plan (the first of a run) is noted until the next step
confirms or refutes it, and a step that contradicts its plan is not recorded at all.
A GPU does all of this in one launch: _triton/prologue/plan_step.py.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right

import torch

from ..facts import state as fields
from ..facts.recipe import CHANNEL_FLOOR, INT8_MAX, V_CODE


# A step disagrees with its plan if its keys or queries reach this many times further, or that many times less far.
OUTLIER_LIMIT = 4.0
# A head whose keys reach this many times further than those of its plan no longer trusts the table.
GROWTH_LIMIT = 1.25
# Nor is it steady beyond this: the middle of its keys moved.
STEADY_LIMIT = 1.5
# A step that nothing confirms may make the ranges of an entry this many times larger or smaller, and move their middle
# by the range.
MOVE_LIMIT = 2.0
LIMITS = {"growth": GROWTH_LIMIT, "outlier": OUTLIER_LIMIT, "move": MOVE_LIMIT, "steady": STEADY_LIMIT}


class NoiseBins:
    """Bins of the noise level u in [0, 1], uniform in asin(u). Steps of one bin share a table entry.

    Attributes:
        number: of bins.
        edges: fp32 [number - 1] on `device`.
    """

    def __init__(self, number: int, device: torch.device):
        self.number, self.device = number, device
        # fp32, so that a level falls into the same bin as a number and as a tensor
        edges = (torch.arange(1, number, dtype=torch.float64, device="cpu") * (math.pi / 2 / number)).sin().float()
        self.edges, self._on_host = edges.to(device), edges.tolist()

    def of(self, u: float | torch.Tensor) -> torch.Tensor:
        """Return the bin of noise level u, int64 [1] on the device, without a host sync."""
        if isinstance(u, torch.Tensor):
            level = u.detach().to(self.device, torch.float32).reshape(1)
            return torch.bucketize(level, self.edges, right=True)
        bin_ = bisect_right(self._on_host, ctypes.c_float(u).value)  # rounded to fp32, as a tensor is
        return torch.full((1,), bin_, dtype=torch.int64, device=self.device)

    def levels(self) -> torch.Tensor:
        """Return the noise level u at the middle of every bin, fp32 [number]."""
        middle = (torch.arange(self.number, device=self.device, dtype=torch.float32) + 0.5) / self.number
        return (middle * (math.pi / 2)).sin()


def full_reach(margin: float) -> float:
    """Return the largest code that a plan gives the keys of the step it was made from."""
    return INT8_MAX / margin


def key_reach(plan: torch.Tensor, stats: torch.Tensor, is_channel: torch.Tensor) -> torch.Tensor:
    """Return the largest code of a step's keys under the plan it ran with, fp32 [R]."""
    center, weight = plan[:, fields.PLAN_CENTER], plan[:, fields.PLAN_K_WEIGHT]
    furthest = torch.maximum(stats[:, fields.STAT_K_MAX] - center, center - stats[:, fields.STAT_K_MIN])
    return torch.where(is_channel, furthest * weight, 0.0).amax(-1)


def key_range(plan: torch.Tensor, stats: torch.Tensor, is_channel: torch.Tensor) -> torch.Tensor:
    """Return the same as `key_reach` if the plan had the centre of this step's keys, fp32 [R]."""
    half = stats[:, fields.STAT_K_MAX] * 0.5 - stats[:, fields.STAT_K_MIN] * 0.5
    return torch.where(is_channel, half * plan[:, fields.PLAN_K_WEIGHT], 0.0).amax(-1)


def agreeing(plan, plan_scale, stats, is_channel, margin: float) -> torch.Tensor:
    """Return the heads, bool [R], with a step of the expected size, within OUTLIER_LIMIT.

    Expected is the size of the step that the plan was made from. For K the range counts, not its middle: a bias may
    move that further from step to step than the range is wide.
    """
    full = full_reach(margin)
    lowest, highest = full / OUTLIER_LIMIT, full * OUTLIER_LIMIT
    k = key_range(plan, stats, is_channel)
    q = torch.where(is_channel, stats[:, fields.STAT_Q_AMAX] * plan[:, fields.PLAN_Q_WEIGHT], 0.0).amax(-1)
    v = torch.where(is_channel, stats[:, fields.STAT_V_AMAX], 0.0).amax(-1)
    v_scale = plan[:, fields.PLAN_V_SCALE].amax(-1)  # 0: no plan of V
    v_fits = (v >= v_scale * (V_CODE / OUTLIER_LIMIT)) & (v <= v_scale * (V_CODE * OUTLIER_LIMIT))
    fits = (k >= lowest) & (k <= highest) & (q >= plan_scale * lowest) & (q <= plan_scale * highest)
    return (plan_scale > 0) & fits & (v_fits | (v_scale == 0))


def steady_heads(agrees: torch.Tensor, plan, stats, is_channel, margin: float) -> torch.Tensor:
    """Return the mask of steady heads, bool [R].

    In a steady head the step went as planned, and the middle of K's range hardly moved.

    Args: agrees: as `agreeing` returns it.
    """
    reach = key_reach(plan, stats, is_channel)
    return agrees & (reach <= full_reach(margin) * STEADY_LIMIT)


def strayed_heads(plan, plan_scale, stats, is_channel, margin: float) -> torch.Tensor:
    """Return the heads, bool [R], whose keys reached much further, or much less far, than their plan's."""
    step, full = (plan, stats, is_channel), full_reach(margin)
    strayed = (key_reach(*step) > full * GROWTH_LIMIT) | (key_range(*step) < full / OUTLIER_LIMIT)
    return (plan_scale > 0) & strayed


def widest(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the ranges that cover both statistics [R, 4, D]."""
    both = torch.maximum(old, new)
    both[:, fields.STAT_K_MIN] = torch.minimum(old[:, fields.STAT_K_MIN], new[:, fields.STAT_K_MIN])
    return both


def _clamped(new: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Clamp `new` to within a factor of MOVE_LIMIT of `limit`, except where `limit` is 0."""
    held = torch.minimum(torch.maximum(new, limit * (1.0 / MOVE_LIMIT)), limit * MOVE_LIMIT)
    return torch.where(limit > 0, held, new)


def moved(old: torch.Tensor, new: torch.Tensor, is_channel: torch.Tensor) -> torch.Tensor:
    """Return `new` statistics [R, 4, D], clamped to within MOVE_LIMIT of the entry `old`."""

    def floored(x):
        x = torch.where(is_channel, x, 0.0)
        return x.maximum(x.amax(-1, keepdim=True) * CHANNEL_FLOOR)  # a channel of zeros may come to life

    def middle_and_half(stats):
        high, low = stats[:, fields.STAT_K_MAX] * 0.5, stats[:, fields.STAT_K_MIN] * 0.5
        return high + low, high - low

    (old_center, old_half), (center, half) = middle_and_half(old), middle_and_half(new)
    room = floored(old_half)
    held_half = _clamped(half, room)
    held_center = torch.minimum(torch.maximum(center, old_center - room), old_center + room)
    held_center = torch.where(room > 0, held_center, center)
    same = (held_half == half) & (held_center == center)
    result = torch.empty_like(new)
    result[:, fields.STAT_Q_AMAX] = _clamped(new[:, fields.STAT_Q_AMAX], floored(old[:, fields.STAT_Q_AMAX]))
    result[:, fields.STAT_K_MAX] = torch.where(same, new[:, fields.STAT_K_MAX], held_center + held_half)
    result[:, fields.STAT_K_MIN] = torch.where(same, new[:, fields.STAT_K_MIN], held_center - held_half)
    result[:, fields.STAT_V_AMAX] = _clamped(new[:, fields.STAT_V_AMAX], floored(old[:, fields.STAT_V_AMAX]))
    return torch.where(is_channel[:, None], result, new)


def record(table, table_run, run, bin_, stats, is_channel, *, seen, planned, agrees) -> None:
    """Record a step of noise bin `bin_` int64 [1] in the table, in place.

    Args:
        table: fp32 [bins, R, 4, D].
        table_run: int32 [bins, R], the run that left an entry: negative until another step confirms it, 0: no entry.
        run: int32 [], the number of the running one.
        stats: fp32 [R, 4, D]. is_channel: bool [R, D].
        seen, planned, agrees: bool [R]: heads with statistics to record, those of them that ran with a plan, and
            those that `agreeing` returns.
    """
    old, by = table.index_select(0, bin_)[0], table_run.index_select(0, bin_)[0]
    known, same_run = by != 0, by.abs() == run
    refuted = planned & ~agrees
    enters = seen & ~(refuted & (same_run | ~known))
    new = torch.where((known & same_run)[:, None, None], widest(old, stats), stats)
    is_held = known & (same_run | ~agrees)
    new = torch.where(is_held[:, None, None], moved(old, new, is_channel), new)
    table.index_copy_(0, bin_, torch.where(enters[:, None, None], new, old)[None])
    mark = torch.where(agrees | (known & ~same_run), run, torch.where(known, by, -run))
    table_run.index_copy_(0, bin_, torch.where(enters, mark, by)[None])
    # this step's plan was made from the step before; if that had no plan, this step confirms or refutes it
    open_ = (table_run == -run) & (seen & planned)
    table_run.copy_(torch.where(open_, torch.where(agrees, run, 0), table_run))
