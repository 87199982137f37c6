"""Triton's interpreter, made to round and to treat NaN as a GPU does, and faster."""

from __future__ import annotations

import dataclasses
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


def _do_nothing_twice():
    """The interpreter's arithmetic without what costs two thirds of its time and changes nothing.

    Sums and products of int32 are computed once more in int64 and compared with the range, for an assertion that is
    off; operands of one shape are broadcast to it, since a list is compared with a tuple; and shapes are checked and
    unwrapped anew for every value.
    """
    try:
        import triton.language as tl
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def known_numpy_type(tt_dtype):
        name = tt_dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(tt_dtype)
        return numpy_types[name]

    interpreter._get_np_dtype = known_numpy_type

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_needed(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_if_needed

    block_init, tensor_init, blocks, tensors = tl.block_type.__init__, tl.tensor.__init__, {}, {}

    def init_block(self, element_ty, shape):
        key = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        if key not in blocks:
            block_init(self, element_ty, shape)
            blocks[key] = self.shape, self.numel
        self.element_ty, self.name = element_ty, f"<{key}, {element_ty}>"
        self.shape, self.numel = blocks[key]  # one object a shape, which nobody writes to

    def init_tensor(self, handle, type):
        if not type.is_block():
            return tensor_init(self, handle, type)
        key = id(type.shape)  # of those in `blocks`, which live as long as the process
        if key not in tensors:
            tensor_init(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.element_ty
        self.shape, self.numel = tensors[key]

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor


def _multiply_codes_by_blas():
    """NumPy multiplies integers without BLAS. Sums of up to 1024 products of INT8 codes are exact in fp32."""
    try:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        return
    slow = InterpreterBuilder.create_dot

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if not (a.data.dtype == b.data.dtype == np.int8 and a.data.shape[-1] <= 1024):
            return slow(self, a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(a.data.astype(np.float32), b.data.astype(np.float32))
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = dot


def mend() -> None:
    """Patch the interpreter of this process, if its kernels are interpreted. Once, before the first launch."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        _patch_language_once_a_launch()
        _do_nothing_twice()
        _multiply_codes_by_blas()
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
