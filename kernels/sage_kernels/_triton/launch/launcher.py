"""A faster launch of Triton kernels: equal launches skip Triton's work on the host."""

import functools

import torch

from .. import compat
from .ahead import before_compile, kind_of
from .prebuilt import offer
from .recording import recording


_READY_LIMIT = 4096
# everything that decides how a kernel is compiled and its arguments bound → (compiled kernel, starter, constants)
_ready = {}


def launch(kernel, programs: int, *arguments, **constants):
    """Launch kernel[(programs,)](*arguments, **constants), skipping Triton's host work if possible.

    For each launch Triton binds and specialises all arguments and compares all globals of the kernel: half of the time
    of a short call. Here that is skipped if an equal launch was made before: the same constants, options, types, and
    integers that the kernel is specialised on; addresses must be multiples of 16 bytes, and other integers fit in 32
    bits. Any other launch goes through Triton, and so do all in its interpreter.

    Args:
        arguments: tensors, tensor descriptors, integers and floats, in the kernel's order.
        constants: the rest of its parameters, and options of the compiler.
    Returns: the compiled kernel. None in the interpreter, and while launches are only collected (ahead.py).
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
    values = []  # addresses in place of tensors: Triton's launcher would take longer to ask for them
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
                key.append(tuple(x.block_shape))  # a descriptor: its layout follows from this and the dtype
                tensor = x.base
            address = tensor.data_ptr()
            key.append(tensor.dtype)
            values.append(address if tensor is x else x)
            if is_aligned and address & 15:
                usual = False
    key = tuple(key)
    if tape is not None and tape.found is not None:
        if missing := {name for name, *_ in parameters[len(arguments) :]} - constants.keys():
            raise TypeError(f"{kernel.__name__}: launched without {', '.join(sorted(missing))}")
        tape.found.setdefault(kind_of(key), (kernel, arguments, constants))
        return None
    found = _ready.get(key) if usual and not compat.profiler_listens() else None
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
    """Return the number of SMs of a GPU; 1 for a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def capability_of(device: torch.device) -> int:
    """Return the compute capability as one number, such as 90 for Hopper; 0 for AMD and a CPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
