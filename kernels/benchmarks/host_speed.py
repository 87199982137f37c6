"""Whether the host is at full speed: on a shared machine all of Python takes up to twice as long for seconds."""

from __future__ import annotations

import math
import time


LOOP = 50_000  # additions: some two milliseconds
SLOWER = 1.25  # than the fastest loop so far: what a neighbour costs is nearly a factor of 2, noise a few percent
ATTEMPTS = 6  # at one timing: the last one counts, whatever the host does
LONG_MS = 1000.0  # what takes longer does not wait for the host


class HostSpeed:
    """Times a fixed loop; the fastest one of the process is what the host can do."""

    def __init__(self) -> None:
        self._fastest = math.inf

    def is_full(self) -> bool:
        """Whether the loop takes about as long now as it ever did at its fastest."""
        start = time.perf_counter()
        total = 0
        for i in range(LOOP):
            total += i
        took = time.perf_counter() - start
        self._fastest = min(self._fastest, took)
        return took <= SLOWER * self._fastest

    def timed(self, run):
        """(milliseconds that `run()` takes, what it returns), done again where the host was slow before or after."""
        for _ in range(ATTEMPTS):
            was_full = self.is_full()
            start = time.perf_counter()
            result = run()
            took = (time.perf_counter() - start) * 1e3
            if took > LONG_MS or (was_full and self.is_full()):
                break
        return took, result
