"""Notices that a weight has changed, by a checksum of all its numbers or by a sample of them.

This is for writes that PyTorch does not count, such as those through `.data`. Reading all numbers at every run of a
pipeline would take longer than some of its steps, so a run reads a few.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sage_kernels.compat import is_traced, without_dispatch_modes


_NUMBERS = 64  # of a weight, in its sample


def checksum(weight: torch.Tensor) -> tuple[int, int]:
    """Return two integers that depend on all bits of a weight and their positions. Syncs."""
    size = weight.element_size()
    bits = weight.detach().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])
    rows, columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    place = torch.arange(1, max(bits.shape) + 1, device=weight.device)
    found = torch.stack([(rows * place[: len(rows)]).sum(), (columns * place[: len(columns)]).sum()])
    return tuple(found.tolist())


def sample_of(x: torch.Tensor) -> torch.Tensor:
    """Return up to 64 numbers along the diagonal of a weight [N, K], as a view."""
    (rows, columns), (down, right) = x.shape, x.stride()
    count = min(_NUMBERS, rows, columns)
    apart = max(count, 1)
    return x.as_strided((count,), (rows // apart * down + columns // apart * right,))


def are_changed(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return for each pair (sample now, sample before) if any bit differs.

    Samples are of shape [count]. Syncs once for all pairs of equal devices, dtypes and shapes.
    """
    groups: dict[tuple, list[int]] = {}
    found = [True] * len(pairs)
    for i, (now, before) in enumerate(pairs):
        if (now.dtype, now.shape) == (before.dtype, before.shape):
            groups.setdefault((now.device, before.device, now.dtype, now.shape), []).append(i)
    for members in groups.values():
        now, before = (torch.cat([pairs[i][side] for i in members]) for side in (0, 1))
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[now.element_size()]
        differ = now.view(bits) != before.to(now.device).view(bits)
        for i, is_changed in zip(members, differ.view(len(members), -1).any(1).tolist(), strict=True):
            found[i] = is_changed
    return found


class WeightCheck:
    """Check for uncounted writes to a model's weights: once in a run, before one of them is used."""

    def __init__(self) -> None:
        self._wanted, self._made, self._lock = 0, 0, threading.Lock()
        self._samples: Callable[[], Any] = lambda: None

    @property
    def is_wanted(self) -> bool:
        """True if a run began, and no weight was used since."""
        return self._wanted != self._made

    def want(self, samples: weakref.WeakMethod[Any]) -> None:
        """Ask for a check. samples: returns (LinearState, (sample now, sample before)) of each weight."""
        self._samples = samples
        self._wanted += 1

    def make(self) -> None:
        """Mark the weights that were written to without a count, to quantise them again. Syncs.

        Does nothing if no check is wanted, or while a CUDA graph or a trace is recorded.
        """
        if not self.is_wanted or is_traced():
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        with self._lock:
            wanted, samples = self._wanted, self._samples()
            if wanted == self._made:
                return
            with torch.no_grad(), without_dispatch_modes():  # such as one of fake tensors: weights have numbers
                looked_at = [] if samples is None else samples()
                changed = are_changed([pair for _, pair in looked_at])
            for (state, _), is_changed in zip(looked_at, changed, strict=True):
                if is_changed:
                    state.touched = state.bias_touched = True
            self._made = wanted
