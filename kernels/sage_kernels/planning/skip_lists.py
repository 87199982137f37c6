"""Lists of key tiles to skip, and whatever else calls keep from one denoising step to the next.

Lists are of one run: another run, prompt or shape begins with empty lists, and its first call measures everything. The
calls themselves check their lists on the device (facts/skipping.py). This module decides which list a call gets, and
when a call gets none: at the first steps of a run, which decide the picture's contents, at the last ones, and where
the running step is unknown. Sites may have limits of their own, also by noise level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..facts.recipe import DEFAULT_RECIPE
from ..facts.skipping import TOTAL_FIELDS, SkipState, empty_lists, list_bytes, totals_of
from ..ops.skip_state import skip_block
from .row_maxima import MOST_CALLS, RowMaxima


# A bit for each pair of a query and a key tile: a video model of 40 layers, 40 heads and 76 000 tokens needs 97 MB on
# Hopper's tiles of 192 x 64, and as much again for guidance. Calls beyond the limit visit all tiles.
LIMIT_BYTES = 512 * 2**20
# Fewer key tiles are not worth a list, such as those of a video model's text.
LEAST_TILES = 8
# Why a call has no list
DENSE = ("masked", "short", "first_last", "unfollowed", "memory", "calls", "graph", "parallel", "no_limit")


class CapturedLists(NamedTuple):
    """The lists that a captured forward reads and writes.

    Attributes:
        now: `SkipLists.now` at the capture.
        calls: ((place, number of the call in its step), its lists or None), in order.
        reasons: (site, reason) of each call without lists.
        missing: calls whose lists have yet to be made, which an eager call does.
    """

    now: torch.Tensor
    calls: list[tuple[tuple, SkipState | None]]
    reasons: list[tuple[int, str]]
    missing: list[tuple]


class SkipLists:
    """Skip lists of the call sites of one ScaleState, by shape and by place among the calls of a step.

    The n-th call of a site in a step reads the list of the n-th call in the step before, so that guidance that calls a
    model twice keeps both apart. A layer that some steps leave out (attention caches) finds its lists at their age:
    its next call measures all that would have been measured meanwhile. A CUDA graph keeps the lists of the call that
    it was captured from; steps and runs reach it through `now` and `limit`, which are tensors. Whoever captures within
    `captured` says which step a graph is for, and counts its replays.

    Args:
        sites: number of call sites. device: where they run.
        limit: largest share of a row's probability that its list may leave out, below 1; 0: nothing. One number for
            all sites, or for each site a number or a tuple with a number for each range of noise levels.
        borders: noise levels between these ranges, ascending. Crossing one makes all lists void, since lists of a
            larger limit leave out more than a smaller one allows.
        every: each tile of query rows is measured at least once in so many steps.
        first_steps, last_steps: number of steps without lists at the start and at the end of a run.
        memory: bytes that may be kept in all.
        compensates: of SkipState.
    """

    def __init__(
        self, sites: int, device: torch.device | str, *, limit: float | Sequence[float | tuple[float, ...]],
        every: int, first_steps: int = 0, last_steps: int = 0, memory: int = LIMIT_BYTES,
        borders: Sequence[float] = (), compensates: bool = False,
    ) -> None:  # fmt: skip
        of_sites = [limit] * sites if isinstance(limit, (int, float)) else limit
        ranges = len(borders) + 1
        self.limits = [x if isinstance(x, tuple) else (float(x),) * ranges for x in of_sites]
        self._sites, self.borders, self.every, self.memory = sites, tuple(borders), every, memory
        self.first_steps, self.last_steps, self.compensates = first_steps, last_steps, compensates
        self.reasons: list[dict[str, int]] = [{} for _ in range(sites)]
        self._is_followed = False
        self._allocate(torch.device(device))

    def _allocate(self, device: torch.device) -> None:
        self.device, self.nbytes = device, 0
        self._blocks: dict[tuple[int, str], tuple[int, int]] = {}  # (head_dim, recipe) → tile: asking takes long
        self._kept: dict[tuple, SkipState] = {}
        self._calls: dict[tuple, int] = {}
        self._used: set[tuple] = set()  # in this run
        self._of_graphs: set[tuple] = set()
        self._captured: CapturedLists | None = None
        self._is_dense = True
        with torch.inference_mode(False):  # inference tensors could not be written to outside of inference_mode
            self.now = torch.zeros((), dtype=torch.int32, device=device)
            # limit of each site in this step; 16 bytes a site: rows are aligned as kernels want them
            self.limit_of_step = torch.zeros(self._sites, 4, dtype=torch.float32, device=device)
            limits = torch.tensor(self.limits, dtype=torch.float32, device=device)
            self._limits = limits.reshape(self._sites, -1).T.contiguous()
            self._borders = torch.tensor(self.borders, dtype=torch.float32, device=device)
            self._range = torch.zeros(1, dtype=torch.int64, device=device)
            self.totals = torch.zeros(self._sites, TOTAL_FIELDS, dtype=torch.int64, device=device)
            self.went_back = torch.zeros((), dtype=torch.int64, device=device)

    def of(self, site: int, q: torch.Tensor, k: torch.Tensor, recipe: str = DEFAULT_RECIPE) -> SkipState | None:
        """Return the lists of the running call of a site, or None if it visits all tiles.

        q [B, S_q, H, D], k [B, S_kv, H_kv, D]. The reason for None is counted.
        """
        reason, found = self._look_up(site, q, k, recipe)
        if reason:
            self.leave_out(site, reason)
        return found

    def leave_out(self, site: int, reason: str) -> None:
        """Count a call without a list. reason: one of DENSE."""
        if self._captured is not None:
            self._captured.reasons.append((site, reason))
        else:
            self.reasons[site][reason] = self.reasons[site].get(reason, 0) + 1

    def _look_up(self, site: int, q, k, recipe: str) -> tuple[str, SkipState | None]:
        if not self._is_followed or q.device != self.device:
            return "unfollowed", None
        if not any(self.limits[site]):
            return "no_limit", None
        batch, seq_q, heads, head_dim = q.shape
        block = self._blocks.get((head_dim, recipe))
        if block is None:
            block = self._blocks[head_dim, recipe] = skip_block(q.device, head_dim, recipe)
        if -(-k.shape[1] // block[1]) < LEAST_TILES:
            return "short", None
        shape = (batch, heads, seq_q, k.shape[1])
        place = (site, shape, block)
        call = self._calls[place] = self._calls.get(place, -1) + 1
        if call >= MOST_CALLS:
            return "calls", None
        key = (place, call)
        if self._captured is not None:
            found = self._kept.get(key)
            if found is None and self.nbytes + list_bytes(*shape, *block) > self.memory:
                return "memory", None
            self._captured.calls.append((key, None if self._is_dense else found))
            if self._is_dense:
                return "first_last", None
            if found is None:
                self._captured.missing.append(key)
            return "", found
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        if key not in self._kept:
            nbytes = list_bytes(*shape, *block)
            if capturing:
                return "graph", None  # memory allocated now would belong to the graph
            if self.nbytes + nbytes > self.memory:
                return "memory", None
            with torch.inference_mode(False):
                self._kept[key] = empty_lists(
                    *shape,
                    block,
                    every=self.every,
                    now=self.now,
                    limit=self.limit_of_step[site, 0],
                    totals=self.totals[site],
                    compensates=self.compensates,
                )
            self.nbytes += nbytes
        self._used.add(key)
        if capturing:  # at every step, since all of them replay the graph; at first and last steps the limit is 0
            self._of_graphs.add(key)
        elif self._is_dense:
            return "first_last", None
        return "", self._kept[key]

    # --- captures that are told what step they are for, and whose replays are counted ---

    @property
    def kind_of_step(self) -> str:
        """The kind of the running step: "" without lists, "first_last", or "listed"."""
        if not self._is_followed:
            return ""
        return "first_last" if self._is_dense else "listed"

    @contextmanager
    def captured(self) -> Iterator[CapturedLists]:
        """Note the lists of the calls within, which are captured for this kind of step. Makes and counts none."""
        calls, self._calls = self._calls, dict(self._calls)
        self._captured = CapturedLists(self.now, [], [], [])
        try:
            yield self._captured
        finally:
            self._captured, self._calls = None, calls

    def are_next(self, captured: CapturedLists) -> bool:
        """Return True if captured calls have the numbers that the next calls of this step would have."""
        numbers: dict[tuple, int] = {}
        for (place, call), _ in captured.calls:
            numbers[place] = numbers.get(place, self._calls.get(place, -1)) + 1
            if numbers[place] != call:
                return False
        return True

    def hold(self, captured: CapturedLists) -> bool:
        """Return True if captured calls have the lists of later calls. Dropped ones are kept again.

        `clear` makes all lists void when it drops some, so what comes back is as good as new.
        """
        if captured.now is not self.now:
            return False
        dropped = []
        for key, lists in captured.calls:
            kept = self._kept.get(key)
            if lists is None or kept is lists:
                continue
            if kept is not None:
                return False
            dropped.append((key, lists))
        nbytes = self.nbytes + sum(lists.nbytes for _, lists in dropped)
        if dropped and nbytes > self.memory:
            return False
        self._kept.update(dropped)
        self.nbytes = nbytes
        return True

    def replayed(self, captured: CapturedLists) -> None:
        """Count the calls of a replay."""
        for (place, call), _ in captured.calls:
            self._calls[place] = call
            self._used.add((place, call))
        for (site, reason), calls in Counter(captured.reasons).items():
            self.reasons[site][reason] = self.reasons[site].get(reason, 0) + calls

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that calls write to."""
        own = [x for lists in self._kept.values() for x in (lists.lists, lists.bound, lists.alarms, lists.clock)]
        return [*own, self.totals]

    def counts(self) -> tuple:
        """Return the counts of calls on the host, for `restore`."""
        return dict(self._calls), set(self._used), [dict(x) for x in self.reasons]

    def restore(self, counts: tuple) -> None:
        """Restore the counts of calls on the host. counts: from `counts`."""
        self._calls, self._used, self.reasons = dict(counts[0]), set(counts[1]), [dict(x) for x in counts[2]]

    def next_step(self) -> None:
        """End a step: count calls anew."""
        if torch.compiler.is_compiling():
            self._is_followed = False  # compiled code runs this line at every step, and none of those below
            return
        self._calls = {}
        self.now.add_(1)

    def place(self, taken: int, left: int) -> None:
        """Tell which step of its run is running: steps taken before it, and steps left, itself included."""
        dense = taken < self.first_steps or left <= self.last_steps
        if dense != self._is_dense or not self._is_followed:
            self._is_dense, self._is_followed = dense, True
            self._set_limits()

    def at_level(self, u: float | torch.Tensor) -> None:
        """Tell the noise level of the running step."""
        if not self.borders:
            return
        level = u.to(self.device) if isinstance(u, torch.Tensor) and u.is_cuda else float(u)
        now = (self._borders <= level).sum().reshape(1)
        self.now.add_((now != self._range)[0] * self.every)
        self._range.copy_(now)
        if self._is_followed:
            self._set_limits()

    def _set_limits(self) -> None:
        if self._is_dense:
            self.limit_of_step.zero_()
        else:
            self.limit_of_step[:, 0].copy_(self._limits.index_select(0, self._range)[0])

    def in_order(self, u_finished: float | torch.Tensor, u_next: float | torch.Tensor) -> None:
        """Make all lists void where the noise level rises from one step to the next."""
        finished, following = (u.to(self.device) if isinstance(u, torch.Tensor) and u.is_cuda else float(u)
                               for u in (u_finished, u_next))  # fmt: skip
        back = following > finished
        if isinstance(back, torch.Tensor):
            self.now.add_(back * self.every)
            self.went_back.add_(back)
        elif back:
            self.now.add_(self.every)
            self.went_back.add_(1)

    def stop(self) -> None:
        """Give out no lists until `place`: the running step is unknown."""
        if self._is_followed and not torch.compiler.is_compiling():
            self.limit_of_step.zero_()  # for CUDA graphs, which keep their lists
        self._is_followed = False

    def clear(self) -> None:
        """Begin another run: all lists are void, and those that the run before did not use are dropped."""
        self._kept = {key: lists for key, lists in self._kept.items() if key in self._used | self._of_graphs}
        self.nbytes = sum(lists.nbytes for lists in self._kept.values())
        self._calls, self._used = {}, set()
        self.now.add_(2 * self.every)

    def reset(self) -> None:
        """Forget everything, counts included."""
        self.clear()
        self.reasons = [{} for _ in range(self._sites)]
        self.totals.zero_()
        self.went_back.zero_()

    def to(self, device: torch.device | str) -> None:
        """Move to `device`: lists are dropped, counts start anew. Syncs."""
        if torch.device(device) != self.device:
            self._allocate(torch.device(device))
            self._is_followed = False

    def summary(self) -> list[dict]:
        """Return per site the numbers of `skipping.totals_of`, and "dense": {reason: calls}. Syncs."""
        totals = self.totals.cpu()
        return [totals_of(row) | {"dense": dict(why)} for row, why in zip(totals, self.reasons, strict=True)]


class KeptOfCalls:
    """Row maxima, and skip lists if they are in use: kept from step to step, never beyond a run.

    Attributes:
        row_maxima: always there.
        skip_lists: None until it is set.
    """

    def __init__(self) -> None:
        self.row_maxima = RowMaxima()
        self.skip_lists: SkipLists | None = None

    def _all(self) -> list[RowMaxima | SkipLists]:
        return [self.row_maxima] if self.skip_lists is None else [self.row_maxima, self.skip_lists]

    def next_step(self) -> None:
        """End a step."""
        for kept in self._all():
            kept.next_step()

    def stop(self) -> None:
        """Keep nothing until `clear` or `place`: nothing says where a run begins."""
        for kept in self._all():
            kept.stop()

    def clear(self) -> None:
        """Begin another run: the last step of a run tells nothing of the first of the next."""
        for kept in self._all():
            kept.clear()

    def reset(self) -> None:
        """Forget everything, counts included."""
        self.clear()
        if self.skip_lists is not None:
            self.skip_lists.reset()

    def to(self, device: torch.device | str) -> None:
        """Move to `device`."""
        self.clear()
        if self.skip_lists is not None:
            self.skip_lists.to(device)
