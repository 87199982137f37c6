"""The stretch of a forward in which results may wait: inside of one block, and no longer than the block runs."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from .library import calls_from_library


class Region:
    """What one thread postpones while one block runs.

    Attributes:
        quantized: inputs of linear layers in 8 bit, once for all layers that read them; None before the first.
        joined: {id of a group of layers: results that were computed together and are yet to be asked for}.
    """

    __slots__ = ("quantized", "joined", "_waiting")

    def __init__(self) -> None:
        self.quantized: Any = None
        self.joined: dict[int, Any] = {}
        self._waiting: list[weakref.ref[Any]] = []

    def add(self, tensor: Any) -> None:
        """Remember a tensor that waits, as long as somebody else holds it."""
        self._waiting.append(weakref.ref(tensor))

    def settle(self) -> None:
        """Compute all that still waits and that somebody still holds."""
        while self._waiting:
            tensor = self._waiting.pop(0)()
            if tensor is not None:
                tensor.tensor()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.region: Region | None = None


_thread = _Thread()


def current() -> Region | None:
    """The region that is open in this thread, or None: nothing may wait."""
    return _thread.region


def current_for_caller() -> Region | None:
    """The open region, for a module's forward that calls this: None, too, where user code called the module."""
    region = _thread.region
    return region if region is not None and calls_from_library(sys._getframe(2)) else None


class opened:  # noqa: N801 (used as a function)
    """Context manager: a region in this thread; the same one where one is open already.

    What still waits at its end is computed, unless it ends by an exception.
    """

    __slots__ = ("_region", "_is_outer")

    def __enter__(self) -> Region:
        before = _thread.region
        self._is_outer = before is None
        region = _thread.region = before if before is not None else Region()
        self._region = region
        return region

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._is_outer:
            try:
                if kind is None:
                    self._region.settle()
            finally:
                _thread.region = None
