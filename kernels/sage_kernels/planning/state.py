"""Planned scales per head: the state of all attention call sites, and how one step plans the next.

Softmax does not change when one vector c is subtracted from all keys of a head, nor Q·Kᵀ when channel d of Q is
divided by b_d > 0 and channel d of K multiplied by it. Both may therefore come from an EARLIER step without any error:
a stale c or b only costs INT8 resolution. Only the scale must cover the running step, and a group of tokens that does
not fit gets its own larger scale inside the kernel (counted as "outside").

From a step's statistics per channel: c = (max k + min k) / 2 (the centre that needs the smallest scale),
b = sqrt(amax|q| / amax|k - c|), s = margin · max_d sqrt(amax|q_d| · amax|k_d - c_d|) / 127. The next step computes
K_int = round((k - c)·b/s), without a reduction pass, and Q_int = round((q/b) / s_row): a row of Q lies in registers,
where its own scale costs nothing and halves the error. Where V is quantised too ("qk_int8_pv_fp8"), its scales are
planned with room to grow by 7 times; V beyond that is clipped, and counted. Measurements: kernels/README.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..facts import state as fields
from ..facts.numerics import padded_head_dim
from ..facts.recipe import INT8_MAX
from ..facts.state import HeadState, clear_step, fractions, new_head_state
from ..ops.plan_step import plan_step
from .plan import V_CHANNEL_FLOOR, write_plan
from .rules import Source, Timestep, ranges
from .skip_lists import KeptOfCalls
from .table import LIMITS, NoiseBins, agreeing, full_reach, record, steady_heads, strayed_heads


@dataclass(frozen=True)
class Site:
    """One attention call site: a processor of a model, or the n-th attention call inside one.

    Attributes:
        name: the module's name in the model ("#1" appended for a second call in the same processor).
        kv_heads: number of key/value heads.
        head_dim: D of q, k and v.
        rotation: of its calls, "none" or "hadamard". Statistics of one kind tell nothing of the other.
    """

    name: str
    kv_heads: int
    head_dim: int
    rotation: str = "none"

    @property
    def channels(self) -> int:
        """Channels per head that the kernels see. Rotation uses the padding channels too."""
        return self.head_dim if self.rotation == "none" else padded_head_dim(self.head_dim)


class ScaleState:
    """Planned scales of all call sites of one handle, on the device. Methods that sync say so.

    Args:
        sites: the call sites, in the order of `head_state`'s index.
        device: where the model runs.
        margin: planned scale over the scale that the largest value seen needs, > 0. Tiles beyond it scale themselves.
        bins: noise levels told apart, uniform in asin(u).
        rule: chooses the statistics that plan the next step (rules.py); Timestep() if None. One rule serves one state.
    Raises: ValueError for no sites, margin <= 0 or bins < 1.
    """

    def __init__(
        self,
        sites: list[Site],
        *,
        device: torch.device | str,
        margin: float = 0.9,
        bins: int = 16,
        rule: Timestep | None = None,
    ):
        if not sites:
            raise ValueError("sites: got none, expected at least one attention call site")
        if not (math.isfinite(margin) and margin > 0):
            raise ValueError(f"margin: got {margin}, expected a finite number > 0")
        if bins < 1:
            raise ValueError(f"bins: got {bins}, expected at least 1")
        self.sites = list(sites)
        self.margin = margin
        self.bins = bins
        self.rule = Timestep() if rule is None else rule
        self.kept = KeptOfCalls()
        self._first_rows = [sum(s.kv_heads for s in self.sites[:i]) for i in range(len(self.sites))]
        self._allocate(torch.device(device))

    def _allocate(self, device: torch.device) -> None:
        rows = sum(s.kv_heads for s in self.sites)
        width = padded_head_dim(max(s.head_dim for s in self.sites))
        self.device = device
        shared = new_head_state(rows, width, device)
        starts = [torch.full((), first, dtype=torch.int32, device=device) for first in self._first_rows]
        self._head_states = [shared._replace(row=start) for start in starts]
        self._shared = shared
        dims = torch.tensor(
            [s.channels for s in self.sites for _ in range(s.kv_heads)], dtype=torch.int64, device="cpu"
        )
        self._is_channel = (torch.arange(width, device="cpu") < dims[:, None]).to(device)
        self._table = torch.zeros(self.bins, rows, fields.STAT_FIELDS, width, dtype=torch.float32, device=device)
        self._table_run = torch.zeros(self.bins, rows, dtype=torch.int32, device=device)  # see table.record
        self._run = torch.zeros((), dtype=torch.int32, device=device)
        # tensors: compiled code would guard a flag on the host, and a CUDA graph would not see it
        self._frozen = torch.zeros((), dtype=torch.int32, device=device)
        self._frozen_keys = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self._goes_on = torch.zeros((), dtype=torch.int32, device=device)  # 0: no run begins
        self._noise_bins = NoiseBins(self.bins, device)
        self._totals = torch.zeros(rows, fields.COUNT_KEY_MAX, dtype=torch.int64, device=device)
        self.bin = torch.zeros((), dtype=torch.int64, device=device)  # of the running step
        self.rule.refit(self)

    def head_state(self, site_index: int) -> HeadState:
        """The tensors of one site, for `sage_attention(state=)`; the same objects until `to` moves the state."""
        return self._head_states[site_index]

    @torch.no_grad()
    def begin_run(self, u: float | torch.Tensor) -> None:
        """Start a denoising run at noise level u in [0, 1]: plan its first step from what the rule knows."""
        self._run.add_(1)
        self.kept.clear()
        self.rule.refit(self)
        self._drain()  # the unfinished last step of a run that was broken off does not count
        self._take_frozen_keys(self._frozen > 0)
        self._shared.counts[:, fields.COUNT_STEADY].zero_()
        self._plan(self.rule.first(self, self._enter(u)))

    @torch.no_grad()
    def advance(
        self, u_finished: float | torch.Tensor, u_next: float | torch.Tensor, begins: torch.Tensor | None = None
    ) -> None:
        """Close the step at noise level `u_finished`, and plan the next one, at `u_next`.

        0-d tensors stay on the device. begins: int32 [] there, 1 if the next step is the first of another run.
        """
        self.kept.next_step()
        finished, following = self._noise_bins.of(u_finished), self._enter(u_next)
        if type(self.rule).following is Timestep.following and self.device.type == "cuda":
            self._advance_in_one_launch(finished, following, begins)
        else:
            self._advance(finished, following, begins)

    def _advance_in_one_launch(self, finished, following, begins=None) -> None:
        """`_advance` of rules that follow as Timestep() does, on a GPU: one launch for many."""
        plan_step(*self._launch_tensors(finished, following, begins), **self._launch_numbers())
        if begins is not None:
            self._run.add_(begins)

    def _launch_tensors(self, finished, following, begins=None) -> tuple:
        return (
            self._shared, self._table, self._table_run, self._run, self._totals, self._is_channel, finished, following,
            self._frozen, self._frozen_keys, self._goes_on if begins is None else begins,
        )  # fmt: skip

    def _launch_numbers(self) -> dict:
        return {
            **LIMITS, "margin": self.margin, "full": full_reach(self.margin), "v_floor": V_CHANNEL_FLOOR,
            "adapts": self.rule.adapts,
        }  # fmt: skip

    def _advance(self, finished, following, begins=None) -> None:
        """Close the step in noise bin `finished` and plan the one in `following`, int64 [1] each."""
        shared, seen = self._shared, self._seen()
        step = shared.stats, self._is_channel, self.margin
        agrees = agreeing(shared.plan, shared.plan_scale, *step)
        record(
            self._table, self._table_run, self._run, finished, shared.stats, self._is_channel,
            seen=seen & (self._frozen == 0), planned=shared.plan_scale > 0, agrees=agrees,
        )  # fmt: skip
        is_steady = steady_heads(agrees, shared.plan, *step)
        steady, was_called = shared.counts[:, fields.COUNT_STEADY], shared.counts[:, fields.COUNT_CALLS] > 0
        steady.copy_(torch.where(was_called, (seen & is_steady).int(), steady))
        source = self.rule.following(self, following, seen)
        kept = ~source.known
        # a plan holds for the shapes of this step's calls only: two, since (un)conditional calls may differ
        keys = shared.counts[:, fields.COUNT_KEY_MAX : fields.COUNT_KEY_MIN + 1]
        plan_keys = shared.counts[:, fields.COUNT_PLAN_KEY_A : fields.COUNT_PLAN_KEY_B + 1]
        plan_keys.copy_(torch.where(seen[:, None], keys, plan_keys))
        if begins is not None:
            self._run.add_(begins)
            starts = begins > 0
            steady.masked_fill_(starts, 0)
            self.rule.restart(starts)
            self._take_frozen_keys(starts & (self._frozen > 0))
            first = self.rule.first(self, following)
            stats = torch.where(starts, first.stats, source.stats)
            source = source._replace(stats=stats, known=torch.where(starts, first.known, source.known))
            kept = kept & ~starts
        self._drain()
        # a layer that was left out (attention caches, layer-skip guidance) keeps its plan, now a step older
        self._plan(source, kept=kept)

    def _take_frozen_keys(self, where: torch.Tensor) -> None:
        """Let plans of a run that starts serve the call shapes of the frozen table."""
        plan_keys = self._shared.counts[:, fields.COUNT_PLAN_KEY_A : fields.COUNT_PLAN_KEY_B + 1]
        plan_keys.copy_(torch.where(where, self._frozen_keys, plan_keys))

    @torch.no_grad()
    def freeze(self) -> None:
        """Let plans come from the table as it is now. No run changes it any more, until `reset`."""
        self._frozen.fill_(1)
        self._frozen_keys.copy_(self._shared.counts[:, fields.COUNT_PLAN_KEY_A : fields.COUNT_PLAN_KEY_B + 1])
        self.rule.refit(self)

    @property
    def frozen(self) -> torch.Tensor:
        """int32 [] on the device, 1 since `freeze`."""
        return self._frozen

    @property
    def has_learnt(self) -> bool:
        """True if the table has any entry. Syncs."""
        return bool(self._table_run.any())

    @torch.no_grad()
    def reset(self) -> None:
        """Forget every scale, table entry and count, in place; the table is frozen no longer."""
        shared = self._shared
        self.kept.reset()
        learnt = (shared.plan, shared.plan_scale, shared.counts, self._table, self._table_run, self._run, self._totals)
        for tensor in (*learnt, self._frozen, self._frozen_keys):
            tensor.zero_()
        self.bin.zero_()
        clear_step(shared.stats, shared.counts)
        self.rule.refit(self)

    @torch.no_grad()
    def set_rotation(self, index: int, rotation: str) -> None:
        """Change the rotation of one site's calls from the next step on, and forget what it learnt.

        Call it after `advance`, before any call of the next step.
        """
        if self.sites[index].rotation == rotation:
            return
        site = self.sites[index] = replace(self.sites[index], rotation=rotation)
        rows = slice(self._first_rows[index], self._first_rows[index] + site.kv_heads)
        shared = self._shared
        self._is_channel[rows] = torch.arange(self._is_channel.shape[1], device=self.device) < site.channels
        for tensor in (shared.plan[rows], shared.plan_scale[rows], self._table[:, rows], self._table_run[:, rows]):
            tensor.zero_()
        shared.counts[rows, fields.COUNT_STEADY] = 0
        self.rule.forget(self, rows)

    def to(self, device: torch.device | str) -> None:
        """Move to `device` with all that was learnt; counts start anew. Syncs."""
        if torch.device(device) != self.device:
            learnt, frozen, keys = self.snapshot(), self._frozen, self._frozen_keys
            self.kept.to(device)
            self._allocate(torch.device(device))
            self.restore(learnt)
            self._frozen.copy_(frozen)
            self._frozen_keys.copy_(keys)
            self.rule.refit(self)

    @torch.no_grad()
    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return everything that decides the coming steps, as copies on the CPU. Syncs.

        With R heads in all, D channels of the widest: table fp32 [bins, R, 4, D], table_run int32 [bins, R] (number of
        the run that left an entry, 0: none), run int32 [] (number of the running one), plan fp32 [R, 4, D], plan_scale
        fp32 [R], steady bool [R] (heads whose latest step was as its plan expected). Of the open step: stats fp32
        [R, 4, D], pending bool [R] (heads with usable statistics), keys int32 [R, 4]. Every float is finite, and 0
        where nothing was learnt.
        """
        shared, channel, pending = self._shared, self._is_channel, self._seen()
        tensors = {
            "table": torch.where((self._table_run != 0)[..., None, None] & channel[:, None], self._table, 0.0),
            "table_run": self._table_run.abs(),
            "run": self._run,
            "plan": shared.plan,
            "plan_scale": shared.plan_scale,
            "stats": torch.where(pending[:, None, None] & channel[:, None], shared.stats, 0.0),
            "pending": pending,
            "keys": shared.counts[:, fields.COUNT_KEY_MAX : fields.COUNT_STEADY],
            "steady": shared.counts[:, fields.COUNT_STEADY] > 0,
        }
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, torch.Tensor]) -> None:
        """Continue from a `snapshot` of a state with the same sites and bins, in place.

        Counts go on from here. Shapes and values are not checked: the caller has done that (scale_files.py for files).
        """
        # all copies first: running out of memory must leave the state as it was
        new = {name: tensor.to(self.device) for name, tensor in snapshot.items()}
        shared, pending = self._shared, new["pending"]
        self._drain()
        self._table.copy_(new["table"])
        self._table_run.copy_(new["table_run"])
        self._run.copy_(new["run"])
        shared.plan.copy_(new["plan"])
        shared.plan_scale.copy_(new["plan_scale"])
        shared.stats.copy_(torch.where(pending[:, None, None], new["stats"], shared.stats))
        shared.counts[:, fields.COUNT_KEY_MAX : fields.COUNT_STEADY] = new["keys"]
        shared.counts[:, fields.COUNT_STEADY] = new["steady"].int()
        # one call marks the open step as seen; the report must not count it
        shared.counts[:, fields.COUNT_CALLS] = pending.int()
        self._totals[:, fields.COUNT_CALLS] -= pending.long()
        self.rule.refit(self)

    def summary(self) -> list[dict]:
        """Return the numbers of a report, a dict per site. Syncs.

        dynamic_calls are calls without a plan, mean over heads. Fractions of K's elements: outside (beyond the plan),
        below (in tiles that took a smaller scale), misfit (in heads whose centre and balance did not fit); of V's:
        clipped. lagged: query tiles with a softmax reference of the step before; redone: fraction of these repeated.
        """
        totals = (self._totals + self._shared.counts[:, : fields.COUNT_KEY_MAX]).cpu()
        known = (self._shared.plan_scale > 0).cpu()
        heads = [slice(first, first + site.kv_heads) for site, first in zip(self.sites, self._first_rows, strict=True)]
        return [
            {"name": site.name, **fractions(totals[own]), "known": bool(known[own].all())}
            for site, own in zip(self.sites, heads, strict=True)
        ]

    def _seen(self) -> torch.Tensor:
        """Return the heads, bool [R], that were called in this step and have finite statistics."""
        q_amax, k_max, k_min, v_amax = self._shared.stats.unbind(1)
        reached = q_amax + k_max.abs() + k_min.abs() + v_amax * 0.0
        usable = torch.isfinite(torch.where(self._is_channel, reached, 0.0)).all(-1)
        return (self._shared.counts[:, fields.COUNT_CALLS] > 0) & usable

    def _enter(self, u: float | torch.Tensor) -> torch.Tensor:
        """Return the bin of noise level u, int64 [1], and make it the running step's."""
        bin_ = self._noise_bins.of(u)
        self.bin.copy_(bin_[0])
        return bin_

    @property
    def table(self) -> torch.Tensor:
        """Statistics by noise level, fp32 [bins, R, 4, D]; plans may use only what `usable` marks."""
        return self._table

    @property
    def table_run(self) -> torch.Tensor:
        """The run that left each entry of the table, int32 [bins, R]: see table.record."""
        return self._table_run

    @property
    def step_stats(self) -> torch.Tensor:
        """Statistics of the step that `advance` closes, fp32 [R, 4, D]."""
        return self._shared.stats

    def usable(self, by: torch.Tensor) -> torch.Tensor:
        """Mark the table's entries that a plan may use. by: the runs they are from.

        Usable are the entries of a frozen table and, if the rule adapts, those of an EARLIER run.
        """
        if self.rule.adapts:
            return (by != 0) & ((self._frozen > 0) | (by.abs() < self._run))
        return (by != 0) & (self._frozen > 0)

    def from_table(self, bin_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return statistics [R, 4, D] of noise bin `bin_`, and the heads [R] that may be planned from them."""
        return self._table.index_select(0, bin_)[0], self.usable(self._table_run.index_select(0, bin_)[0])

    def bin_levels(self) -> torch.Tensor:
        """Noise level u at the middle of every bin, fp32 [bins]."""
        return self._noise_bins.levels()

    def head_scales(self, stats: torch.Tensor) -> torch.Tensor:
        """INT8 scale that statistics [..., R, 4, D] need, without margin -> [..., R]."""
        q_amax, _, k_amax = ranges(stats, self._is_channel)
        return (q_amax.sqrt() * k_amax.sqrt()).amax(-1) / INT8_MAX

    def strayed(self) -> torch.Tensor:
        """Return the heads [R] whose keys reached much further, or much less far, than their plan's."""
        shared = self._shared
        return strayed_heads(shared.plan, shared.plan_scale, shared.stats, self._is_channel, self.margin)

    def _drain(self) -> None:
        """Add the step's counts to the totals, and clear the recording tensors for the next step."""
        self._totals.add_(self._shared.counts[:, : fields.COUNT_KEY_MAX])
        clear_step(self._shared.stats, self._shared.counts)

    def _plan(self, source: Source, kept: torch.Tensor | None = None) -> None:
        write_plan(self._shared, self._is_channel, source, self.margin, kept)


def closing_call(state: ScaleState, device: torch.device) -> Callable | None:
    """Return the launch that closes a step of a state like this; None if PyTorch's operations do."""
    if device.type != "cuda" or type(state.rule).following is not Timestep.following:
        return None
    if state.device != device:  # the kernel is the same for all numbers of heads
        widest = max(site.head_dim for site in state.sites)
        sites = [Site("warm-up", 1, widest)]
        state = ScaleState(sites, device=device, margin=state.margin, bins=state.bins, rule=type(state.rule)())
    level = state._noise_bins.of(1.0)
    return functools.partial(plan_step, *state._launch_tensors(level, level), **state._launch_numbers())
