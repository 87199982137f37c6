"""One launch of a Triton kernel, without what Triton would do on the host again for each."""

import functools

import torch

from .. import compat
from .ahead import before_compile, kind_of
from .prebuilt import offer
from .recording import recording


_READY_LIMIT = 4096  # launches that are remembered
_ready = {}  # all that decides how a kernel is compiled and its arguments bound → what starts it


def launch(kernel, programs: int, *arguments, **constants):
    """kernel[(programs,)](*arguments, **constants), sooner where it was launched like that before.

    Triton binds and specialises the arguments of each launch anew and compares all globals of the kernel: half of what
    a short call costs. A launch is like an earlier one if constants, options, types and the integers that the kernel
    is specialised on are the same, all addresses are multiples of 16 bytes, and the other integers have 32 bits. Any
    other goes through Triton, as all do in its interpreter.

    Args:
        arguments: tensors, tensor descriptors, integers and floats, in the kernel's order; the rest of its parameters
            are constants.
    Returns: the compiled kernel; in the interpreter, and where launches are only collected (ahead.py), None.
    """
    tape = getattr(recording, "tape", None)
    parameters = compat.parameters(kernel)
    if parameters is None:
        if tape is not None:
            tape.complete = False
            if tape.found is not None:
                return None
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
    if tape is not None and tape.found is not None:
        tape.found.setdefault(kind_of(key), (kernel, arguments, constants))
        return None
    found = _ready.get(key) if usual and not compat.someone_looks_on() else None
    if found is not None:
        compiled, start, rest = found
        start(programs, compat.current_stream(device), values, rest)
    else:
        if usual:
            before_compile(kind_of(key))
        offer(kernel)
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
    """Number of SMs of a GPU; 1 for a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability_of(device: torch.device) -> int:
    """Compute capability of an NVIDIA GPU as one number, such as 90 for Hopper; 0 for AMD and a CPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
