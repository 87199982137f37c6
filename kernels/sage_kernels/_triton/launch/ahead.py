"""Kernels compiled before a launch waits for them, side by side in threads.

A compile takes seconds, and nearly all of them pass in the compiler's passes and in ptxas, where Python's lock is not
held: threads are enough, and what they compile is there for this process and in Triton's cache on the disk. Before
that the kernel's source is read, all of it in Python. Kernels that were read side by side would share Python's lock,
and the first ones, which are waited for, would take as long as all of them: so they are read one after the other.
Which kernels a call needs is found by making the call with launches that only write down what they are handed
(`collect`).

A compile that fails is no error here: the launch that needs the kernel compiles it again, and raises.
"""

import contextlib
import copy
import os
import threading
from collections import deque

import torch

from .. import compat
from .prebuilt import offer
from .recording import Tape, recording


class _Turn:
    """The turn to read a kernel, of one thread at a time. Given back once, by the thread that took it."""

    def __init__(self):
        self._lock, self._is_mine = _reading, True
        self._lock.acquire()

    def give_back(self) -> None:
        if self._is_mine:
            self._is_mine = False
            self._lock.release()


class Job:
    """One kernel to compile. error: what its compile raised. cached: whether it was on the disk; None: can't tell."""

    def __init__(self, kind: tuple, kernel, arguments, constants: dict):
        self.kind, self.kernel, self.constants, self.device = kind, kernel, constants, kind[1]
        self.arguments = [_stand_in(x) for x in arguments]
        self.finished = threading.Event()
        self.error: Exception | None = None
        self.cached: bool | None = None

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def run(self, turn: _Turn | None = None) -> None:
        """Compile it in this thread, which has its turn or waits for it. Raises nothing."""
        turn = turn or _Turn()
        try:
            with (
                _on(self.device),
                compat.told_of_cache_hits() as hits,
                compat.told_when_read(self.kernel, turn.give_back),
            ):
                offer(self.kernel)
                compat.build_launcher(self.kernel.warmup(*self.arguments, grid=(1,), **self.constants))
            self.cached = all(hits) if hits else None
        except Exception as error:  # whatever it is: the launch meets it again, and raises it
            self.error = error
        finally:
            turn.give_back()
            with _lock:
                _under_way.pop(self.kind, None)
                if self.error is None:
                    _known.add(self.kind)
            self.arguments = None
            self.finished.set()


class Compiling:
    """Compiles that were started. jobs: those that are not done; known: kinds of launches that needed none."""

    def __init__(self, jobs: list[Job], known: set[tuple]):
        self.jobs, self.known = jobs, known

    def wait(self) -> None:
        """Until all are done. Raises: the first error among them."""
        for job in self.jobs:
            job.finished.wait()
        errors = [job.error for job in self.jobs if job.error is not None]
        if errors:
            raise errors[0]


_KINDS_LIMIT = 4096
_known: set[tuple] = set()  # kinds of launches whose kernels this process has


def _forget() -> None:
    """In a process that was forked, the threads and what they were at are not there."""
    global _lock, _reading
    _lock, _reading = threading.Lock(), threading.Lock()  # _lock: of all that is below
    _under_way.clear()
    _waiting.clear()
    _workers.clear()


_under_way: dict[tuple, Job] = {}  # kind → its job, until it is done
_waiting: deque[Job] = deque()
_workers: set[threading.Thread] = set()
_forget()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class _Collector(Tape):
    """A tape whose launches launch nothing. found: kind → (kernel, arguments, constants)."""

    def __init__(self):
        super().__init__()
        self.found = {}


def kind_of(key: tuple) -> tuple:
    """What a kernel is compiled for, of the key of a launch: integers are 1, multiples of 16, or any."""
    kernel, device, *rest = key
    return (kernel, device, *(("int", x == 1, x % 16 == 0) if type(x) is int else x for x in rest))


def collect(calls) -> dict[tuple, Job]:
    """The kernels that these calls (functions of no arguments) would launch; nothing is launched.

    In the order of the calls, but of each its last kernel first: that of attention, which compiles longest.
    """
    before, jobs = getattr(recording, "tape", None), {}
    try:
        for call in calls:
            tape = recording.tape = _Collector()
            call()
            for kind, launch in reversed(tape.found.items()):
                jobs.setdefault(kind, Job(kind, *launch))
    finally:
        recording.tape = before
    return jobs


def compile_ahead(calls) -> Compiling:
    """Start to compile what these calls will launch and this process has not compiled; the first ones first."""
    return _start(collect(calls))


def compiled_together(call):
    """What the op's call returns; kernels it launches are compiled side by side where they are not yet."""
    before, recording.call = getattr(recording, "call", None), call
    try:
        return call()
    finally:
        recording.call = before


def before_compile(kind: tuple) -> None:
    """A launch is about to be left to Triton: wait for its kernel, or start the others of its call beside it."""
    job = _under_way.get(kind)
    if job is not None:
        with _lock:
            mine = job in _waiting
            if mine:
                _waiting.remove(job)
        if mine:
            job.run()
        else:
            job.finished.wait()
        return
    with _lock:
        if kind in _known:
            return
        if len(_known) >= _KINDS_LIMIT:
            _known.clear()
        _known.add(kind)  # the launch that asks compiles it
    call = getattr(recording, "call", None)
    if call is not None and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        _start(collect([call]))


def _start(jobs: dict[tuple, Job]) -> Compiling:
    with _lock:
        known = {kind for kind in jobs if kind in _known}
        fresh = [job for kind, job in jobs.items() if kind not in _known and kind not in _under_way]
        running = [_under_way[kind] for kind in jobs if kind in _under_way]
        _under_way.update((job.kind, job) for job in fresh)
        _waiting.extend(fresh)
        threads = [threading.Thread(target=_work, name="sage_kernels compile") for _ in fresh]
        threads = threads[: max(0, _cores() - len(_workers))]
        _workers.update(threads)
    for thread in threads:
        thread.start()
    return Compiling(running + fresh, known)


def _work() -> None:
    """Compile what waits, one after the other. At the interpreter's exit, what is waiting is left."""
    try:
        while True:
            turn = _Turn()
            with _lock:
                job = _waiting.popleft() if _waiting else None
                if job is None:
                    _workers.discard(threading.current_thread())
            if job is not None and threading.main_thread().is_alive():
                job.run(turn)
                continue
            turn.give_back()
            if job is None:
                return
            job.finished.set()
    finally:
        with _lock:
            _workers.discard(threading.current_thread())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on(device: int):
    """The device that a thread compiles for: its current one."""
    return torch.cuda.device(device) if torch.cuda.is_available() else contextlib.nullcontext()


def _stand_in(x):
    """What a kernel is compiled for by: a tensor's type and alignment, without its memory."""
    if isinstance(x, torch.Tensor):
        return x.new_empty(16)
    if hasattr(x, "block_shape"):
        described = copy.copy(x)
        described.base = x.base.new_empty(16)
        return described
    return x
