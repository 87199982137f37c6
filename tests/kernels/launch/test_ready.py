"""What Triton does once in a process is begun in threads; whoever needs it waits, and meets its errors itself."""

from __future__ import annotations

import threading
import time

import pytest


pytest.importorskip("triton")

from sage_kernels._triton import compat, ready  # noqa: E402
from sage_kernels.ops import warm_up  # noqa: E402


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(ready, "_has_begun", False)
    monkeypatch.setattr(ready, "_threads", [])


def test_tasks_run_side_by_side_once_and_are_waited_for(fresh):
    both, done = threading.Barrier(2, timeout=10), []

    def task():
        both.wait()  # neither ends before the other has begun
        time.sleep(0.05)
        ready.wait()  # what a task calls may wait for it
        done.append(threading.current_thread())

    ready.begin([task, task])
    ready.begin([lambda: done.append("again")])
    ready.wait()
    assert len(done) == 2 and threading.current_thread() not in done
    ready.wait()


def test_an_error_is_left_to_who_needs_the_result(fresh):
    ready.begin([lambda: 1 / 0])
    ready.wait()


def test_a_thread_that_can_t_start_is_not_waited_for(fresh, monkeypatch):
    done, start = [], threading.Thread.start
    calls = iter((False, True))

    def limited(self):
        if next(calls):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    ready.begin([lambda: done.append(1), lambda: done.append(2)])
    ready.wait()
    assert done == [1]


def test_several_threads_wait(fresh):
    release = threading.Event()
    ready.begin([release.wait])
    waiting = [threading.Thread(target=ready.wait) for _ in range(4)]
    for thread in waiting:
        thread.start()
    release.set()
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()


def test_a_launch_and_a_compile_wait(fresh, monkeypatch):
    waits = []
    monkeypatch.setattr(ready, "wait", lambda: waits.append(1))
    monkeypatch.setattr(compat, "_driver", None)
    monkeypatch.setattr(compat.torch.cuda, "current_device", lambda: 0)
    compat.current_device()
    compat.compile_request(None, None, None)
    assert len(waits) == 2


def test_the_driver_and_the_hash_of_its_files_are_begun(fresh, monkeypatch):
    asked = []
    monkeypatch.setattr(ready, "begin", asked.extend)
    warm_up.get_ready()
    assert [task() for task in asked[-1:]] == [compat.find("triton.runtime.cache.triton_key")()]
    monkeypatch.setattr(compat, "find", lambda name: None)
    asked.clear()
    monkeypatch.setattr(compat, "_driver", None)
    warm_up.get_ready()
    assert not asked
