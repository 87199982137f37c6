"""Regions: results may be postponed only while a block runs, and no longer than that."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from .library import is_called_by_library


class Region:
    """Results that one thread has postponed while one block runs.

    Attributes:
        quantized: 8-bit inputs of linear layers, each shared by all layers that read it; None before the first.
        joined: {id of a group of layers: results that were computed together and were not asked for yet}.
        waiting: weak references to the postponed results.
        has_casts: casts to a wider dtype were postponed. has_joins: a torch.cat of two inputs was.
    """

    __slots__ = ("quantized", "joined", "waiting", "has_casts", "has_joins")

    def __init__(self) -> None:
        self.quantized: Any = None
        self.joined: dict[int, Any] = {}
        self.waiting: list[weakref.ref[Any]] = []
        self.has_casts = self.has_joins = False

    def forget(self) -> None:
        """Drop everything kept for the rest of the block at once, as it takes memory of the GPU."""
        self.joined.clear()
        self.waiting.clear()
        if self.quantized is not None:
            self.quantized.forget()

    def settle(self) -> None:
        """Compute all postponed results that somebody still holds."""
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
    """Return the region that is open in this thread, or None: nothing may be postponed."""
    return in_thread.region


def is_caller_known(depth: int) -> bool:
    """Return True if a region is open and code of a library called the module.

    depth: how many frames up the stack the module's forward is.
    """
    return in_thread.region is not None and is_called_by_library(depth + 1)


class opened:  # noqa: N801 (used as a function)
    """Context manager: open a region in this thread, or go on with the one that is open.

    Results that are still postponed at its end are computed, unless it ends with an exception.
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
