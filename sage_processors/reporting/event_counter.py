"""Counters of events in a layer, cheap in eager calls and correct in compiled and captured ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sage_kernels.compat import mark_static_address


_counting = threading.Lock()  # one for all counters, as counters are copied together with their layers


class _Thread(threading.local):
    events: list[tuple[EventCounter, int, int]] | None = None  # see `collected`


_thread = _Thread()
_settlers: weakref.WeakSet = weakref.WeakSet()


def settle_with(settler: Any) -> None:
    """Call settler.settle() before counts are read, as long as it lives.

    It adds calls that it has counted itself.
    """
    _settlers.add(settler)


@contextmanager
def collected() -> Iterator[list[tuple[EventCounter, int, int]]]:
    """Collect (counter, event, calls) of this thread's calls in place of counting them."""
    before, _thread.events = _thread.events, []
    try:
        yield _thread.events
    finally:
        _thread.events = before


class EventCounter:
    """Counts of the events in one layer.

    Each event has two counts. Eager calls use a Python int, because a tensor would cost one launch in each call.
    Calls that run again without Python (torch.compile, CUDA graphs) use a tensor.

    Attributes:
        eager: list with one int per event. traced: int64 [events], on the device of the layer.
    """

    def __init__(self, events: int, device: torch.device | str = "cpu"):
        self.eager = [0] * events
        self._keep(torch.zeros(events, dtype=torch.int64, device="cpu"), device)

    def _keep(self, numbers: torch.Tensor, device) -> None:
        with torch.inference_mode(False):  # inference tensors can't be written to outside of inference_mode
            self.traced = numbers.to(device, copy=True)
        mark_static_address(self.traced, guard=False)  # CUDA graphs refuse to mutate other inputs

    def add(self, event: int, calls: int = 1) -> None:
        """Count events, in an eager, compiled or captured call."""
        if torch.compiler.is_compiling():
            self.traced[event].add_(calls)
        else:
            is_captured = self.traced.is_cuda and torch.cuda.is_current_stream_capturing()
            self.add_uncompiled(event, is_captured, calls)

    def add_uncompiled(self, event: int, is_captured: bool, calls: int = 1) -> None:
        """Count events in an eager or captured call."""
        if _thread.events is not None:
            _thread.events.append((self, event, calls))
        elif is_captured and self.traced.is_cuda:
            self.traced[event].add_(calls)
        else:
            self.add_eager(event, calls)

    def add_eager(self, event: int, calls: int = 1) -> None:
        """Count events of calls that are neither compiled nor captured."""
        if _thread.events is not None:
            _thread.events.append((self, event, calls))
            return
        with _counting:
            self.eager[event] += calls

    def numbers(self) -> list[int]:
        """Return the sums of both counts, one per event. Waits for the device."""
        for settler in list(_settlers):
            settler.settle()
        return [eager + traced for eager, traced in zip(self.eager, self.traced.tolist(), strict=True)]

    def zero(self) -> None:
        """Set all counts to 0."""
        self.eager = [0] * len(self.eager)
        self.traced.zero_()

    def take_over(self, other: EventCounter) -> None:
        """Copy the counts of another counter of the same events."""
        self.eager = list(other.eager)
        self.traced.copy_(other.traced)

    def to(self, device: torch.device | str) -> None:
        """Move the counter to another device."""
        if self.traced.device != torch.device(device):
            self._keep(self.traced, device)


_shared: dict[tuple[str, torch.device], EventCounter] = {}


def shared_counter(whose: str, events: int, device: torch.device) -> EventCounter:
    """Return the counter of calls on a device that belong to no layer. Makes it on first use.

    Args: whose: name of the counter. events: number of events.
    """
    if (whose, device) not in _shared:
        _shared[whose, device] = EventCounter(events, device)
    return _shared[whose, device]


@torch.compiler.assume_constant_result
def _shared_traced(whose, events, device):
    return shared_counter(whose, events, device).traced


def count_shared(whose: str, events: int, event: int, device: torch.device) -> None:
    """Count an event of a call that belongs to no layer.

    A traced call can't make a counter. It gets the tensor of an existing one as a constant.
    """
    if torch.compiler.is_compiling():
        _shared_traced(whose, events, device)[event].add_(1)
    else:
        shared_counter(whose, events, device).add(event)


def shared_numbers(whose: str) -> dict[torch.device, list[int]]:
    """Return {device: counts, one per event} of a shared counter. Waits for the devices."""
    return {device: counter.numbers() for (owner, device), counter in _shared.items() if owner == whose}


def zero_shared(whose: str) -> None:
    """Set the counts of a shared counter to 0 on all devices."""
    for (owner, _), counter in _shared.items():
        if owner == whose:
            counter.zero()
