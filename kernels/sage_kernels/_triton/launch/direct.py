"""Launches through the CUDA driver, without Triton's launcher, for kernels launched before.

For every launch Triton's launcher converts forty to sixty Python arguments and encodes tensor descriptors for the copy
engine. In a replay nearly all of them are unchanged. Here they are stored once, in the binary form that the kernel
receives, and only addresses and a few numbers are replaced.

The kernel's parameters follow from its signature. They are compared with the loaded code (cuFuncGetParamInfo). If they
differ, if the launch needs more than a grid (clusters, scratch memory), or if the driver is too old, `NotDirect` is
raised, and Triton's launcher is used instead.
"""

from __future__ import annotations

import ctypes
import re
from typing import NamedTuple

from ..compat import attribute, cuda_driver, descriptor_types


_SUCCESS = 0
_DESCRIPTOR_BYTES = 128  # CUtensorMap
_DESCRIPTOR_ALIGNMENT = 64
_DESCRIPTORS_LIMIT = 256  # encoded descriptors kept for one argument
_L2_PROMOTION_128B = 2
_PROGRAMMATIC_SERIALIZATION = 6  # a CUlaunchAttributeID: the kernel itself waits for the previous one
_OOB_FILL_NONE, _OOB_FILL_NAN = 0, 1
# Triton's name of a type → how it is stored; pointers and descriptors are stored in their own way
_NUMBERS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64, "fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


class _Attribute(ctypes.Structure):
    """The driver's struct CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_int32 * 16))


class _Config(ctypes.Structure):
    """The driver's struct CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("number", ctypes.c_uint32),
    )  # fmt: skip


class NotDirect(Exception):
    """Raised if a launch can't go to the driver directly; Triton's launcher must make it."""


class Parameter(NamedTuple):
    """One parameter of a compiled kernel.

    Attributes:
        type: Triton's name of the type; "descriptor" for a tensor descriptor of the copy engine.
        argument: index of the kernel's argument it comes from; -1: none.
        field, axis: for a number of a descriptor: "shape" or "strides", and the axis.
    """

    type: str
    argument: int = -1
    field: str = ""
    axis: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the parameter."""
        if self.type == "descriptor":
            return _DESCRIPTOR_BYTES
        return 8 if self.type.startswith("*") else ctypes.sizeof(_NUMBERS[self.type])


def parameters_of(compiled) -> list[Parameter] | None:
    """List the parameters of a compiled CUDA kernel in order; None if its launch needs more than these.

    Constants are no parameters. A tensor descriptor becomes a descriptor, then its shape, then its strides. At the end
    there are two pointers to scratch memory, not used by our kernels.

    compiled: Triton's CompiledKernel.
    """
    try:
        metadata, signature = attribute(compiled, "metadata"), attribute(attribute(compiled, "src"), "signature")
        target = attribute(metadata, "target")
    except AttributeError:
        return None
    plain = {"num_ctas": 1, "launch_cooperative_grid": False}
    plain |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    if target.backend != "cuda" or any(getattr(metadata, name, None) != x for name, x in plain.items()):
        return None
    described = iter(getattr(metadata, "tensordesc_meta", None) or ())
    found = []
    for i, kind in enumerate(signature.values()):
        if not isinstance(kind, str):
            return None
        if kind.startswith("tensordesc"):
            if next(described, None) is None:
                return None
            rank = re.match(r"tensordesc<[^[>]*\[([^]]*)\]", kind).group(1).count(",") + 1
            found.append(Parameter("descriptor", i))
            found += [Parameter("i32", i, "shape", axis) for axis in range(rank)]
            found += [Parameter("i64", i, "strides", axis) for axis in range(rank)]
        elif kind.startswith("*") or kind in _NUMBERS:
            found.append(Parameter(kind, i))
        elif kind != "constexpr":
            return None
    return [*found, Parameter("*i8"), Parameter("*i8")]


class DirectLaunch:
    """A launch with stored arguments; only addresses and some integers change from call to call.

    Args:
        compiled: Triton's CompiledKernel, loaded.
        programs: size of the grid.
        arguments: of the kernel, without its constants. None stands for a tensor; a descriptor comes without tensor.
        slots: pairs (argument, index of its address) of tensors and descriptors.
        named: pairs (argument, name of its number) of integers that may change.
        table: ctypes array of 64-bit words from which the driver reads the addresses of tensors. The caller writes
            them, for all launches of a call at once, and keeps other threads from writing until the launch is made.
        driver: for tests; None: the CUDA driver.
    Raises: NotDirect.
    """

    def __init__(self, compiled, programs: int, arguments, slots, named, table, driver=None):
        self.driver = driver or cuda_driver()
        parameters = parameters_of(compiled) if self.driver is not None else None
        if parameters is None or not self._is_what_was_loaded(compiled.function, parameters):
            raise NotDirect
        metadata = compiled.metadata
        try:
            threads, shared = 32 * attribute(metadata, "num_warps"), attribute(metadata, "shared")
        except AttributeError:
            raise NotDirect from None
        self.launch, self.function, self.stream = self.driver.cuLaunchKernelEx, compiled.function, None
        self.config = _Config((programs, 1, 1), (threads, 1, 1), shared)
        if getattr(metadata, "launch_pdl", False):
            self.attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (1,))
            self.config.attributes, self.config.number = ctypes.pointer(self.attribute), 1
        self.config_address = ctypes.addressof(self.config)
        described = iter(getattr(metadata, "tensordesc_meta", None) or ())
        slot_of, stored, descriptors = dict(slots), {}, {}  # slot_of: argument → index of its address
        pointers, self.kept = [], [table]  # addresses of the parameters, and the memory that they point to
        for parameter in parameters:
            i = parameter.argument
            if parameter.type.startswith("*") and i in slot_of:
                pointers.append(ctypes.addressof(table) + 8 * slot_of[i])
                continue
            kept = self._store(parameter, arguments, described, stored, descriptors)
            pointers.append(ctypes.addressof(kept))
            self.kept.append(kept)
        self.pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.pointers_address = ctypes.addressof(self.pointers)
        places = {x.argument: place for place, x in enumerate(parameters) if x.type == "descriptor"}
        self.descriptors = [(places[i], descriptors[i], slot_of[i]) for i in descriptors if i in slot_of]
        self.named = [(stored[i], name) for i, name in named]

    def _is_what_was_loaded(self, function: int, parameters: list[Parameter]) -> bool:
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()

        def nbytes(i: int) -> int | None:
            status = self.driver.cuFuncGetParamInfo(
                ctypes.c_void_p(function), ctypes.c_size_t(i), ctypes.byref(offset), ctypes.byref(size)
            )
            return size.value if status == _SUCCESS else None

        return [nbytes(i) for i in range(len(parameters) + 1)] == [*(x.nbytes for x in parameters), None]

    def _store(self, parameter: Parameter, arguments, described, stored: dict, descriptors: dict):
        """Allocate the memory of one parameter, and write its value if that is known."""
        i = parameter.argument
        given = arguments[i] if 0 <= i < len(arguments) else None
        if parameter.type == "descriptor":
            kept = ctypes.c_uint64(0)  # until there is an address
            descriptors[i] = _EncodedDescriptors(self.driver, given, next(described))
        elif parameter.field:
            kept = _NUMBERS[parameter.type](getattr(given, parameter.field)[parameter.axis])
        else:
            kept = ctypes.c_uint64(0) if parameter.type.startswith("*") else _NUMBERS[parameter.type](given)
            stored[i] = kept
        return kept

    def __call__(self, stream: int, addresses: list[int], numbers) -> bool:
        """Launch with the addresses in the table. Returns False if nothing was launched.

        addresses: the same ones as in the table, for descriptors. numbers: by name, see `named`.
        """
        for number, name in self.named:
            if not -(2**31) <= numbers[name] < 2**31:  # ctypes would wrap it around
                return False
            number.value = numbers[name]
        for place, descriptors, slot in self.descriptors:
            encoded = descriptors.at(addresses[slot])
            if encoded is None:
                return False
            self.pointers[place] = encoded
        if stream != self.stream:
            self.config.stream = self.stream = stream
        return self.launch(self.config_address, self.function, self.pointers_address, None) == _SUCCESS


class _EncodedDescriptors:
    """Encoded tensor descriptors (CUtensorMap) of one argument, by address, as Triton would encode them.

    They are kept because addresses return: PyTorch's allocator hands out the same memory in each step of a model.
    """

    def __init__(self, driver, descriptor, metadata):
        types, known = descriptor_types(), ("elem_size", "elem_type", "block_size", "swizzle")
        if any(name not in metadata for name in known) or metadata["elem_type"] not in types:
            raise NotDirect
        if metadata.get("fp4_padded") or getattr(descriptor, "round_f32_to_tf32", False):
            raise NotDirect
        self.driver, self.found = driver, {}
        rank, nbytes = len(descriptor.shape), metadata["elem_size"]
        fill = _OOB_FILL_NAN if descriptor.padding == "nan" else _OOB_FILL_NONE
        self.encoding = (
            types[metadata["elem_type"]], rank,
            (ctypes.c_uint64 * rank)(*reversed([int(x) for x in descriptor.shape])),
            (ctypes.c_uint64 * rank)(*reversed([nbytes * int(x) for x in descriptor.strides[:-1]])),
            (ctypes.c_uint32 * rank)(*reversed(metadata["block_size"])), (ctypes.c_uint32 * rank)(*[1] * rank),
            metadata["swizzle"], fill,
        )  # fmt: skip

    def at(self, address: int) -> int | None:
        """Return the address of the encoded descriptor for a tensor at `address`; None if the driver refuses."""
        found = self.found.get(address)
        if found is None:
            found = self._encode(address)
            if found is None:
                return None
            if len(self.found) >= _DESCRIPTORS_LIMIT:
                self.found.clear()
            self.found[address] = found
        return found[0]

    def _encode(self, address: int):
        room = (ctypes.c_uint8 * (_DESCRIPTOR_BYTES + _DESCRIPTOR_ALIGNMENT))()
        start = -(-ctypes.addressof(room) // _DESCRIPTOR_ALIGNMENT) * _DESCRIPTOR_ALIGNMENT
        dtype, rank, shape, strides, box, steps, swizzle, fill = self.encoding
        status = self.driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(start), dtype, rank, ctypes.c_void_p(address), shape, strides, box, steps, 0, swizzle,
            _L2_PROMOTION_128B, fill,
        )  # fmt: skip
        return (start, room) if status == _SUCCESS else None
