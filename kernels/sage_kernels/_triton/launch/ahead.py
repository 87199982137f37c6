"""Compile kernels in background threads, several at a time, before a launch needs them.

    compile_ahead(calls)       ──>  collect: run the calls, note launches instead of making them, a Job for each kernel
                                    _start: drop the Jobs of kernels compiled before, start threads for the rest
    compiled_together(call)    ──>  the op runs in it; its first launch without a compiled kernel calls before_compile,
                                    which starts Jobs for all other kernels of the call
    launch (launcher.py)       ──>  before_compile: wait for the Job of its kernel, or run it at once if it waits

A compile takes seconds. Nearly all of that is spent in compiler passes and ptxas, without the GIL: so threads are
enough. The result is then in this process and in Triton's disk cache. A compile begins by parsing the kernel's source
in Python, with the GIL. If several threads parsed at a time, the first kernel, which a launch waits for, would take as
long as all of them: so one thread parses at a time (`_ParsingTurn`).

A failed compile raises nothing here: the launch that needs the kernel compiles it again, and raises then.
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


class _ParsingTurn:
    """The right to parse a kernel's source, held by one thread at a time from creation until `give_back`."""

    def __init__(self):
        self._lock, self._is_mine = _parsing, True
        self._lock.acquire()

    def give_back(self) -> None:
        """Let the next thread parse. Calling it again has no effect."""
        if self._is_mine:
            self._is_mine = False
            self._lock.release()


class Job:
    """One kernel to compile.

    Attributes:
        kind: its key, from `kind_of`.
        finished: an event, set when the compile has ended or was given up.
        error: the exception of the compile, or None.
        cached: True if Triton's disk cache had the kernel; None if unknown.
    """

    def __init__(self, kind: tuple, kernel, arguments, constants: dict):
        self.kind, self.kernel, self.constants, self.device = kind, kernel, constants, kind[1]
        self.arguments = [_stand_in(x) for x in arguments]
        self.finished = threading.Event()
        self.error: Exception | None = None
        self.cached: bool | None = None

    @property
    def name(self) -> str:
        """Name of the kernel's function."""
        return self.kernel.__name__

    def run(self, turn: _ParsingTurn | None = None) -> None:
        """Compile the kernel in this thread; errors go to `error`.

        turn: the right to parse, if the thread has it already; None: wait for it.
        """
        turn = turn or _ParsingTurn()
        try:
            with (
                _on_device(self.device),
                compat.collect_cache_hits() as hits,
                compat.call_when_parsed(self.kernel, turn.give_back),
            ):
                offer(self.kernel)
                compiled = self.kernel.warmup(*self.arguments, grid=(1,), **self.constants)
                turn.give_back()  # a kernel from the cache was not parsed
                compat.build_launcher(compiled)
            self.cached = all(hits) if hits else None
        except Exception as error:  # the launch that needs the kernel meets it again, and raises
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
    """Compiles started by `compile_ahead`.

    Attributes:
        jobs: compiles started now or already under way.
        known: kinds of launches whose kernels were compiled before.
    """

    def __init__(self, jobs: list[Job], known: set[tuple]):
        self.jobs, self.known = jobs, known

    def wait(self) -> None:
        """Wait until all jobs have ended. Raises: the first error among them."""
        for job in self.jobs:
            job.finished.wait()
        errors = [job.error for job in self.jobs if job.error is not None]
        if errors:
            raise errors[0]


_KINDS_LIMIT = 4096
_known: set[tuple] = set()  # kinds of launches whose kernels this process has compiled


def _reset_after_fork() -> None:
    """Start with new locks and no jobs: a forked process has no threads of its parent."""
    global _lock, _parsing
    _lock, _parsing = threading.Lock(), threading.Lock()  # _lock: of the collections here; _parsing: of `_ParsingTurn`
    _under_way.clear()
    _waiting.clear()
    _workers.clear()


_under_way: dict[tuple, Job] = {}  # kind → job that waits or runs
_waiting: deque[Job] = deque()  # jobs that no thread has begun
_workers: set[threading.Thread] = set()
_reset_after_fork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class _Collector(Tape):
    """A tape that keeps `launch` from launching. found: kind → (kernel, arguments, constants)."""

    def __init__(self):
        super().__init__()
        self.found = {}


def kind_of(key: tuple) -> tuple:
    """Reduce the key of a launch to the parts that decide the compiled code.

    Of integers only two things matter: being 1, and being a multiple of 16.
    """
    kernel, device, *rest = key
    return (kernel, device, *(("int", x == 1, x % 16 == 0) if type(x) is int else x for x in rest))


def collect(calls) -> dict[tuple, Job]:
    """Return a Job, by kind, for each kernel that these calls would launch. Nothing is launched.

    Jobs follow the order of the calls. Within a call the last kernel comes first: it is the attention kernel, which
    takes longest to compile.

    calls: functions without arguments.
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
    """Start to compile the kernels these calls will launch, in order, except those already compiled.

    calls: functions without arguments, run with launches that only note their arguments. Returns at once.
    """
    return _start(collect(calls))


@contextlib.contextmanager
def compiled_together(call):
    """Compile in parallel all kernels that the op's call inside this context still needs."""
    before, recording.call = getattr(recording, "call", None), call
    try:
        yield
    finally:
        recording.call = before


def before_compile(kind: tuple) -> None:
    """Prepare a launch through Triton: wait for its kernel's job, or compile the call's other kernels.

    If a job for the kernel is running, wait for it; if it has not begun, run it in this thread. If there is no job and
    the kernel is new, start jobs for the other kernels of the current call (`compiled_together`); the launch itself
    compiles its own.
    """
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
        _known.add(kind)  # by the launch that called
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
    """Run waiting jobs until none is left: the body of a thread. Gives jobs up at exit of the program."""
    try:
        while True:
            turn = _ParsingTurn()
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


def _on_device(device: int):
    """Make a device the current one, which is the one Triton compiles for."""
    return torch.cuda.device(device) if torch.cuda.is_available() else contextlib.nullcontext()


def _stand_in(x):
    """Return a small tensor (or descriptor) of the same dtype, so that a waiting job keeps no memory."""
    if isinstance(x, torch.Tensor):
        return x.new_empty(16)
    if hasattr(x, "block_shape"):
        described = copy.copy(x)
        described.base = x.base.new_empty(16)
        return described
    return x
