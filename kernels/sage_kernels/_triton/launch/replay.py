"""The launches of an earlier call, made again with other addresses.

What a call of an op launches follows from shapes, strides, types and options; from call to call only addresses
change. So a first call is written down while it is made (`record`); which calls are alike is for the op to say
(sage_kernels/ops/replay.py).
"""

import ctypes
import math
import threading

import torch

from .. import compat
from .direct import DirectLaunch, NotDirect
from .recording import Tape, recording


class _Address:
    """Stands where a launch looks for a tensor's address."""

    __slots__ = ("address",)

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Described:
    """A tensor descriptor without its tensor."""

    def __init__(self, fields: dict):
        self.__dict__.update(fields)

    def at(self, address: int):
        here = _Described(self.__dict__)
        here.base = _Address(address)
        return here


class _Step:
    """One launch of a recorded call.

    Args:
        compiled, start, programs: the kernel, what launches it (compat.starter), and its grid. values: its arguments,
        None for what `places` and `described` put there. rest: its constants.
        places: (argument, slot) of tensors. described: (argument, _Described, slot). named: (argument, number's name).
        table: see DirectLaunch.
    """

    def __init__(self, compiled, start, programs: int, values: list, rest: tuple, places, described, named, table):
        self.compiled, self.start, self.programs, self.values, self.rest = compiled, start, programs, values, rest
        self.places, self.described, self.named = places, described, named
        self.slots = [*places, *((i, slot) for i, _, slot in described)]
        try:
            self.direct = DirectLaunch(compiled, programs, self.known(), self.slots, named, table)
        except NotDirect:
            self.direct = None

    def known(self) -> list:
        """The arguments without tensors."""
        values = self.values.copy()
        for i, descriptor, _ in self.described:
            values[i] = descriptor
        return values

    def by_triton(self, stream: int, addresses: list[int], numbers) -> None:
        """Launch it with these tensors (address of each slot) and numbers, where there is no direct launch."""
        values = self.values.copy()
        for i, name in self.named:
            values[i] = numbers[name]
        for i, slot in self.places:
            values[i] = addresses[slot]
        for i, descriptor, slot in self.described:
            values[i] = descriptor.at(addresses[slot])
        self.start(self.programs, stream, values, self.rest)


_SCRATCH_ALIGNMENT = 256  # bytes; descriptors want 16, whole lines are 128


def _like(x: torch.Tensor, given) -> int | None:
    """The number of a given tensor that torch.empty_like makes such a tensor from: a third of torch.empty's time."""
    likes = (i for i, y in enumerate(given) if y.is_contiguous() and (x.shape, x.dtype) == (y.shape, y.dtype))
    return next(likes, None)


class Replay:
    """The launches of a recorded call, to be made again.

    Like the recorded call, another must have its shapes, strides, types and options: the caller looks that up.
    """

    def __init__(self, tape: Tape, slots: dict[int, int], given, single: bool, numbers: dict[str, int]):
        """KeyError where a launch was handed a tensor without a slot, or a kernel is compiled for one of the numbers.
        slots: address → number."""
        self.device = given[0].device
        self.single = single
        self.returned = [(x.shape, x.dtype, _like(x, given)) for x in tape.returned]
        self.offsets, self.scratch_bytes = [], 0
        for x in tape.scratch:
            self.offsets.append(self.scratch_bytes)
            used = math.ceil(x.numel() * x.element_size() / _SCRATCH_ALIGNMENT)
            self.scratch_bytes += used * _SCRATCH_ALIGNMENT
        aligned = set()
        self.launches = []
        self.table = (ctypes.c_uint64 * len(slots))()
        self.lock = threading.Lock()  # between putting addresses in the table and the last launch that reads them
        for parameters, compiled, start, programs, arguments, rest in tape.launches:
            values, places, described, named = [*arguments], [], [], []
            for i, (x, (name, is_specialized, is_aligned)) in enumerate(zip(arguments, parameters, strict=False)):
                if name in numbers:
                    if is_specialized or x != numbers[name]:
                        raise KeyError(name)
                    named.append((i, name))
                if type(x) in (int, float):
                    continue
                tensor = x if isinstance(x, torch.Tensor) else x.base
                slot = slots[tensor.data_ptr()]
                if is_aligned:
                    aligned.add(slot)
                if tensor is x:
                    places.append((i, slot))
                else:
                    described.append((i, _Described({**vars(x), "base": None}), slot))
                values[i] = None
            self.launches.append(_Step(compiled, start, programs, values, rest, places, described, named, self.table))
        self.aligned = [slot for slot in aligned if slot < len(given)]  # what is allocated here always is

    def __call__(self, given, numbers=None):
        """The results for other tensors and numbers; None if these must be launched by Triton: unaligned, another
        current device, or a profiler's hooks. A call that returns nothing: ()."""
        device = compat.current_device()
        if device != self.device.index or compat.someone_looks_on():
            return None
        addresses = [x.data_ptr() for x in given]
        for slot in self.aligned:
            if addresses[slot] & 15:
                return None
        stream = compat.current_stream(device)
        if self.offsets:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            start = scratch.data_ptr()
            addresses += [start + offset for offset in self.offsets]
        results = []
        for shape, dtype, like in self.returned:
            if like is None:
                results.append(torch.empty(shape, dtype=dtype, device=self.device))
            else:
                results.append(torch.empty_like(given[like]))
            addresses.append(results[-1].data_ptr())
        with self.lock:
            self.table[:] = addresses
            for step in self.launches:
                if step.direct is None or not step.direct(stream, addresses, numbers):
                    step.by_triton(stream, addresses, numbers)
        return results[0] if self.single else tuple(results)


def record(call, given, numbers=None):
    """Make a call, and find out whether it can be made again with other tensors.

    Args:
        call: a function of no arguments that returns a tensor, or a tuple of them, from `buffer`; None if it returns
            none.
        given: the tensors that it reads and writes besides.
        numbers: {name of a kernel's parameter: the integer that is handed over for it}, of those that may be others
            when the call is made again: no kernel is compiled for them, and no grid or buffer hangs on them.
    Returns: what `call` returns, and a Replay or None. None where a launch was not usual (see `launch`) or was handed
        a tensor that is neither given nor from `buffer`: something other than launches was computed.
    """
    tape = recording.tape = Tape()
    try:
        results = call()
    finally:
        recording.tape = None
    single = isinstance(results, torch.Tensor)
    expected = [results] if single else list(results or ())
    if not tape.complete or not tape.launches or len(tape.returned) != len(expected):
        return results, None
    if any(a is not b for a, b in zip(tape.returned, expected, strict=True)):
        return results, None
    tensors = [*given, *tape.scratch, *tape.returned]
    # one without memory is handed to no launch: a key that no address is
    slots = {x.data_ptr() or -1 - slot: slot for slot, x in enumerate(tensors)}
    if len(slots) != len(tensors):  # which of two is meant where their address is used?
        return results, None
    try:
        return results, Replay(tape, slots, given, single, numbers or {})
    except KeyError:
        return results, None
