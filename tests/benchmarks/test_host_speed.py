"""Timings that met a slow host are done again."""

from __future__ import annotations

import pytest


class Clock:
    """time.perf_counter() of a host on which each loop takes the next one of `loops` seconds, a run `run` seconds."""

    def __init__(self, loops, run=0.1):
        self.now, self.loops, self.run, self.is_inside = 0.0, iter(loops), run, False

    def perf_counter(self):
        self.is_inside = not self.is_inside  # the second reading of a loop
        if not self.is_inside:
            self.now += next(self.loops)
        return self.now


def test_a_loop_that_takes_longer_than_ever_says_that_the_host_is_slow(bench, monkeypatch):
    monkeypatch.setattr(bench, "time", Clock([2.0, 2.2, 4.0, 2.4, 1.0, 2.0, 1.2]))
    host = bench.HostSpeed()
    assert [host.is_full() for _ in range(7)] == [True, True, False, True, True, False, True]


def test_where_it_does_not_matter_the_host_is_fast(bench, monkeypatch):
    monkeypatch.setattr(bench, "time", None)
    assert bench.HostSpeed(matters=False).is_full()


@pytest.mark.parametrize(
    "full, runs",
    [
        ([True, True], 1),
        ([False, True, True], 2),  # slow before the first: not even asked behind it
        ([True, False, True, True], 2),
        ([False] * 6, 6),
    ],
)
def test_what_met_a_slow_host_runs_again_a_few_times_at_most(bench, monkeypatch, full, runs):
    host, answers, made = bench.HostSpeed(), iter(full), []
    monkeypatch.setattr(host, "is_full", lambda: next(answers))

    def run():
        made.append(1)
        return len(made)

    pauses = []
    monkeypatch.setattr(bench.time, "sleep", pauses.append)
    took, is_clean, result = host.timed(run)
    assert len(made) == result == runs and 0 <= took < 1000 and next(answers, None) is None
    assert is_clean == full[-1] and pauses == [bench.PAUSE_S] * (runs - is_clean)


def test_pauses_end_where_the_host_stays_slow(bench, monkeypatch):
    host, pauses = bench.HostSpeed(), []
    monkeypatch.setattr(host, "is_full", lambda: False)
    monkeypatch.setattr(bench.time, "sleep", pauses.append)
    for _ in range(50):
        host.timed(lambda: None)
    assert sum(pauses) == bench.PATIENCE_S


def test_what_takes_a_second_is_not_repeated(bench, monkeypatch):
    monkeypatch.setattr(bench, "LONG_MS", 0.0)
    host, made = bench.HostSpeed(), []
    monkeypatch.setattr(host, "is_full", lambda: False)
    _, is_clean, _ = host.timed(lambda: made.append(1))
    assert made == [1] and is_clean
