"""Operators of Triton's interpreter straight to NumPy: half of what kernels do is to add, multiply and compare."""

from __future__ import annotations

import inspect

import numpy as np


# as they are at every launch: those of blocks or scalars of one common type, or of one and a number
OPERATORS = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__mod__": np.fmod,
    "__floordiv__": lambda x, y: (x - np.fmod(x, y)) // y,
}
COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
OF_INTEGERS = ("__and__", "__or__", "__mod__", "__floordiv__")
EVERYTHING = slice(None)


def install():
    """Patch Triton's interpreter. What a result's type is, Triton says the first time; the rest goes its way."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    tensor, pointer, constexpr, Handle = tl.tensor, tl.pointer_type, tl.constexpr, interpreter.TensorHandle
    numpy_types = {t.name: interpreter._get_np_dtype(t) for t in (tl.float16, tl.float32, tl.int32, tl.int64)}
    integers = {t.name: interpreter._get_np_dtype(t) for t in (tl.int1, tl.int32, tl.int64)}
    direct = {
        (source.name, target.name): interpreter._get_np_dtype(target)
        for source in (tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float32)
        for target in (tl.int8, tl.int32, tl.int64, tl.float32)
    }
    direct |= {("fp16", "fp32"): numpy_types["fp32"], ("fp32", "fp16"): numpy_types["fp16"]}

    def like(known, data, dtype):
        """A tensor of the type of `known`, with other data."""
        made, handle = object.__new__(tensor), object.__new__(Handle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        made.handle, made.type, made.dtype, made.shape, made.numel = handle, *known
        return made

    def type_of(x):
        return x.type, x.dtype, x.shape, x.numel

    def operator(name, slow):
        ufunc, known, numbers = OPERATORS[name], {}, {}
        operands = integers if name in OF_INTEGERS else numpy_types
        is_comparison = name in COMPARISONS

        def number(x, y):
            """y as NumPy has it beside x, or None if Triton may take it for another type."""
            kind, of = type(y), x.dtype.name
            key = of, kind, y
            if key in numbers:
                return numbers[key]
            found = None
            if kind is int and -(2**24) < y < 2**24 and of in operands and not (is_comparison and of == "fp16"):
                found = np.array([y], numpy_types[of]) if of in numpy_types else None
            elif kind is float and of == "fp32" and (y == 0 or 1e-30 < abs(y) < 1e30):
                found = np.array([y if y else 0.0], np.float32)  # no zero is negative, as in Triton
            numbers[key] = found
            return found

        def operate(x, y, **options):
            if y.__class__ is constexpr:
                y = y.value
            if y.__class__ is tensor:
                key, data = (x.dtype.name, id(x.shape), y.dtype.name, id(y.shape)), None
            else:
                data = number(x, y)
                if data is None:
                    return slow(x, y)
                key = x.dtype.name, id(x.shape)
            found = known.get(key)
            if found is None:
                result = slow(x, y)
                if data is not None or (x.dtype.name == y.dtype.name and x.dtype.name in operands):
                    if result.handle.data.dtype is (np.dtype(bool) if is_comparison else operands[x.dtype.name]):
                        known[key] = type_of(result), 0, result.handle.data.dtype
                elif ufunc is np.add and x.dtype.__class__ is pointer and y.dtype.name in ("int32", "int64"):
                    known[key] = type_of(result), max(1, x.dtype.element_ty.primitive_bitwidth // 8), None
                return result
            kind, width, numpy_type = found
            handle = x.handle
            if width:
                return like(kind, handle.data + width * y.handle.data.astype(np.uint64), handle.dtype)
            result = ufunc(handle.data, y.handle.data if data is None else data)
            return like(kind, result, handle.dtype) if result.dtype is numpy_type else slow(x, y)

        return operate

    def index(slow):
        known = {}

        def get(x, slices, **options):
            if slices.__class__ is not tuple:
                return slow(x, slices)
            added = tuple([None if s is None else s.__class__ is slice and s == EVERYTHING for s in slices])
            key = id(x.shape), x.dtype.name, added
            if key not in known:
                result = slow(x, slices)
                if x.type.is_block() and False not in added:
                    known[key] = type_of(result)
                return result
            return like(known[key], x.handle.data[slices], x.handle.dtype)

        return get

    ways = {name: lambda slow, name=name: operator(name, slow) for name in OPERATORS} | {"__getitem__": index}
    patch, made = interpreter._patch_attr, {}

    def patch_name(obj, name, member, builder, scope):
        if obj is not tensor or name not in ways:
            return patch(obj, name, member, builder, scope)
        if name in made:
            return scope.set_attr(obj, name, made[name])
        patch(obj, name, member, builder, scope)
        made[name] = ways[name](getattr(obj, name))
        setattr(obj, name, made[name])

    interpreter._patch_attr = patch_name

    members, cast, casts = {}, TritonSemantic.cast, {}

    def patch_builtin(module, builder, scope):
        if module not in members:
            members[module] = [(n, m) for n, m in inspect.getmembers(module) if tl.core.is_builtin(m)]
        for name, member in members[module]:
            if getattr(module, name) is member:  # not patched as a part of another module
                interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin

    def cast_once(self, input, dst_ty, fp_downcast_rounding=None):
        source, target = input.dtype.name, dst_ty.scalar.name
        if source == target:
            return input
        numpy_type = direct.get((source, target))
        if numpy_type is None or fp_downcast_rounding is not None:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        key = source, target, id(input.shape)
        if key not in casts:
            result = cast(self, input, dst_ty)
            casts[key] = type_of(result)
            return result
        return like(casts[key], input.handle.data.astype(numpy_type), casts[key][1])

    TritonSemantic.cast = cast_once
