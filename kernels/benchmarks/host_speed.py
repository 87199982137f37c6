"""Detect a slow host: on a shared machine, Python may take twice as long for some seconds."""

from __future__ import annotations

import math
import time


LOOP = 50_000  # additions, some two milliseconds
# slow: this many times the fastest loop so far; a neighbour costs nearly a factor of 2, noise a few percent
SLOWER = 1.25
ATTEMPTS = 6  # of one timing; the last one counts in any case
LONG_MS = 1000.0  # timings above this are never repeated
PAUSE_S, PATIENCE_S = 1.0, 20.0  # pause after an attempt with a slow host, and the most of all pauses together


class HostSpeed:
    """Speed of the host, by the time of a fixed loop relative to the fastest one in this process.

    matters: if False, the host is never called slow, for timings that don't depend on it or run on it alone.
    """

    def __init__(self, *, matters: bool = True) -> None:
        self._matters, self._fastest, self._patience = matters, math.inf, PATIENCE_S

    def is_full(self) -> bool:
        """Return True if the loop now takes about as long as its fastest run."""
        if not self._matters:
            return True
        start = time.perf_counter()
        total = 0
        for i in range(LOOP):
            total += i
        took = time.perf_counter() - start
        self._fastest = min(self._fastest, took)
        return took <= SLOWER * self._fastest

    def timed(self, run):
        """Time `run()`, repeated while the host is slow.

        Returns: (milliseconds, True if the host was at full speed, the result of `run()`).
        """
        for _ in range(ATTEMPTS):
            was_full = self.is_full()
            start = time.perf_counter()
            result = run()
            took = (time.perf_counter() - start) * 1e3
            if took > LONG_MS or (was_full and self.is_full()):
                return took, True, result
            if self._patience > 0:
                time.sleep(PAUSE_S)
                self._patience -= PAUSE_S
        return took, False, result
