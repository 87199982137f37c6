"""Indices of a mask's valid tokens, without a wait for the GPU if their number is known.

Mochi's attention processor asks torch.nonzero which tokens of a text are valid. The size of the answer depends on
values on the GPU, so the host waits for them in each layer, and no CUDA graph can hold such a call. With the numbers
read once, outside of the graph, the same indices are an ordinary computation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...postponed.tensor import version_of


Counts = tuple[tuple[int, tuple[int, ...]], ...]  # (place among a call's tensors, number of valid tokens of each row)
MOST_MASKS = 8  # whose numbers are kept
_nonzero = torch.nonzero


class _Known(threading.local):
    """The masks of the call that is captured in this thread."""

    rows: KnownRows | None = None


_known = _Known()


class KnownRows:
    """Rows of masks whose numbers of valid tokens are known.

    Args: masks: (mask [B, S], number of valid tokens of each row).
    """

    def __init__(self, masks: Sequence[tuple[torch.Tensor, tuple[int, ...]]]):
        self._counts = {_place(row): n for mask, counts in masks for row, n in zip(mask, counts, strict=True)}
        self._indices: dict[Any, torch.Tensor] = {}

    def indices(self, row: torch.Tensor) -> torch.Tensor | None:
        """Return torch.nonzero(row) as int64 [number of valid tokens, 1]; None if that number is not known.

        The first layer computes them, the others get the same tensor.
        """
        place = _place(row)
        count = self._counts.get(place)
        if count is None:
            return None
        if place not in self._indices:
            so_far = (row != 0).cumsum(0)  # [S]: the i-th valid token is the first one with i of them so far
            wanted = torch.arange(1, count + 1, device=row.device, dtype=so_far.dtype)
            self._indices[place] = torch.searchsorted(so_far, wanted)[:, None]
        return self._indices[place]


def _place(row: torch.Tensor) -> tuple[Any, ...]:
    return row.data_ptr(), row.shape, row.stride(), row.dtype


def run_with_known_rows(
    run: Callable[[], Any], masks: Sequence[tuple[torch.Tensor, tuple[int, ...]]]
) -> Callable[[], Any]:
    """Return `run` as a function whose processors know these masks. masks: as for KnownRows."""

    def with_rows() -> Any:
        outer, _known.rows = _known.rows, KnownRows(masks)
        try:
            return run()
        finally:
            _known.rows = outer

    return with_rows if masks else run


def nonzero(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replace torch.nonzero inside a Sage class; torch's own runs, and waits, if x is not known."""
    if torch.compiler.is_compiling():
        return torch.nonzero(x, *args, **kwargs)
    is_usual = not args and kwargs in ({}, {"as_tuple": False}) and torch.nonzero is _nonzero
    found = _known.rows.indices(x) if _known.rows is not None and is_usual else None
    return torch.nonzero(x, *args, **kwargs) if found is None else found


class MaskCounts:
    """Numbers of valid tokens of the masks that a model was called with lately.

    A pipeline calls its model with the same mask in each step. So the host waits for its values in the first step,
    and again only if the tensor is another one or was written to.
    """

    def __init__(self) -> None:
        self._read: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []

    def of(self, tensors: Iterator[torch.Tensor]) -> Counts:
        """Return the counts of the masks among a call's tensors.

        A mask has two dimensions, and integers or bools.
        """
        found = ((place, x) for place, x in enumerate(tensors) if x.dim() == 2 and _is_mask(x))
        return tuple((place, self._count(x)) for place, x in found)

    def _count(self, mask: torch.Tensor) -> tuple[int, ...]:
        version = version_of(mask)
        for x, then, counts in self._read:
            if x is mask and then == version:
                return counts
        counts = tuple((mask != 0).sum(1).tolist())
        if version is not None:  # None: writes to it are not counted
            self._read = [(mask, version, counts), *(read for read in self._read if read[0] is not mask)][:MOST_MASKS]
        return counts

    def forget(self) -> None:
        """Let go of the masks."""
        self._read.clear()


def _is_mask(x: torch.Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()
