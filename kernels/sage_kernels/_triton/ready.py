"""Begin in background threads the work that Triton does once in a process before its first launch.

It builds a C library for the driver and hashes its own files, which takes a second or two, mostly without the GIL.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any


logger = logging.getLogger("sage_kernels")
_lock = threading.Lock()
_threads: list[threading.Thread] = []
_has_begun = False


def begin(tasks: Iterable[Callable[[], Any]]) -> None:
    """Run each of these functions in a thread of its own.

    Later calls in the process do nothing. Errors of the functions are not raised.
    """
    global _has_begun
    with _lock:
        if _has_begun:
            return
        _has_begun = True
        for task in tasks:
            thread = threading.Thread(target=_run, args=(task,), name="sage_kernels ready", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit of threads
                logger.debug("not made ready in the background: %s", error)
            else:
                _threads.append(thread)


def _run(task: Callable[[], Any]) -> None:
    try:
        task()
    except Exception as error:  # whoever needs it meets the same error
        logger.debug("not made ready in the background: %s", error)


def wait() -> None:
    """Wait for what was begun, except in the threads of `begin` themselves."""
    if not _threads or threading.current_thread() in _threads:
        return
    for thread in list(_threads):
        thread.join()
        with contextlib.suppress(ValueError):  # somebody else waited, too
            _threads.remove(thread)
