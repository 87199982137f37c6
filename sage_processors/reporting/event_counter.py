"""Counts of what a layer's attention calls did: free in eager calls, and right in calls that a graph makes again."""

from __future__ import annotations

import threading

import torch

from sage_kernels.compat import mark_static_address


_counting = threading.Lock()  # of all: counters are copied along with what they count


class EventCounter:
    """How often each of some events happened in one layer.

    Two counts of each: a Python number for eager calls, where a tensor would cost a launch a call, and a tensor for
    calls that a graph makes again without Python (torch.compile, CUDA graphs).

    Attributes:
        eager: int of each event. traced: int64 [events], on the device of the layer.
    """

    def __init__(self, events: int, device: torch.device | str = "cpu"):
        self.eager = [0] * events
        self._keep(torch.zeros(events, dtype=torch.int64, device="cpu"), device)

    def _keep(self, numbers: torch.Tensor, device) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be counted up outside of inference_mode
            self.traced = numbers.to(device, copy=True)
        mark_static_address(self.traced, guard=False)  # CUDA graphs refuse to mutate other inputs

    def add(self, event: int) -> None:
        """Count one call."""
        if torch.compiler.is_compiling() or (self.traced.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.traced[event].add_(1)
        else:
            self.add_eager(event)

    def add_eager(self, event: int, calls: int = 1) -> None:
        """Count calls of which is known that they are neither traced nor captured."""
        with _counting:
            self.eager[event] += calls

    def numbers(self) -> list[int]:
        """Both counts together, one number an event. Syncs."""
        return [eager + traced for eager, traced in zip(self.eager, self.traced.tolist(), strict=True)]

    def zero(self) -> None:
        """Forget them."""
        self.eager = [0] * len(self.eager)
        self.traced.zero_()

    def take_over(self, other: EventCounter) -> None:
        """Have the numbers of another one, of the same events."""
        self.eager = list(other.eager)
        self.traced.copy_(other.traced)

    def to(self, device: torch.device | str) -> None:
        """Count on another device from now on."""
        if self.traced.device != torch.device(device):
            self._keep(self.traced, device)


_shared: dict[tuple[str, torch.device], EventCounter] = {}


def shared_counter(whose: str, events: int, device: torch.device) -> EventCounter:
    """The counter of calls on a device that belong to no layer, one for each `whose`. Made when first asked for."""
    if (whose, device) not in _shared:
        _shared[whose, device] = EventCounter(events, device)
    return _shared[whose, device]


@torch.compiler.assume_constant_result
def _shared_traced(whose, events, device):
    return shared_counter(whose, events, device).traced


def count_shared(whose: str, events: int, event: int, device: torch.device) -> None:
    """Count a call that belongs to no layer. A traced call can't make a counter, and finds the tensor of this one."""
    if torch.compiler.is_compiling():
        _shared_traced(whose, events, device)[event].add_(1)
    else:
        shared_counter(whose, events, device).add(event)


def shared_numbers(whose: str) -> dict[torch.device, list[int]]:
    """What was counted on each device, one number an event. Syncs."""
    return {device: counter.numbers() for (owner, device), counter in _shared.items() if owner == whose}


def zero_shared(whose: str) -> None:
    """Forget what was counted."""
    for (owner, _), counter in _shared.items():
        if owner == whose:
            counter.zero()
