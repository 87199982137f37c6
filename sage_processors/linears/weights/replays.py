"""Counts the calls of linear layers in replays of CUDA graphs.

Each graph adds one to a number on the GPU. A counter for each layer would cost a launch each, more than a small layer
gains.
"""

from __future__ import annotations

import threading

import torch

from ...reporting.event_counter import EventCounter
from .storage import is_captured


MOST_KINDS = 64  # kinds of forwards on one GPU, by the layers' calls; of further kinds only the capture is counted
Calls = tuple[tuple[EventCounter, int, int], ...]  # (counter of a layer, event, number of calls)


class Replays:
    """Counters of the replays of CUDA graphs that contain whole forwards of one model.

    Attributes: counters: of the model's linear layers.
    """

    def __init__(self) -> None:
        self.counters: list[EventCounter] = []
        self._times: dict[torch.device, EventCounter] = {}  # numbers of replays, one event for each kind
        self._kinds: dict[torch.device, list[Calls]] = {}
        self._counted: dict[torch.device, list[int]] = {}  # replays that count() has added already
        self._running = threading.local()

    def begin(self, device: torch.device, captured: bool) -> None:
        """Note that a forward of the model begins in this thread. captured: a CUDA graph contains all of it."""
        self._running.device, self._running.before = device, None
        if not self.counters:  # in a copy of the model, whose layers count their own calls
            return
        if captured and device in self._times:
            self._running.before = [(counter, list(counter.eager)) for counter in self.counters]
        elif device not in self._times and not captured:  # a capture's memory is its graph's alone
            times = EventCounter(MOST_KINDS, device)
            if type(times.traced) is torch.Tensor:  # no fake tensor
                self._times[device], self._kinds[device], self._counted[device] = times, [], [0] * MOST_KINDS

    def end(self) -> None:
        """Note that the forward of `begin` is over."""
        before, self._running.before = getattr(self._running, "before", None), None
        if before is None:
            return
        made = tuple(
            (counter, event, now - then)
            for counter, numbers in before
            for event, (then, now) in enumerate(zip(numbers, counter.eager, strict=True))
            if now > then
        )
        if not made:
            return
        kinds = self._kinds[self._running.device]
        if made not in kinds:
            if len(kinds) == MOST_KINDS:
                return
            kinds.append(made)
        for counter, event, calls in made:
            counter.add_eager(event, -calls)  # a capture runs nothing
        self._times[self._running.device].traced[kinds.index(made)].add_(1)

    def count(self) -> None:
        """Add the calls of all replays since the last time to the layers' counters. Syncs."""
        if is_captured():
            return
        for device, times in self._times.items():
            counted, numbers = self._counted[device], times.traced.tolist()
            for place, made in enumerate(self._kinds[device]):
                for counter, event, calls in made:
                    counter.add_eager(event, calls * (numbers[place] - counted[place]))
            self._counted[device] = numbers
