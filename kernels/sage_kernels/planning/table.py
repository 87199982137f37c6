"""What of a step enters the table of statistics by noise level: nothing that one odd token, step or prompt decides.

A step that agrees with the plan it ran with, which was made from another step, is believed. One that does not, or had
no plan, moves what an earlier run left by at most MOVE_LIMIT. Where nothing is known, a step without a plan (the first
of a run) is noted until the next step confirms or refutes it, and one that contradicts its plan is not kept at all.
A GPU does all of this in one launch: sage_kernels/_triton/prologue/plan_step.py.
"""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right

import torch

from ..facts.recipe import CHANNEL_FLOOR, INT8_MAX, V_CODE
from ..facts.state import (
    PLAN_CENTER,
    PLAN_K_WEIGHT,
    PLAN_Q_WEIGHT,
    PLAN_V_SCALE,
    STAT_FIELDS,
    STAT_K_MAX,
    STAT_K_MIN,
    STAT_Q_AMAX,
    STAT_V_AMAX,
)


# A head whose keys or queries reached this many times further than its plan's, or that much less far: no step beside
# it tells of this one.
OUTLIER_LIMIT = 4.0
# What a step that nothing confirms may make of an entry: its ranges so many times larger or smaller, and their middle
# moved by the range.
MOVE_LIMIT = 2.0


class NoiseBins:
    """`number` bins of the noise level u in [0, 1], uniform in asin(u). edges: fp32 [number - 1] on `device`."""

    def __init__(self, number: int, device: torch.device):
        self.number, self.device = number, device
        # as fp32: a level is in one bin however it is given
        edges = (torch.arange(1, number, dtype=torch.float64, device="cpu") * (math.pi / 2 / number)).sin().float()
        self.edges, self._on_host = edges.to(device), edges.tolist()

    def of(self, u: float | torch.Tensor) -> torch.Tensor:
        """Bin of noise level u, int64 [1] on the device, without a host sync."""
        if isinstance(u, torch.Tensor):
            level = u.detach().to(self.device, torch.float32).reshape(1)
            return torch.bucketize(level, self.edges, right=True)
        bin_ = bisect_right(self._on_host, ctypes.c_float(u).value)  # in fp32, as a tensor would be
        return torch.full((1,), bin_, dtype=torch.int64, device=self.device)

    def levels(self) -> torch.Tensor:
        """Noise level u at the middle of every bin, fp32 [number]."""
        middle = (torch.arange(self.number, device=self.device, dtype=torch.float32) + 0.5) / self.number
        return (middle * (math.pi / 2)).sin()


def full_reach(margin: float) -> float:
    """Codes that the largest key of the step that a plan was made from has under it."""
    return INT8_MAX / margin


def key_reach(plan: torch.Tensor, stats: torch.Tensor, is_channel: torch.Tensor) -> torch.Tensor:
    """Codes that a step's keys have at most under the plan it ran with, fp32 [R]."""
    center, weight = plan[:, PLAN_CENTER], plan[:, PLAN_K_WEIGHT]
    furthest = torch.maximum(stats[:, STAT_K_MAX] - center, center - stats[:, STAT_K_MIN])
    return torch.where(is_channel, furthest * weight, 0.0).amax(-1)


def key_range(plan: torch.Tensor, stats: torch.Tensor, is_channel: torch.Tensor) -> torch.Tensor:
    """As `key_reach`, had the plan the middle of this step's keys, fp32 [R]."""
    half = stats[:, STAT_K_MAX] * 0.5 - stats[:, STAT_K_MIN] * 0.5
    return torch.where(is_channel, half * plan[:, PLAN_K_WEIGHT], 0.0).amax(-1)


def agreeing(plan, plan_scale, stats, is_channel, margin: float) -> torch.Tensor:
    """Heads bool [R] whose step is of the size of the one that its plan was made from, within OUTLIER_LIMIT.

    Of K the range counts, not its middle, which a bias may move further from step to step than the range is wide.
    """
    full = full_reach(margin)
    lowest, highest = full / OUTLIER_LIMIT, full * OUTLIER_LIMIT
    k = key_range(plan, stats, is_channel)
    q = torch.where(is_channel, stats[:, STAT_Q_AMAX] * plan[:, PLAN_Q_WEIGHT], 0.0).amax(-1)
    v = torch.where(is_channel, stats[:, STAT_V_AMAX], 0.0).amax(-1)
    v_scale = plan[:, PLAN_V_SCALE].amax(-1)  # 0: no plan of V
    v_fits = (v >= v_scale * (V_CODE / OUTLIER_LIMIT)) & (v <= v_scale * (V_CODE * OUTLIER_LIMIT))
    fits = (k >= lowest) & (k <= highest) & (q >= plan_scale * lowest) & (q <= plan_scale * highest)
    return (plan_scale > 0) & fits & (v_fits | (v_scale == 0))


def widest(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The range that covers two, statistics [R, 4, D]."""
    fields = [
        (torch.minimum if field == STAT_K_MIN else torch.maximum)(old[:, field], new[:, field])
        for field in range(STAT_FIELDS)
    ]
    return torch.stack(fields, 1)


def _clamped(new: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """new, at most MOVE_LIMIT times larger or smaller than limit; as it is where that is 0."""
    held = torch.minimum(torch.maximum(new, limit * (1.0 / MOVE_LIMIT)), limit * MOVE_LIMIT)
    return torch.where(limit > 0, held, new)


def moved(old: torch.Tensor, new: torch.Tensor, is_channel: torch.Tensor) -> torch.Tensor:
    """Statistics [R, 4, D] as near to `new` as MOVE_LIMIT lets an entry `old` become in one step."""

    def floored(x):
        x = torch.where(is_channel, x, 0.0)
        return x.maximum(x.amax(-1, keepdim=True) * CHANNEL_FLOOR)  # a channel of zeros may come to life

    def middle_and_half(stats):
        high, low = stats[:, STAT_K_MAX] * 0.5, stats[:, STAT_K_MIN] * 0.5
        return high + low, high - low

    (old_center, old_half), (center, half) = middle_and_half(old), middle_and_half(new)
    room = floored(old_half)
    held_half = _clamped(half, room)
    held_center = torch.minimum(torch.maximum(center, old_center - room), old_center + room)
    held_center = torch.where(room > 0, held_center, center)
    same = (held_half == half) & (held_center == center)
    result = torch.empty_like(new)
    result[:, STAT_Q_AMAX] = _clamped(new[:, STAT_Q_AMAX], floored(old[:, STAT_Q_AMAX]))
    result[:, STAT_K_MAX] = torch.where(same, new[:, STAT_K_MAX], held_center + held_half)
    result[:, STAT_K_MIN] = torch.where(same, new[:, STAT_K_MIN], held_center - held_half)
    result[:, STAT_V_AMAX] = _clamped(new[:, STAT_V_AMAX], floored(old[:, STAT_V_AMAX]))
    return torch.where(is_channel[:, None], result, new)


def record(table, table_run, run, bin_, stats, is_channel, *, seen, planned, agrees) -> None:
    """Take up a step of noise bin `bin_` int64 [1], in place.

    Args:
        table: fp32 [bins, R, 4, D]. table_run: int32 [bins, R], the run that left an entry, negative as long as no
            other step confirmed it, 0: none. run: int32 [], the number of the running one.
        stats: fp32 [R, 4, D]. is_channel: bool [R, D].
        seen, planned, agrees: bool [R]: heads with statistics to take up, those of them that ran with a plan, and
            those that `agreeing` names.
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
    # the step before, if it had no plan, is what this one's was made from
    open_ = (table_run == -run) & (seen & planned)
    table_run.copy_(torch.where(open_, torch.where(agrees, run, 0), table_run))
