"""Triton's interpreter, made to round and to treat NaN as a GPU does, and faster."""

from __future__ import annotations

import importlib.util
import inspect
import os

import numpy as np
import pytest
import torch


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


def mend() -> None:
    """Patch the interpreter of this process, if its kernels are interpreted. Once, before the first launch."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        _patch_language_once_a_launch()
        _drop_nan_as_a_gpu_does()
        _fuse_as_a_gpu_does()


@pytest.fixture(autouse=True)
def true_fp8(monkeypatch):
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
