"""Which key tiles calls need not visit, kept from one denoising step to the next: the lists of all call sites.

Lists are of one run: another run, prompt or shape begins with empty ones, and its first call measures everything. What
a list says is checked on the device, in the calls themselves (../skipping.py); here it is decided which list a call
gets, and at which steps none. That is so at the first steps of a run, which decide what the picture becomes, at the
last ones, and where nobody says which step runs. Sites may have limits of their own, also by noise level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..facts.recipe import DEFAULT_RECIPE
from ..facts.skipping import TOTAL_FIELDS, SkipState, empty_lists, list_bytes, totals_of
from ..ops.skip_state import skip_block
from .row_maxima import MOST_CALLS, RowMaxima


# A bit for each pair of a query and a key tile: a video model of 40 layers, 40 heads and 76 000 tokens needs 97 MB on
# Hopper's tiles of 192 x 64, and as much again for guidance. What does not fit stays dense.
LIMIT_BYTES = 512 * 2**20
# Fewer key tiles than this are not worth a list: the text that a video looks at.
LEAST_TILES = 8
# Why a call has no list
DENSE = ("masked", "short", "first_last", "unfollowed", "memory", "calls", "graph", "parallel", "no_limit")


class SkipLists:
    """Lists of the call sites of one ScaleState, by shape and by place among the calls of a step.

    The n-th call of a site in a step meets what the n-th call of the step before left, so that guidance that calls a
    model twice keeps both apart. A layer that steps leave out (attention caches) finds its lists as old as they are:
    what would have been measured meanwhile is measured in its next call. A CUDA graph keeps the lists of the call that
    it was captured from; steps and runs reach it through `now` and `limit`, which are tensors.

    Args:
        sites: how many there are. device: where they run.
        limit: largest share of a row's probability that its list may leave out, below 1, 0: nothing; of all sites, or
            for each site one or a tuple of one for each range of noise levels.
        borders: noise levels between these ranges, ascending. Crossing one makes all lists void: those of a larger
            limit leave out more than a smaller one allows.
        every: each tile of query rows is measured at least once in so many steps.
        first_steps, last_steps: so many steps of a run have no lists.
        memory: bytes that may be kept in all.
    """

    def __init__(
        self, sites: int, device: torch.device | str, *, limit: float | Sequence[float | tuple[float, ...]],
        every: int, first_steps: int = 0, last_steps: int = 0, memory: int = LIMIT_BYTES,
        borders: Sequence[float] = (),
    ) -> None:  # fmt: skip
        of_sites = [limit] * sites if isinstance(limit, (int, float)) else limit
        ranges = len(borders) + 1
        self.limits = [x if isinstance(x, tuple) else (float(x),) * ranges for x in of_sites]
        self._sites, self.borders, self.every, self.memory = sites, tuple(borders), every, memory
        self.first_steps, self.last_steps = first_steps, last_steps
        self.reasons: list[dict[str, int]] = [{} for _ in range(sites)]
        self._is_followed = False
        self._allocate(torch.device(device))

    def _allocate(self, device: torch.device) -> None:
        self.device, self.nbytes = device, 0
        self._blocks: dict[tuple[int, str], tuple[int, int]] = {}  # head_dim, recipe → tile: asking takes a while
        self._kept: dict[tuple, SkipState] = {}
        self._calls: dict[tuple, int] = {}
        self._used: set[tuple] = set()  # in this run
        self._of_graphs: set[tuple] = set()
        self._is_dense = True
        with torch.inference_mode(False):  # inference tensors could not be written to outside of inference_mode
            self.now = torch.zeros((), dtype=torch.int32, device=device)
            # of each site in this step; 16 bytes a site: rows are aligned as kernels want it
            self.limit_of_step = torch.zeros(self._sites, 4, dtype=torch.float32, device=device)
            limits = torch.tensor(self.limits, dtype=torch.float32, device=device)
            self._limits = limits.reshape(self._sites, -1).T.contiguous()
            self._borders = torch.tensor(self.borders, dtype=torch.float32, device=device)
            self._range = torch.zeros(1, dtype=torch.int64, device=device)
            self.totals = torch.zeros(self._sites, TOTAL_FIELDS, dtype=torch.int64, device=device)
            self.went_back = torch.zeros((), dtype=torch.int64, device=device)

    def of(self, site: int, q: torch.Tensor, k: torch.Tensor, recipe: str = DEFAULT_RECIPE) -> SkipState | None:
        """The lists of the running call of a site, q [B, S_q, H, D] and k [B, S_kv, H_kv, D]; None: it is dense.

        The reason of the latter is counted.
        """
        reason, found = self._look_up(site, q, k, recipe)
        if reason:
            self.leave_out(site, reason)
        return found

    def leave_out(self, site: int, reason: str) -> None:
        """Count a call without a list. reason: one of DENSE."""
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
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        if key not in self._kept:
            nbytes = list_bytes(*shape, *block)
            if capturing:
                return "graph", None  # what is allocated now would be the graph's own
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
                )
            self.nbytes += nbytes
        self._used.add(key)
        if capturing:  # at every step, for the graph is of all of them: at the first and last ones the limit is 0
            self._of_graphs.add(key)
        elif self._is_dense:
            return "first_last", None
        return "", self._kept[key]

    def next_step(self) -> None:
        """A step is done: the calls are counted anew."""
        if torch.compiler.is_compiling():
            self._is_followed = False  # this is what compiled code does at every step, and all that it does
            return
        self._calls = {}
        self.now.add_(1)

    def place(self, taken: int, left: int) -> None:
        """Where the running step is in its run: so many steps before it, and so many left, itself included."""
        dense = taken < self.first_steps or left <= self.last_steps
        if dense != self._is_dense or not self._is_followed:
            self._is_dense, self._is_followed = dense, True
            self._set_limits()

    def at_level(self, u: float | torch.Tensor) -> None:
        """The running step is at this noise level."""
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
        """Steps that go back to a higher noise level make all lists void: what follows is measured anew."""
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
        """No lists until `place`: nobody says which step runs."""
        if self._is_followed and not torch.compiler.is_compiling():
            self.limit_of_step.zero_()  # graphs
        self._is_followed = False

    def clear(self) -> None:
        """Another run begins: all lists are void, and those that the run before did not use go."""
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
        """Move to `device`: the lists are left behind, the counts start anew. Syncs."""
        if torch.device(device) != self.device:
            self._allocate(torch.device(device))
            self._is_followed = False

    def summary(self) -> list[dict]:
        """Per site: what `skipping.totals_of` has, and "dense": {reason: calls}. Syncs."""
        totals = self.totals.cpu()
        return [totals_of(row) | {"dense": dict(why)} for row, why in zip(totals, self.reasons, strict=True)]


class KeptOfCalls:
    """Row maxima, and the lists of key tiles to skip where somebody wants them.

    Attributes: row_maxima. skip_lists: None until it is set.
    """

    def __init__(self) -> None:
        self.row_maxima = RowMaxima()
        self.skip_lists: SkipLists | None = None

    def _all(self) -> list[RowMaxima | SkipLists]:
        return [self.row_maxima] if self.skip_lists is None else [self.row_maxima, self.skip_lists]

    def next_step(self) -> None:
        """A step is done."""
        for kept in self._all():
            kept.next_step()

    def stop(self) -> None:
        """Keep nothing until somebody says where a run begins."""
        for kept in self._all():
            kept.stop()

    def clear(self) -> None:
        """Another run begins: the last step of a run says nothing of the first of the next."""
        for kept in self._all():
            kept.clear()

    def reset(self) -> None:
        """As `clear`, and all counts go."""
        self.clear()
        if self.skip_lists is not None:
            self.skip_lists.reset()

    def to(self, device: torch.device | str) -> None:
        """The model runs on `device` from now on."""
        self.clear()
        if self.skip_lists is not None:
            self.skip_lists.to(device)
