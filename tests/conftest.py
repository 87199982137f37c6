"""Fixtures for every test: a device, and memory that is never conveniently zero."""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import os
import sys

import numpy as np
import pytest
import torch

from tests.support.outcomes import pytest_addoption, pytest_configure  # noqa: F401 (options that pytest finds here)


# Without a GPU the kernels run in Triton's interpreter, which is chosen when a kernel is defined: before any import
# of ours.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _patch_language_once_a_launch():
    """Triton's interpreter patches triton.language at a launch, and again for every call of a jitted function inside
    of the kernel, to what it is already: a third of the time of the tests that interpret kernels."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, patched, modules = interpreter._patch_lang, set(), {}

    def once(fn):
        if fn not in modules:
            modules[fn] = {name for name, module in (("tl", tl), ("core", tl.core)) if module in _values(fn)}
        if modules[fn] <= patched:
            return None
        is_launch = not patched
        patched.update(modules[fn])
        scope = patch(fn)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = once


def _values(fn):
    return [value for value in fn.__globals__.values() if inspect.ismodule(value)]


def _drop_nan_as_a_gpu_does():
    """tl.maximum and tl.minimum return the other operand beside a NaN on a GPU. In the interpreter they return the
    NaN, which hides a kernel that loses one."""
    try:
        from triton.runtime.interpreter import InterpreterBuilder
    except ImportError:
        return
    InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)


def _fuse_as_a_gpu_does():
    """tl.fma of fp32 rounds once on a GPU. The interpreter rounds the product as well, which a kernel that takes off a
    large number with the sum can't bear."""
    try:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        return
    twice = InterpreterBuilder.create_fma

    def once(self, x, y, z):
        if z.data.dtype != np.float32:
            return twice(self, x, y, z)
        with np.errstate(over="ignore", invalid="ignore"):  # products are exact in fp64
            fused = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
            return TensorHandle(fused.astype(np.float32), z.dtype.scalar)

    InterpreterBuilder.create_fma = once


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_language_once_a_launch()
    _drop_nan_as_a_gpu_does()
    _fuse_as_a_gpu_does()


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
            tensor.fill_(float("nan"))
        elif tensor.dtype in (torch.int8, torch.uint8):
            tensor.fill_(77 if tensor.dtype == torch.int8 else 255)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def _true_fp8(monkeypatch):
    """Triton's interpreter casts to and from e4m3 as a GPU does: its own cast rounds ties away from zero, flushes
    subnormals, wraps around beyond 448 and loses NaN. PyTorch's casts, clamped first, are right."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    torch_types = {tl.float16: torch.float16, tl.float32: torch.float32, tl.float8e4nv: torch.float8_e4m3fn}

    def converted(data, source, target, rounding):
        if tl.float8e4nv not in (source, target):
            return convert(data, source, target, rounding)
        x = torch.from_numpy(np.ascontiguousarray(data).reshape(-1)).view(torch_types[source]).float()
        if target == tl.float8e4nv:
            x = x.clamp(-448.0, 448.0)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        result = x.to(torch_types[target])
        return result.view(integers[result.element_size()]).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request):
    """Where the Triton kernels run: in the interpreter on the CPU, or on a GPU."""
    on_gpu = torch.cuda.is_available()
    if (request.param == "cuda") != on_gpu:
        pytest.skip(
            "needs a CUDA GPU" if request.param == "cuda" else "the interpreter was not chosen: there is a GPU"
        )
    if request.param == "interpreter":
        pytest.importorskip("triton", reason="triton is not installed")
    return torch.device("cuda" if on_gpu else "cpu")


@pytest.fixture(params=["reference", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def tier(request):
    """The implementations of an op: the reference, the Triton kernels in the interpreter, and on a GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if request.param == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("the interpreter was not chosen: there is a GPU")
        pytest.importorskip("triton", reason="triton is not installed")
    return request.param


@pytest.fixture
def attend(tier, monkeypatch):
    """`sage_attention` on each of its implementations: see attention_cases.Attend."""
    from tests.kernels.attention.attention_cases import Attend

    return Attend(tier, monkeypatch)
