"""Forwards in which all linear layers have too little work for 8 bit: once they are known, nobody is asked again.

What is asked at each call (is it short, is it captured, is the weight fresh) adds up in models of many small layers
that wait for the host, such as SDXL. A forward is known by what the model is called with; its calls are counted all at
once.
"""

from __future__ import annotations

from typing import Any

import torch

from .weights.linear_state import SHORT, LinearState, Shared


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What decides how much work a forward has: shapes, types and devices of all tensors that a model is called with,
    however deep in tuples, lists and dicts they are, and the types of everything else."""
    found: list[Any] = []
    left: list[Any] = [args, kwargs]
    while left:
        x = left.pop()
        if isinstance(x, torch.Tensor):
            found.append((x.shape, x.dtype, x.device))
        elif isinstance(x, dict):
            found.append(tuple(x))
            left.extend(x.values())
        elif isinstance(x, (tuple, list)):
            found.append(len(x))
            left.extend(x)
        else:
            found.append(type(x))
    return tuple(found)


class ShortForwards:
    """Which forwards of a model have no work for 8 bit. One kind of them is known at a time."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self._known: Any = None  # shapes of such a forward
        self._busy: Any = None  # of one that has work
        self._latest: Any = None  # of the forward before this one
        self._before: list[int] | None = None  # while one is watched: short calls of each layer before it
        self._calls: list[int] = []  # of a known forward, by layer
        self._times = 0  # known forwards that are not counted yet

    def begins(self, shapes: tuple[Any, ...], states: list[LinearState]) -> bool:
        """A forward begins. Whether it is a known one: all of its calls are short.

        The second of two forwards alike is watched, so what changes from one to the next costs nothing. Not where a
        part of the model is compiled: its calls are not made by Python.
        """
        if self._before is not None:
            self._take_in(states)
        if shapes == self._known:
            self._times += 1
            return True
        if shapes == self._latest and shapes != self._busy and not self._shared.has_compiled_parts:
            self._before = _short_calls(states)
            self._shared.had_work = False
        self._latest = shapes
        return False

    def _take_in(self, states: list[LinearState]) -> None:
        """The forward that was watched is over."""
        before, self._before = self._before, None
        if before is None:  # another thread's forward took it in
            return
        if self._shared.had_work or not self._shared.was_called:
            self._busy = self._latest
            return
        self.count(states)
        self._known = self._latest
        self._calls = [now - then for now, then in zip(_short_calls(states), before, strict=True)]

    def count(self, states: list[LinearState]) -> None:
        """Add the calls of known forwards to the layers' events."""
        times, self._times = self._times, 0
        if times:
            for state, calls in zip(states, self._calls, strict=True):
                state.events.add_eager(SHORT, times * calls)

    def decide(self, states: list[LinearState], least_work: int) -> None:
        """Calls of fewer multiply-adds than this are short from now on."""
        if least_work != self._shared.least_work:
            self.forget(states)
            self._shared.least_work = least_work
            for state in states:
                state.find_short()

    def forget(self, states: list[LinearState]) -> None:
        """Whatever is known of forwards may be wrong from now on: other layers, or other weights."""
        self.count(states)
        self._known = self._busy = self._latest = self._before = None


def _short_calls(states: list[LinearState]) -> list[int]:
    return [state.events.eager[SHORT] for state in states]
