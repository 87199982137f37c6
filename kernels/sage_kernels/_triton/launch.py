"""A launch of a Triton kernel, without what Triton does on the host again for each; and calls made once more.

What a call of an op launches follows from shapes, strides, types and options; from call to call only addresses
change. So the launches of a first call can be written down (`record`) and made again with other addresses.
"""

import ctypes
import math
import threading

import torch

from . import compat
from .direct_launch import DirectLaunch, NotDirect


_READY_LIMIT = 4096  # launches that are remembered
_ready = {}
_recording = threading.local()  # .tape: of the call that this thread is recording


def launch(kernel, programs: int, *arguments, **constants):
    """kernel[(programs,)](*arguments, **constants), sooner where it was launched like that before.

    Triton binds and specialises the arguments of each launch anew and compares all globals of the kernel: half of what
    a short call costs. A launch is like an earlier one if constants, options, types and the integers that the kernel
    is specialised on are the same, all addresses are multiples of 16 bytes, and the other integers have 32 bits. Any
    other goes through Triton, as all do in its interpreter.

    Args:
        arguments: tensors, tensor descriptors, integers and floats, in the kernel's order; the rest of its parameters
            are constants.
    Returns: the compiled kernel; in the interpreter None.
    """
    tape = getattr(_recording, "tape", None)
    parameters = compat.parameters(kernel)
    if parameters is None:
        if tape is not None:
            tape.complete = False
        return kernel[(programs,)](*arguments, **constants)
    device = compat.current_device()
    key = [id(kernel), device, *constants.items()]
    values = []  # addresses for tensors: the driver's own way to them is longer
    usual = True
    for x, (_, is_specialized, is_aligned) in zip(arguments, parameters, strict=False):
        kind = type(x)
        if kind is int:
            key.append(x if is_specialized else int)
            values.append(x)
            if not (is_specialized or -(2**31) <= x < 2**31):
                usual = False
        elif kind is float:
            key.append(float)
            values.append(x)
        else:
            tensor = x
            if not isinstance(x, torch.Tensor):
                if not hasattr(x, "block_shape"):
                    usual = False
                    break
                key.append(tuple(x.block_shape))  # a descriptor's; it lies as its shape and dtype say
                tensor = x.base
            address = tensor.data_ptr()
            key.append(tensor.dtype)
            values.append(address if tensor is x else x)
            if is_aligned and address & 15:
                usual = False
    key = tuple(key)
    found = _ready.get(key) if usual and not compat.someone_looks_on() else None
    if found is not None:
        compiled, start, rest = found
        start(programs, compat.current_stream(device), values, rest)
    else:
        compiled = kernel[(programs,)](*arguments, **constants)
        start = compat.starter(compiled) if usual else None
        usual = start is not None
        rest = tuple(constants[name] for name, *_ in parameters[len(arguments) :]) if usual else ()
        if usual:
            if len(_ready) >= _READY_LIMIT:
                _ready.clear()
            _ready[key] = compiled, start, rest
    if tape is not None:
        tape.complete = tape.complete and usual
        tape.launches.append((parameters, compiled, start, programs, arguments, rest))
    return compiled


def processors_of(device: torch.device) -> int:
    """How many SMs it has; one where there are none, in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def buffer(*shape: int, dtype: torch.dtype = torch.float32, device, returned: bool = False) -> torch.Tensor:
    """torch.empty for what launches of one call hand on to each other, or `returned` by the call."""
    x = torch.empty(shape, dtype=dtype, device=device)
    tape = getattr(_recording, "tape", None)
    if tape is not None:
        (tape.returned if returned else tape.scratch).append(x)
    return x


class _Tape:
    """What one call did: its launches and buffers. complete: nothing that can't be done again."""

    def __init__(self):
        self.launches, self.scratch, self.returned, self.complete = [], [], [], True


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
    tape = _recording.tape = _Tape()
    try:
        results = call()
    finally:
        _recording.tape = None
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

    def __init__(self, tape: _Tape, slots: dict[int, int], given, single: bool, numbers: dict[str, int]):
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
