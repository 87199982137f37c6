"""What Gluon has under different names in the versions of Triton that we allow."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


_Memory = gl.shared_memory_descriptor

# barrier() of all threads of a program or partition
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7
# reinterpret(memory, dtype, shape, layout): the same shared memory, read as something else
reinterpret = getattr(_Memory, "reinterpret", None) or _Memory._reinterpret  # renamed in Triton 3.9
# load_tile(descriptor, place, barrier, memory), store_tile(descriptor, place, memory): copies by the copy engine
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.9
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # renamed in Triton 3.9
