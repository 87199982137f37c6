"""Notices that a weight has changed, by a checksum of all its numbers or by a sample of them.

This is for writes that PyTorch does not count, such as those through `.data`. Reading all numbers at every run of a
pipeline would take longer than some of its steps, so a run reads a few.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch


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


class Comparison:
    """Comparison of samples by their bits, under way on their device until its result is asked for.

    Args: pairs: (sample now, sample before) of shape [count] each.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        groups: dict[tuple, list[int]] = {}
        for i, (now, before) in enumerate(pairs):
            if (now.dtype, now.shape) == (before.dtype, before.shape):
                groups.setdefault((now.device, before.device, now.dtype, now.shape), []).append(i)
        self._number, self._under_way = len(pairs), list[tuple[list[int], torch.Tensor, Any]]()
        for members in groups.values():
            now, before = (torch.cat([pairs[i][side] for i in members]) for side in (0, 1))
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[now.element_size()]
            differ = now.view(bits) != before.to(now.device).view(bits)
            self._under_way.append((members, *_sent(differ.view(len(members), -1).any(1))))

    def changed(self) -> list[bool]:
        """Return for each pair if any bit differs. Waits for the device."""
        found = [True] * self._number
        for members, flags, event in self._under_way:
            if event is not None:
                event.synchronize()
            for i, is_changed in zip(members, flags.tolist(), strict=True):
                found[i] = is_changed
        return found


def _sent(flags: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copy flags to the host. Returns (the copy, the event at which it is complete or None). Does not wait."""
    if not flags.is_cuda:
        return flags, None
    host = torch.empty(flags.shape, dtype=torch.bool, device="cpu", pin_memory=True).copy_(flags, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flags.device))
    return host, event


class WeightCheck:
    """Check for uncounted writes to a model's weights: it begins with a run, and ends when one of them is used.

    Attributes: is_under_way: nobody has asked for the result yet.
    """

    def __init__(self) -> None:
        self.is_under_way, self._lock = False, threading.Lock()
        self._states: list[Any] = []
        self._comparison = Comparison([])

    def begin(self, samples: Sequence[tuple[Any, tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """Begin to compare samples: (LinearState, (sample now, sample before)) of each weight."""
        comparison = Comparison([pair for _, pair in samples])
        with self._lock:
            self._states, self._comparison = [state for state, _ in samples], comparison
            self.is_under_way = True

    def end(self) -> None:
        """Doubt the weights whose samples differ. Waits for the device, once in a run."""
        with self._lock:
            if not self.is_under_way:
                return
            for state, is_changed in zip(self._states, self._comparison.changed(), strict=True):
                if is_changed:
                    state.touched = state.bias_touched = True
            self._states, self.is_under_way = [], False
