"""Scaling rules: which statistics plan the next step. One state object (state.py) serves all of them.

A rule sees three sources: the step just finished, the table of statistics per noise level, and what it keeps of this
run. It returns one `Source` per step; turning that into c, b and s, and the kernels' guard (a tile of keys beyond
its plan takes its own larger scale, counted), are the same for every rule, so none of them can clip. Everything is
tensor operations on the device of the state: nothing waits for it, nothing recompiles.

What a run draws depends on its inputs and options alone. So the table, which every run records into, is planned from
only once the user has frozen it; from then on no run changes it. `TimestepAdaptive` is the exception, by name.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..facts.recipe import CHANNEL_FLOOR
from ..facts.state import STAT_K_MAX, STAT_K_MIN, STAT_Q_AMAX, STAT_V_AMAX


# A power law replaces the static scale of a head only where it explains this much of log s and bends this much.
FIT_R2 = 0.9
FIT_GAMMA = 0.15
FIT_POINTS = 3  # noise levels: two points are always on a line


class Source(NamedTuple):
    """What the next step is planned from.

    Attributes:
        stats: fp32 [R, 4, D], per-channel max |q|, max k, min k, max |v| of every head.
        known: bool [R], heads that get a plan of it; the others keep theirs within a run, or run dynamic.
        gain: fp32 [R], factor on the planned scale; None is 1.
    """

    stats: torch.Tensor
    known: torch.Tensor
    gain: torch.Tensor | None = None


def ranges(stats: torch.Tensor, is_channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(max |q|, centre of k, its max distance) of statistics [..., R, 4, D], floored -> [..., R, D]; 0 elsewhere."""
    q_amax = torch.where(is_channel, stats[..., STAT_Q_AMAX, :], 0.0)
    high, low = stats[..., STAT_K_MAX, :] * 0.5, stats[..., STAT_K_MIN, :] * 0.5
    center = torch.where(is_channel, high + low, 0.0)
    k_amax = torch.where(is_channel, high - low, 0.0)
    q_amax = q_amax.maximum(q_amax.amax(-1, keepdim=True) * CHANNEL_FLOOR)
    k_amax = k_amax.maximum(k_amax.amax(-1, keepdim=True) * CHANNEL_FLOOR)
    return q_amax, center, k_amax


def merge(stats: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The widest of statistics [N, R, 4, D] where `valid` bool [N, R]; 0 for heads without any -> [R, 4, D]."""
    chosen = valid[..., None]
    parts = (
        torch.where(chosen, stats[:, :, STAT_Q_AMAX], 0.0).amax(0),
        torch.where(chosen, stats[:, :, STAT_K_MAX], -torch.inf).amax(0),
        torch.where(chosen, stats[:, :, STAT_K_MIN], torch.inf).amin(0),
        torch.where(chosen, stats[:, :, STAT_V_AMAX], 0.0).amax(0),
    )
    return torch.where(valid.any(0)[:, None, None], torch.stack(parts, 1), 0.0)


def prefer(first: torch.Tensor, has_first: torch.Tensor, second: torch.Tensor, has_second: torch.Tensor) -> Source:
    """Heads of `first` where there are any, else of `second`."""
    return Source(torch.where(has_first[:, None, None], first, second), has_first | has_second)


class Timestep:
    """The previous step's statistics; those of a frozen table at this noise level where there are any.

    Attributes: adapts: whether a run plans from what earlier runs recorded, frozen or not.
    """

    adapts = False

    def refit(self, state) -> None:
        """The table, or what may be planned from it, has changed. Called when a run starts, and after a restore."""

    def forget(self, state, rows: slice) -> None:
        """What was learnt of these heads no longer holds; their entries of the table are gone already."""

    def restart(self, begins: torch.Tensor) -> None:
        """Where `begins` bool [] holds, another run starts: what this one left says nothing of it."""

    def first(self, state, bin_: torch.Tensor) -> Source:
        """For the first step of a run, in noise bin `bin_` int64 [1]."""
        return Source(*state.from_table(bin_))

    def following(self, state, bin_: torch.Tensor, seen: torch.Tensor) -> Source:
        """For the step after the one whose statistics the state holds; `seen` bool [R]: heads that have them."""
        earlier, known = state.from_table(bin_)
        # a head that left the range of its plan no longer trusts what an earlier run left
        return prefer(earlier, known & ~(state.strayed() & seen), state.step_stats, seen)


class TimestepAdaptive(Timestep):
    """An earlier run's statistics at this noise level, else the previous step's: runs depend on those before them."""

    adapts = True


class Delayed(Timestep):
    """The widest of the last `history` steps of this run; its first step runs dynamic."""

    def __init__(self, history: int):
        if history < 1:
            raise ValueError(f"history: got {history}, expected at least 1")
        self.history = history
        self._steps: Any = None  # a tensor [history, ...] once there is a state

    def refit(self, state) -> None:
        shape = (self.history, *state.step_stats.shape)
        if self._steps is None or self._steps.shape != shape or self._steps.device != state.device:
            self._steps = torch.zeros(shape, dtype=torch.float32, device=state.device)
            self._valid = torch.zeros(shape[:2], dtype=torch.bool, device=state.device)
            # a tensor: counting on the host would recompile a model whose own hook advances the state
            self._place = torch.zeros(1, dtype=torch.int64, device=state.device)
        self._valid.zero_()
        self._place.zero_()

    def forget(self, state, rows):
        self._valid[:, rows] = False

    def restart(self, begins):
        self._valid.logical_and_(~begins)

    def first(self, state, bin_):
        return Source(state.step_stats, torch.zeros_like(self._valid[0]))

    def following(self, state, bin_, seen):
        self._steps.index_copy_(0, self._place, torch.where(seen[:, None, None], state.step_stats, 0.0)[None])
        self._valid.index_copy_(0, self._place, seen[None])
        self._place.add_(1).remainder_(self.history)
        return Source(merge(self._steps, self._valid), self._valid.any(0))


class Static(Timestep):
    """One plan per head for every step, of the widest statistics in a frozen table.

    Before there is one, runs plan from the previous step, and record.
    """

    def refit(self, state) -> None:
        self._learnt = state.usable(state.table_run)
        self._stats = merge(state.table, self._learnt)

    def forget(self, state, rows):
        self.refit(state)

    def first(self, state, bin_):
        return self._frozen(bin_, state, torch.zeros_like(self._learnt[0]))

    def following(self, state, bin_, seen):
        return self._frozen(bin_, state, seen)

    def _frozen(self, bin_, state, seen) -> Source:
        return prefer(self._stats, self._learnt.any(0), state.step_stats, seen)


class SigmaPower(Static):
    """Static vectors with the scale s = s_ref·(σ/σ_ref)^γ, σ the noise level at the middle of its bin.

    (σ_ref, s_ref) is the centre of the frozen table's points (log σ, log s). With gamma=None each head has the γ of
    the least-squares line, and stays static where that is no good fit (R² < 0.9, |γ| <= 0.15 or fewer than three noise
    levels). A number is used for every head: 1 is the formula s ∝ σ, -1 is s ∝ 1/σ.
    """

    def __init__(self, gamma: float | None = None):
        if gamma is not None and not math.isfinite(gamma):
            raise ValueError(f"gamma: got {gamma}, expected a finite number or None")
        self.gamma = gamma

    def refit(self, state) -> None:
        super().refit(state)
        self._log_levels = state.bin_levels().log()
        self.fit = fit_power(self._log_levels, state.head_scales(state.table), self._learnt)
        self._log_static = state.head_scales(self._stats).log()

    def _frozen(self, bin_, state, seen):
        source = super()._frozen(bin_, state, seen)
        gamma, used = self.fit.gamma, self.fit.good
        if self.gamma is not None:
            gamma, used = torch.full_like(gamma, self.gamma), self._learnt.any(0)
        log_s = self.fit.center + gamma * (self._log_levels.index_select(0, bin_) - self.fit.log_level)
        return source._replace(gain=torch.where(used, (log_s - self._log_static).exp(), 1.0))


class PowerFit(NamedTuple):
    """Least-squares lines log s = center + gamma·(log σ - log_level), each fp32 [R] but good, bool [R]."""

    gamma: torch.Tensor
    r2: torch.Tensor
    center: torch.Tensor
    log_level: torch.Tensor
    good: torch.Tensor


def fit_power(log_levels: torch.Tensor, scales: torch.Tensor, valid: torch.Tensor) -> PowerFit:
    """Fit scales [bins, R] over log noise levels [bins], where `valid` bool [bins, R]. 0 for heads without points."""
    usable = valid & (scales > 0)
    count = usable.sum(0).clamp_min(1)

    def mean(x):
        return torch.where(usable, x, 0.0).sum(0) / count

    x, y = log_levels[:, None].expand_as(scales), torch.where(usable, scales, 1.0).log()
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean((x - mean_x) ** 2), mean((y - mean_y) ** 2)
    cov = mean((x - mean_x) * (y - mean_y))
    gamma = torch.where(var_x > 0, cov / var_x, 0.0)
    r2 = torch.where((var_x > 0) & (var_y > 0), cov**2 / (var_x * var_y), 0.0)
    good = (r2 >= FIT_R2) & (gamma.abs() > FIT_GAMMA) & (usable.sum(0) >= FIT_POINTS)
    return PowerFit(gamma, r2, mean_y, mean_x, good)


# By the name that a user writes; sage_processors/options.py says what each is good for.
RULES = {
    "timestep": lambda scaling: Timestep(),
    "timestep_adaptive": lambda scaling: TimestepAdaptive(),
    "delayed": lambda scaling: Delayed(scaling.history),
    "static": lambda scaling: Static(),
    "sigma_power": lambda scaling: SigmaPower(None if scaling.gamma == "fit" else float(scaling.gamma)),
}
NEED_RUNS = ("static", "sigma_power")  # planned from whole runs: something must say where one ends
ADAPTIVE = "timestep_adaptive"
FROM_TABLE = ("timestep", ADAPTIVE, *NEED_RUNS)  # those that a frozen table means something to


def rule_for(scaling) -> Timestep:
    """Return the rule of a planned sage_processors.Scaling."""
    return RULES[scaling.name](scaling)
