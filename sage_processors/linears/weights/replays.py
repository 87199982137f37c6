"""How often CUDA graphs make the calls of linear layers again: each graph adds one to a number on the GPU.

A layer that counted its own replays would cost a launch, which a small one does not gain.
"""

from __future__ import annotations

import threading

import torch

from ...reporting.event_counter import EventCounter
from .storage import is_captured


MOST_KINDS = 64  # of forwards on one GPU, by what layers did; of others the captured one alone is counted
Calls = tuple[tuple[EventCounter, int, int], ...]  # counter of a layer, event, how often


class Replays:
    """Forwards of one model that CUDA graphs hold whole.

    Attributes: counters: of the model's layers.
    """

    def __init__(self) -> None:
        self.counters: list[EventCounter] = []
        self._times: dict[torch.device, EventCounter] = {}  # of replays, an event a kind
        self._kinds: dict[torch.device, list[Calls]] = {}
        self._counted: dict[torch.device, list[int]] = {}  # of these replays
        self._running = threading.local()

    def begin(self, device: torch.device, captured: bool) -> None:
        """A forward of the model begins in this thread; captured: a graph holds all of it."""
        self._running.device, self._running.before = device, None
        if not self.counters:  # of a copy, whose layers count for themselves
            return
        if captured and device in self._times:
            self._running.before = [(counter, list(counter.eager)) for counter in self.counters]
        elif device not in self._times and not captured:  # memory of a capture is that graph's alone
            times = EventCounter(MOST_KINDS, device)
            if type(times.traced) is torch.Tensor:  # not of a mode that makes tensors without numbers
                self._times[device], self._kinds[device], self._counted[device] = times, [], [0] * MOST_KINDS

    def end(self) -> None:
        """That forward is over."""
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
            counter.add_eager(event, -calls)  # nothing ran yet
        self._times[self._running.device].traced[kinds.index(made)].add_(1)

    def count(self) -> None:
        """Add the calls of replays to the layers' counters. Syncs."""
        if is_captured():
            return
        for device, times in self._times.items():
            counted, numbers = self._counted[device], times.traced.tolist()
            for place, made in enumerate(self._kinds[device]):
                for counter, event, calls in made:
                    counter.add_eager(event, calls * (numbers[place] - counted[place]))
            self._counted[device] = numbers
