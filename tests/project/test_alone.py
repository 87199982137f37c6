"""Tests marked `alone` run while no other worker of pytest-xdist runs any."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from tests.support.alone import taking_turns


pytest.importorskip("fcntl", reason="locks of files as POSIX has them")


def work(folder, alone: bool, times) -> None:
    with taking_turns(folder, alone):
        begin = time.monotonic()
        time.sleep(0.1)
        times.put((alone, begin, time.monotonic()))


def test_who_is_alone_overlaps_with_nobody(tmp_path):
    context = multiprocessing.get_context("fork")
    times = context.Queue()
    workers = [context.Process(target=work, args=(tmp_path, i in (2, 5), times)) for i in range(8)]
    for worker in workers:
        worker.start()
    found = [times.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()

    def overlap(a, b):
        return a[1] < b[2] and b[1] < a[2]

    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i]]
    assert not any(overlap(a, b) for a, b in pairs if a[0] or b[0])


def test_who_died_is_waited_for_no_longer(tmp_path):
    context = multiprocessing.get_context("fork")
    dead = context.Process(target=die_alone, args=(tmp_path,))
    dead.start()
    dead.join()
    assert dead.exitcode == 3
    with taking_turns(tmp_path, alone=True):
        pass


def die_alone(folder) -> None:
    import os

    with taking_turns(folder, alone=True):
        os._exit(3)
