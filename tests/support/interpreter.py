"""Triton's interpreter, made to round and to treat NaN as a GPU does, and faster."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os

import numpy as np
import pytest
import torch

from tests.support import interpreted_operators


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


def _take_any_mask():
    """`block & scalar` of truth values is of int32 in the interpreter, which from Triton 3.9 on takes no such mask."""
    try:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        return
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def truth(mask):
        is_one = np.asarray(mask.data).dtype == bool
        return mask if is_one else TensorHandle(mask.data.astype(bool), mask.dtype)

    InterpreterBuilder.create_masked_load = lambda self, ptr, mask, *rest, **options: load(
        self, ptr, truth(mask), *rest, **options
    )
    InterpreterBuilder.create_masked_store = lambda self, ptr, value, mask, *rest, **options: store(
        self, ptr, value, truth(mask), *rest, **options
    )


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

    block, block_init, tensor_init, blocks, tensors = tl.block_type, tl.block_type.__init__, tl.tensor.__init__, {}, {}

    def init_block(self, element_ty, shape):
        key = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        if key not in blocks:
            block_init(self, element_ty, shape)
            blocks[key] = self.shape, self.numel
        self.element_ty, self.name = element_ty, f"<{key}, {element_ty}>"
        self.shape, self.numel = blocks[key]  # one object a shape, which nobody writes to

    def init_tensor(self, handle, type):
        # shapes are of those in `blocks`, which live as long as the process
        key, dtype = (id(type.shape), type.element_ty) if type.__class__ is block else (None, type.scalar)
        if key not in tensors:
            tensor_init(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, dtype
        self.shape, self.numel = tensors[key]

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor

    check = getattr(interpreter.TensorHandle, "__post_init__", lambda self: None)

    def init_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        is_wide = data.itemsize > 1 and dtype.__class__ is not tl.pointer_type
        if is_wide and 8 * data.itemsize > dtype.primitive_bitwidth:
            check(self)  # and raise

    if list(inspect.signature(interpreter.TensorHandle).parameters) == ["data", "dtype", "attr"]:
        interpreter.TensorHandle.__init__ = init_handle


def _give_operands_types_alone():
    """An operator's operands get one type without copies: NumPy broadcasts, and casts of types are looked up once.

    Triton fills a block with each scalar, and asks the same of the same types for every value: half of what is left of
    the time. Whatever is not of the common kinds goes Triton's way.
    """
    try:
        import triton.language as tl
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter
    except ImportError:
        return
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    flags = ["allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod"]
    if list(inspect.signature(check).parameters) != ["self", "lhs", "rhs", *flags]:
        return
    tensor, simple = tl.tensor, frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES + tl.dtype.FP_TYPES)
    # of these, a scalar's one element is of the type that it says it is
    plain = {t.name: (t, interpreter._get_np_dtype(t)) for t in (tl.float16, tl.float32, tl.int32, tl.int64)}
    block, with_element, to_ir = tl.block_type, tl.block_type.with_element_ty, tl.block_type.to_ir
    joined, common, blocks = {}, {}, {}  # by the identity of shapes: `_do_nothing_twice` has one object each

    def of_element(self, scalar_ty):
        if scalar_ty.name not in simple:
            return with_element(self, scalar_ty)
        key = id(self.shape), scalar_ty.name
        if key not in blocks:
            blocks[key] = with_element(self, scalar_ty)
        return blocks[key]

    def block_to_ir(self, builder):
        is_known = builder is interpreter.interpreter_builder and self.element_ty.name in simple
        return self if is_known else to_ir(self, builder)

    tl.block_type.with_element_ty, tl.block_type.to_ir = of_element, block_to_ir

    @functools.lru_cache(4096)
    def constant(value, name):
        dtype, numpy_type = plain[name]
        value = value if value else 0  # no zero is negative, as in Triton
        return interpreter.TensorHandle(np.array([value], dtype=numpy_type), dtype)

    def shape_of_both(lhs, rhs):
        """A type of both shapes' own, and whether each has it. None if they do not go together, or not as they are."""
        lhs, rhs = list(lhs), list(rhs)
        if len(lhs) != len(rhs) or any(a != b and 1 not in (a, b) for a, b in zip(lhs, rhs, strict=True)):
            return None
        shape = [b if a == 1 else a for a, b in zip(lhs, rhs, strict=True)]
        return block(tl.int32, shape), lhs == shape, rhs == shape

    def aligned(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.__class__ is block and right.__class__ is block:
            if left.shape is right.shape:
                return lhs, rhs
            key = id(left.shape), id(right.shape)
            if key not in joined:
                joined[key] = shape_of_both(left.shape, right.shape)
            if joined[key] is None:
                return broadcast(self, lhs, rhs)
            whole, left_has_it, right_has_it = joined[key]
            lhs = lhs if left_has_it else tensor(lhs.handle, whole.with_element_ty(left.element_ty))
            rhs = rhs if right_has_it else tensor(rhs.handle, whole.with_element_ty(right.element_ty))
        elif left.__class__ is block or right.__class__ is block:
            scalar, filled = (rhs, left) if left.__class__ is block else (lhs, right)
            if scalar.handle.data.shape != (1,) or not (scalar.dtype.name in plain or scalar.dtype.is_ptr()):
                return broadcast(self, lhs, rhs)
            like = tensor(scalar.handle, filled.with_element_ty(scalar.dtype))
            return (lhs, like) if scalar is rhs else (like, rhs)
        return lhs, rhs

    def constant_like(x, value, div_or_mod):
        """`value`, a Python number, beside the tensor x; None if it may be of another type than x."""
        name = x.dtype.name
        if name not in plain or (div_or_mod and name == "fp16"):
            return None
        if type(value) is float and name in ("fp16", "fp32") or type(value) is int and -(2**31) <= value < 2**31:
            return tensor(constant(value, name), x.type)
        return None

    def checked(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if type(lhs) is tensor and type(rhs) is tensor:
            a, b = lhs.dtype.name, rhs.dtype.name
            if a in simple and b in simple and arithmetic_check:
                if a != b or div_or_mod:
                    key = a, b, div_or_mod
                    if key not in common:
                        common[key] = self.computation_type_impl(lhs.dtype, False, rhs.dtype, False, div_or_mod)
                    both = common[key]
                    lhs = lhs if lhs.dtype is both else self.cast(lhs, both)
                    rhs = rhs if rhs.dtype is both else self.cast(rhs, both)
                return aligned(self, lhs, rhs)
            if allow_lhs_ptr and b in ("int32", "int64") and lhs.dtype.is_ptr():
                return aligned(self, lhs, rhs)
        elif arithmetic_check:
            if type(lhs) is tensor:
                other = constant_like(lhs, rhs, div_or_mod)
                if other is not None:
                    return lhs, other
            elif type(rhs) is tensor:
                other = constant_like(rhs, lhs, div_or_mod)
                if other is not None:
                    return other, rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    to_tensor = TritonSemantic.to_tensor

    def as_tensor(self, x, check_type=True):
        kind = type(x)
        if kind is tensor:
            return x
        if kind is int and -(2**31) <= x < 2**31:
            return tensor(constant(x, "int32"), tl.int32)
        return to_tensor(self, x, check_type)

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.to_tensor = checked, as_tensor


def _look_up_less():
    """The names that kernels call, constants and types, without what Triton asks of each of them anew."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    unwrap, equal, patch = tl.core._unwrap_if_constexpr, tl.dtype.__eq__, interpreter._patch_attr
    as_they_are = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.block_type, tl.pointer_type}

    def unwrapped(o):
        kind = type(o)
        if kind in as_they_are:
            return o
        return o.value if kind is tl.constexpr else unwrap(o)

    tl.core._unwrap_if_constexpr = tl._unwrap_if_constexpr = unwrapped

    def is_equal(self, other):
        return self is other or equal(self, other)

    tl.dtype.__eq__ = is_equal

    def patch_name(obj, name, member, builder, scope):
        inner = getattr(member, "__wrapped__", None)  # without the wrapper, which asks whether _semantic is there
        if inner is None:
            return patch(obj, name, member, builder, scope)
        semantic = interpreter.interpreter_semantic

        def called(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, called)

    if list(inspect.signature(patch).parameters) == ["obj", "name", "member", "builder", "scope"]:
        interpreter._patch_attr = patch_name


def _operate_at_once():
    """Operators go straight to NumPy where Triton's interpreter is the one that they were written for."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    known = ["obj", "name", "member", "builder", "scope"], ["pkg", "builder", "scope"], ["data", "dtype", "attr"]
    found = interpreter._patch_attr, interpreter._patch_builtin, interpreter.TensorHandle
    if all(list(inspect.signature(x).parameters) == names for x, names in zip(found, known, strict=True)):
        interpreted_operators.install()


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
        _give_operands_types_alone()
        _look_up_less()
        _operate_at_once()
        _multiply_codes_by_blas()
        _drop_nan_as_a_gpu_does()
        _fuse_as_a_gpu_does()
        _take_any_mask()


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
