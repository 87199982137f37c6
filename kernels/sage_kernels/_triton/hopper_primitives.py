"""Shared by the Gluon kernels for Hopper: version-dependent names, descriptors, overlapping launches."""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


_Memory = gl.shared_memory_descriptor

# Names that differ between the versions of Triton we allow; compat.EARLIER lists the earlier ones.
# barrier() of all threads of a program or partition
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7
# reinterpret(memory, dtype, shape, layout): the same shared memory, read as another type
reinterpret = getattr(_Memory, "reinterpret", None) or _Memory._reinterpret  # renamed in Triton 3.9
# load_tile(descriptor, place, barrier, memory), store_tile(descriptor, place, memory): copies by the copy engine
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.9
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # renamed in Triton 3.9

_GLUON_DTYPES = {
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


@functools.cache
def _layout_of(block: tuple[int, ...], dtype: torch.dtype):
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPES[dtype])


def describe(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Return the descriptor by which the copy engine reads blocks of x.

    Blocks are swizzled in shared memory as the tensor cores expect them.
    """
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, _layout_of(tuple(block), x.dtype))


@gluon.jit
def wait_for_launch_before():
    """Wait until the previous launch on the stream has ended and its writes are visible.

    Needed because a launch with launch_pdl may start its programs before the previous one ends.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_launch_begin():
    """Allow the next launch to start on SMs that have no program of this one left.

    The next launch must call `wait_for_launch_before` before it reads results.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
