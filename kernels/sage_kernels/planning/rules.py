"""Scaling rules: they choose the statistics that the next step is planned from.

A rule sees three sources: the step just finished, the table of statistics by noise level, and what it keeps of this
run. It returns one `Source` per step. Everything after that is the same for all rules: turning statistics into c, b
and s, and the kernels' guard (a tile of keys beyond its plan takes its own larger scale, counted). So no rule can
clip. All is done by tensor operations on the state's device: nothing waits for it, nothing recompiles.

The result of a run depends on its inputs and options alone. So every run records into the table, but it is planned
from only once the user has frozen it; from then on no run changes it. `TimestepAdaptive` is the exception.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..facts.recipe import CHANNEL_FLOOR
from ..facts.state import STAT_K_MAX, STAT_K_MIN, STAT_Q_AMAX, STAT_V_AMAX


# A power law replaces a head's static scale only if its fit has this R² and its exponent is larger than this.
FIT_R2 = 0.9
FIT_GAMMA = 0.15
FIT_POINTS = 3  # noise levels: two points are always on a line


class Source(NamedTuple):
    """Statistics that the next step is planned from.

    Attributes:
        stats: fp32 [R, 4, D], per-channel max |q|, max k, min k, max |v| of every head.
        known: bool [R], heads that get a plan of it. The others keep theirs within a run, or run without one.
        gain: fp32 [R], factor on the planned scale; None is 1.
    """

    stats: torch.Tensor
    known: torch.Tensor
    gain: torch.Tensor | None = None


def ranges(stats: torch.Tensor, is_channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return max |q|, the centre of k, and the max distance from it, each [..., R, D].

    stats: [..., R, 4, D]. Both maxima have a floor, a small share of the head's largest. 0 outside of `is_channel`.
    """
    q_amax = torch.where(is_channel, stats[..., STAT_Q_AMAX, :], 0.0)
    high, low = stats[..., STAT_K_MAX, :] * 0.5, stats[..., STAT_K_MIN, :] * 0.5
    center = torch.where(is_channel, high + low, 0.0)
    k_amax = torch.where(is_channel, high - low, 0.0)
    q_amax = q_amax.maximum(q_amax.amax(-1, keepdim=True) * CHANNEL_FLOOR)
    k_amax = k_amax.maximum(k_amax.amax(-1, keepdim=True) * CHANNEL_FLOOR)
    return q_amax, center, k_amax


def merge(stats: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Merge N statistics to the widest, [R, 4, D]. 0 for heads without any.

    stats: [N, R, 4, D]. valid: bool [N, R], the statistics that count.
    """
    chosen = valid[..., None]
    parts = (
        torch.where(chosen, stats[:, :, STAT_Q_AMAX], 0.0).amax(0),
        torch.where(chosen, stats[:, :, STAT_K_MAX], -torch.inf).amax(0),
        torch.where(chosen, stats[:, :, STAT_K_MIN], torch.inf).amin(0),
        torch.where(chosen, stats[:, :, STAT_V_AMAX], 0.0).amax(0),
    )
    return torch.where(valid.any(0)[:, None, None], torch.stack(parts, 1), 0.0)


def prefer(first: torch.Tensor, has_first: torch.Tensor, second: torch.Tensor, has_second: torch.Tensor) -> Source:
    """Take each head's statistics from `first` where it has them, else from `second`."""
    return Source(torch.where(has_first[:, None, None], first, second), has_first | has_second)


class Timestep:
    """Rule: plan from a frozen table if it has this noise level, else from the previous step.

    Attributes:
        adapts: a run plans from the records of earlier runs even if they are not frozen.
    """

    adapts = False

    def refit(self, state) -> None:
        """Read the table again: it changed, a run starts, or a snapshot was restored."""

    def forget(self, state, rows: slice) -> None:
        """Drop what was learnt of these heads. Their entries of the table are gone already."""

    def restart(self, begins: torch.Tensor) -> None:
        """Drop what this run left if another run starts: `begins` bool []."""

    def first(self, state, bin_: torch.Tensor) -> Source:
        """Return the source of the first step of a run, in noise bin `bin_` int64 [1]."""
        return Source(*state.from_table(bin_))

    def following(self, state, bin_: torch.Tensor, seen: torch.Tensor) -> Source:
        """Return the source of the step after the one whose statistics the state holds.

        seen: bool [R], heads that have such statistics.
        """
        earlier, known = state.from_table(bin_)
        # a head that left the range of its plan no longer trusts the table
        return prefer(earlier, known & ~(state.strayed() & seen), state.step_stats, seen)


class TimestepAdaptive(Timestep):
    """Rule: as Timestep, but earlier runs count without a freeze, so results depend on the runs before."""

    adapts = True


class Delayed(Timestep):
    """Rule: plan from the widest of the last `history` steps of this run. The first step has no plan."""

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
    """Rule: one plan per head for every step, from the widest statistics in a frozen table.

    Before the table is frozen, runs plan from the previous step, and record.
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
    """Rule: as Static, with the scale s = s_ref·(σ/σ_ref)^γ, σ the noise level at the middle of its bin.

    (σ_ref, s_ref) is the centre of the frozen table's points (log σ, log s). With gamma=None each head has the γ of
    the least-squares line, and stays static where the fit is poor (R² < 0.9, |γ| <= 0.15 or fewer than three noise
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
    """Least-squares lines log s = center + gamma·(log σ - log_level) of R heads.

    Each field is fp32 [R], except good, bool [R].
    """

    gamma: torch.Tensor
    r2: torch.Tensor
    center: torch.Tensor
    log_level: torch.Tensor
    good: torch.Tensor


def fit_power(log_levels: torch.Tensor, scales: torch.Tensor, valid: torch.Tensor) -> PowerFit:
    """Fit scales [bins, R] over log noise levels [bins]. Heads without points get 0.

    valid: bool [bins, R], the points that count.
    """
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


# By the name that a user writes; sage_processors/options.py says which to use when.
RULES = {
    "timestep": lambda scaling: Timestep(),
    "timestep_adaptive": lambda scaling: TimestepAdaptive(),
    "delayed": lambda scaling: Delayed(scaling.history),
    "static": lambda scaling: Static(),
    "sigma_power": lambda scaling: SigmaPower(None if scaling.gamma == "fit" else float(scaling.gamma)),
}
NEED_RUNS = ("static", "sigma_power")  # planned from whole runs: their ends must be known
ADAPTIVE = "timestep_adaptive"
FROM_TABLE = ("timestep", ADAPTIVE, *NEED_RUNS)  # rules that use a frozen table


def rule_for(scaling) -> Timestep:
    """Return the rule of a planned sage_processors.Scaling."""
    return RULES[scaling.name](scaling)
