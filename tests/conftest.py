"""Fixtures for every test: a device, and memory that is never conveniently zero."""

from __future__ import annotations

import functools
import gc
import os
import sys

import pytest
import torch
from torch.utils._device import _device_constructors

from tests.support import interpreter
from tests.support.alone import turn  # noqa: F401 (pytest finds fixtures and hooks here)
from tests.support.covering import mark_repeats
from tests.support.interpreter import true_fp8  # noqa: F401
from tests.support.outcomes import pytest_addoption, pytest_configure  # noqa: F401
from tests.support.rotary_passes import rotary_passes  # noqa: F401
from tests.support.waiting import library_tests, waiting  # noqa: F401


# Without a GPU the kernels run in Triton's interpreter, which is chosen when a kernel is defined: before any import
# of ours.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


interpreter.mend()
# `with torch.device(…)` remembers what functions make tensors: before torch.empty is another one
_device_constructors()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not name
def pytest_collection_modifyitems(items):
    """A test that `make test` leaves out says why. Files with such tests come first: processes are handed whole files,
    and one would be left alone with a long one at the end."""
    mark_repeats(items)
    long_files = set()
    for item in items:
        for mark, number, reason in (("gpu", 1, "needs a CUDA GPU"), ("two_gpus", 2, "needs two CUDA GPUs")):
            if item.get_closest_marker(mark) and torch.cuda.device_count() < number:
                item.add_marker(pytest.mark.skip(reason=reason))
        for mark in item.iter_markers("slow"):
            if not mark.args:
                raise pytest.UsageError(f'{item.nodeid}: got pytest.mark.slow, expected a reason: slow("…")')
            long_files.add(item.path)
    items.sort(key=lambda item: item.path not in long_files)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


def pytest_collection_finish():
    """What is loaded by now stays: the garbage collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A worker of xdist whose CUDA context is lost ends here: xdist fails this test and replaces the worker. It would
    fail all of its other tests, too."""
    report = yield
    lost = call.excinfo is not None and "CUDA error" in str(call.excinfo.value)
    if lost and hasattr(item.config, "workerinput"):
        print(f"{item.nodeid}\n{report.longreprtext[-3000:]}", file=sys.__stderr__, flush=True)
        os._exit(1)
    return report


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """torch.empty returns NaN (codes: 77; bytes that may become either: 255, a NaN of fp32), so that a result that was
    never written can't pass for a right one."""
    empty = torch.empty

    @functools.wraps(empty)
    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if (
            torch.compiler.is_compiling()
            or tensor.device.type == "meta"
            or isinstance(tensor, torch._subclasses.FakeTensor)
        ):
            return tensor
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
        elif tensor.dtype in (torch.int8, torch.uint8):
            tensor.fill_(77 if tensor.dtype == torch.int8 else 255)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request):
    """Where the Triton kernels run: in the interpreter on the CPU, or on a GPU."""
    _interpreted(request.param)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture(params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def tier(request):
    """The implementations of an op: the reference, the Triton kernels in the interpreter, and on a GPU."""
    _interpreted(request.param)
    return request.param


def _interpreted(tier: str) -> None:
    """Skip a test of the interpreter where there is none, or where kernels are compiled."""
    if tier == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("the interpreter was not chosen: there is a GPU")
        pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def attend(tier, monkeypatch):
    """`sage_attention` on each of its implementations: see attention_cases.Attend."""
    from tests.kernels.attention.attention_cases import Attend

    return Attend(tier, monkeypatch)
