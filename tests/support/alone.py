"""Tests that run while no other one does, though workers run side by side: they fill a GPU's memory, or time it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest


@contextlib.contextmanager
def taking_turns(folder: Path, alone: bool):
    """Wait until this test may run, among all processes that use this folder: beside others, or alone.

    Who waits to be alone holds the gate, so that nobody starts meanwhile. A process that dies lets go of both.
    """
    import fcntl

    with (folder / "gate").open("w") as gate, (folder / "running").open("w") as running:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture(autouse=True)
def turn(request, tmp_path_factory):
    """Marked `alone`: no other worker of pytest-xdist runs a test. What its memory held is given back afterwards."""
    alone = request.node.get_closest_marker("alone") is not None
    if not hasattr(request.config, "workerinput"):
        yield
        return
    # the workers' own folders lie side by side in that of the run
    with taking_turns(tmp_path_factory.getbasetemp().parent, alone):
        yield
        if alone:
            _give_memory_back()


def _give_memory_back():
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
