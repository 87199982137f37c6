"""The stretch of a forward in which results may wait: inside of one block, and no longer than the block runs."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from .library import is_called_by_library


class Region:
    """What one thread postpones while one block runs.

    Attributes:
        quantized: inputs of linear layers in 8 bit, once for all layers that read them; None before the first.
        joined: {id of a group of layers: results that were computed together and are yet to be asked for}.
        waiting: weak references to the tensors that wait.
    """

    __slots__ = ("quantized", "joined", "waiting")

    def __init__(self) -> None:
        self.quantized: Any = None
        self.joined: dict[int, Any] = {}
        self.waiting: list[weakref.ref[Any]] = []

    def forget(self) -> None:
        """Let go of all that is kept for the rest of the block, at once: it lies in the GPU's memory."""
        self.joined.clear()
        self.waiting.clear()
        if self.quantized is not None:
            self.quantized.forget()

    def settle(self) -> None:
        """Compute all that still waits and that somebody still holds."""
        waiting, self.waiting = self.waiting, []
        for reference in waiting:
            tensor = reference()
            if tensor is not None:
                tensor.tensor()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.region: Region | None = None


in_thread = _Thread()


def current() -> Region | None:
    """The region that is open in this thread, or None: nothing may wait."""
    return in_thread.region


def is_caller_known(depth: int) -> bool:
    """True if a region is open and a library's code called the module whose forward runs `depth` frames up."""
    return in_thread.region is not None and is_called_by_library(depth + 1)


class opened:  # noqa: N801 (used as a function)
    """Context manager: a region in this thread; the same one where one is open already.

    What still waits at its end is computed, unless it ends by an exception.
    """

    __slots__ = ("_region", "_is_outer")

    def __enter__(self) -> Region:
        before = in_thread.region
        self._is_outer = before is None
        region = in_thread.region = before if before is not None else Region()
        self._region = region
        return region

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._is_outer:
            try:
                if kind is None:
                    self._region.settle()
            finally:
                in_thread.region = None
                self._region.forget()
