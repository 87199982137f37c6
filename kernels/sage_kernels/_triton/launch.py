"""A launch of a Triton kernel, without what Triton does on the host again for each."""

import functools

import torch
import triton


_READY_LIMIT = 4096  # launches that are remembered
_ready = {}


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
    if not isinstance(kernel, triton.JITFunction):
        return kernel[(programs,)](*arguments, **constants)
    key = [id(kernel), triton.runtime.driver.active.get_current_device(), *constants.items()]
    usual = True
    for x, (is_specialized, is_aligned) in zip(arguments, _specialization(kernel), strict=False):
        kind = type(x)
        if kind is int:
            key.append(x if is_specialized else int)
            if not (is_specialized or -(2**31) <= x < 2**31):
                usual = False
        elif kind is float:
            key.append(float)
        else:
            if not isinstance(x, torch.Tensor):
                if not hasattr(x, "block_shape"):
                    usual = False
                    break
                key.append(tuple(x.block_shape))  # a descriptor's; it lies as its shape and dtype say
                x = x.base
            key.append(x.dtype)
            if is_aligned and x.data_ptr() & 15:
                usual = False
    key = tuple(key)
    found = _ready.get(key) if usual else None
    if found is not None:
        compiled, rest = found
        compiled[(programs, 1, 1)](*arguments, *rest)
        return compiled
    compiled = kernel[(programs,)](*arguments, **constants)
    if usual:
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        _ready[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    return compiled


@functools.cache
def _specialization(kernel) -> list[tuple[bool, bool]]:
    """Of each parameter: whether the kernel is compiled anew for other integers, or for unaligned addresses."""
    return [
        (not x.do_not_specialize, not (x.do_not_specialize or x.do_not_specialize_on_alignment)) for x in kernel.params
    ]
