"""Skip lists: key tiles that query tiles need not visit, kept between denoising steps.

A row of attention loses, with the key tiles that it does not visit, their share of its probability. The share of every
tile is measured against the row's own log-sum-exp over all keys, so the order of visits does not matter. Each tile of
query rows is measured again at least once in `every` steps, before the attention of that step, and takes its list from
that step's own scores: the tiles of the smallest shares, as many as keep the sum of a row's losses within half of the
limit. The other half is room for changes until the next measurement. A tile of query rows that has meanwhile lost more
than the limit raises an alarm for its head: the call visits everything except what was measured in it, and the next
call measures all of the head. Maths: docs/skipping.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


WORD = 32  # key tiles of one int32 of a list
# A share of 2^(-level / LEVELS) or less is kept as one byte, rounded up: 2^-63.75 stands for all that is smaller.
LEVELS, LARGEST_LEVEL = 4, 255
# Room for fp32's error in a share: scores below 2^12 (base 2) are rounded to 2^-13, which moves an exponential by
# 2^-13.5, and the sums of both loops add a few 2^-24 a term.
SHARE_SLACK = 1 + 2.0**-10
# Share of the limit that new lists may use.
FILL = 0.5
# Share given to the tiles of a row with NaN: it is too large for any list.
NO_SHARE = 2.0
# clock[i]: run step of the last call, steps since then of the running call, calls so far, number of the running call,
# run step of the call that began with void lists
CLOCK_LAST, CLOCK_GAP, CLOCK_CALLS, CLOCK_RUNNING, CLOCK_BEGAN = range(5)
CLOCK_FIELDS = 5
# totals[i]: pairs of a query tile and a key tile, pairs visited, measurements of lists in use, measurements beyond the
# limit, sum of the measured losses (in LOSS_UNITs), largest loss (bits of an fp32)
TOTAL_TILES, TOTAL_VISITED, TOTAL_MEASURED, TOTAL_BEYOND, TOTAL_LOST, TOTAL_LARGEST = range(6)
TOTAL_FIELDS = 8  # 64 bytes: rows of a table of totals are then aligned as kernels want them
LOSS_UNIT = 2.0**-30
NEVER = -(2**30)  # run step of a call that was never made


class SkipState(NamedTuple):
    """Skip lists of one call site, for calls of one shape; M tiles of block_q query rows.

    Attributes:
        lists: int32 [B, H, M, words], read and written: bit i of word w is set where key tile 32·w + i is skipped.
        bound: fp32 [B, H, M], written: the largest share of its probability that a row of the query tile could lose in
            the step that made its list.
        alarms: int32 [2, B, H], read and written: the number of the last call in which a list of the head lost more
            than the limit, and 1 where that was the call before, else 0.
        clock: int32 [5], read and written: see CLOCK_LAST and following.
        now: int32 []: step of the run, which never goes back; a jump of `every` makes all lists void.
        limit: fp32 []: largest share of a row's probability that may be skipped, below 1; 0: nothing is skipped.
        totals: int64 [8], incremented: see TOTAL_TILES and following.
        every: each tile of query rows is measured at least once in so many steps, one tile of each head in every step.
        block_q, block_k: query rows and keys of a tile, of the kernel that reads the lists.
        compensates: a skipped tile stands in its rows' softmax as its mean key and mean value.
    """

    lists: torch.Tensor
    bound: torch.Tensor
    alarms: torch.Tensor
    clock: torch.Tensor
    now: torch.Tensor
    limit: torch.Tensor
    totals: torch.Tensor
    every: int
    block_q: int
    block_k: int
    compensates: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All fields that are tensors."""
        return self[:7]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that no other call site shares."""
        return sum(x.nbytes for x in (self.lists, self.bound, self.alarms, self.clock))


def list_shape(
    batch: int, heads: int, seq_q: int, seq_kv: int, block_q: int, block_k: int
) -> tuple[int, int, int, int]:
    """Shape of `SkipState.lists`: [B, H, query tiles, words]."""
    tiles = -(-seq_kv // block_k)
    return batch, heads, -(-seq_q // block_q), -(-tiles // WORD)


def list_bytes(batch: int, heads: int, seq_q: int, seq_kv: int, block_q: int, block_k: int) -> int:
    """Bytes of a SkipState of this shape: a bit per pair of tiles, 4 bytes per query tile, 8 per head."""
    b, h, rows, words = list_shape(batch, heads, seq_q, seq_kv, block_q, block_k)
    return 4 * (b * h * (rows * (words + 1) + 2) + CLOCK_FIELDS)


def empty_lists(
    batch: int, heads: int, seq_q: int, seq_kv: int, block: tuple[int, int], *, every: int, now: torch.Tensor,
    limit: torch.Tensor, totals: torch.Tensor, compensates: bool = False,
) -> SkipState:  # fmt: skip
    """Make lists that skip nothing, on the device of `now`: the first call then measures all tiles."""
    shape, device = list_shape(batch, heads, seq_q, seq_kv, *block), now.device
    clock = torch.zeros(CLOCK_FIELDS, dtype=torch.int32, device=device)
    clock[CLOCK_LAST] = NEVER
    return SkipState(
        lists=torch.zeros(shape, dtype=torch.int32, device=device),
        bound=torch.zeros(shape[:3], dtype=torch.float32, device=device),
        alarms=torch.zeros(2, *shape[:2], dtype=torch.int32, device=device),
        clock=clock, now=now, limit=limit, totals=totals, every=every, block_q=block[0], block_k=block[1],
        compensates=compensates,
    )  # fmt: skip


def unpack(lists: torch.Tensor, tiles: int) -> torch.Tensor:
    """Convert lists int32 [..., words] to bool [..., tiles]: True where a key tile is skipped."""
    bits = lists[..., None] >> torch.arange(WORD, dtype=torch.int32, device=lists.device)
    return (bits & 1).flatten(-2)[..., :tiles] != 0


def pack(skipped: torch.Tensor) -> torch.Tensor:
    """Convert bool [..., tiles] to lists int32 [..., words]."""
    bits = torch.nn.functional.pad(skipped, (0, -skipped.shape[-1] % WORD)).unflatten(-1, (-1, WORD)).long()
    words = (bits << torch.arange(WORD, device=skipped.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def totals_of(totals: torch.Tensor) -> dict[str, float | int]:
    """Convert totals int64 [8] on the CPU to the numbers of a report.

    skipped_fraction: of all pairs of tiles. measured: measurements of query tiles whose list was in use. lost_mean and
    lost_max: share of its probability that the worst row of such a tile had lost by then. beyond: how many of the
    measurements were above the limit.
    """
    tiles, visited, measured, beyond, lost, largest = (int(x) for x in totals[:6])
    return {
        "skipped_fraction": 1 - visited / tiles if tiles else 0.0,
        "lost_mean": lost * LOSS_UNIT / measured if measured else 0.0,
        "lost_max": float(torch.tensor(largest, dtype=torch.int32, device="cpu").view(torch.float32)),
        "measured": measured,
        "beyond": beyond,
    }
