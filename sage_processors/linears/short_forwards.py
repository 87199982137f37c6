"""Recognises forwards of a model in which all linear layers have too little work for 8 bit to pay.

The checks of each call (is it short, is it captured, is the weight unchanged) add up in models with many small layers
that are limited by the host, such as SDXL. Such a forward is recognised by the shapes of the model's arguments. Then
its layers skip these checks, and its calls are counted all at once.
"""

from __future__ import annotations

from typing import Any

import torch

from .weights.linear_state import SHORT, LinearState, Shared


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key of a model's arguments: two forwards with equal keys have equal work.

    It has shapes, dtypes and devices of all tensors, also in nested tuples, lists and dicts, and the types of all
    other values.
    """
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
    """Knows one kind of forwards of a model in which every call of a linear layer is short."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self._known: Any = None  # key of the forwards that are all short
        self._busy: Any = None  # key of a forward with work for 8 bit
        self._latest: Any = None  # key of the previous forward
        self._before: list[int] | None = None  # while a forward is watched: short calls of each layer before it
        self._calls: list[int] = []  # short calls of each layer in a known forward
        self._times = 0  # number of known forwards that were not counted yet

    def begins(self, shapes: tuple[Any, ...], states: list[LinearState]) -> bool:
        """Note that a forward begins. Return True if it is a known one, with short calls only.

        The second of two equal forwards in a row is watched, so forwards that keep changing cost nothing. None is
        watched if a part of the model is compiled, as its layers are not called from Python.
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
        """Learn from the watched forward, which is over."""
        before, self._before = self._before, None
        if before is None:  # a forward of another thread did it
            return
        if self._shared.had_work or not self._shared.was_called:
            self._busy = self._latest
            return
        self.count(states)
        self._known = self._latest
        self._calls = [now - then for now, then in zip(_short_calls(states), before, strict=True)]

    def count(self, states: list[LinearState]) -> None:
        """Add the calls of known forwards to the layers' counters."""
        times, self._times = self._times, 0
        if times:
            for state, calls in zip(states, self._calls, strict=True):
                state.events.add_eager(SHORT, times * calls)

    def decide(self, states: list[LinearState], least_work: int) -> None:
        """From now on, take calls with fewer multiply-adds than `least_work` for short."""
        if least_work != self._shared.least_work:
            self.forget(states)
            self._shared.least_work = least_work
            for state in states:
                state.find_short()

    def forget(self, states: list[LinearState]) -> None:
        """Forget all forwards, after layers or weights have changed."""
        self.count(states)
        self._known = self._busy = self._latest = self._before = None


def _short_calls(states: list[LinearState]) -> list[int]:
    return [state.events.eager[SHORT] for state in states]
