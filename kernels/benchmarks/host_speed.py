"""Whether the host is at full speed: on a shared machine all of Python takes up to twice as long for seconds."""

from __future__ import annotations

import math
import time


LOOP = 50_000  # additions: some two milliseconds
SLOWER = 1.25  # than the fastest loop so far: what a neighbour costs is nearly a factor of 2, noise a few percent
ATTEMPTS = 6  # at one timing: the last one counts, whatever the host does
LONG_MS = 1000.0  # what takes longer does not wait for the host
PAUSE_S, PATIENCE_S = 1.0, 20.0  # behind an attempt that met a slow host, and of all pauses together


class HostSpeed:
    """Times a fixed loop; the fastest one of the process is what the host can do.

    matters: else it is never said to be slow: what is timed may run on it.
    """

    def __init__(self, *, matters: bool = True) -> None:
        self._matters, self._fastest, self._patience = matters, math.inf, PATIENCE_S

    def is_full(self) -> bool:
        """Whether the loop takes about as long now as it ever did at its fastest."""
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
        """(milliseconds that `run()` takes, whether a slow host had no part in them, what it returns)."""
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
