"""What Gluon has under different names in the versions of Triton that we allow."""

from triton.experimental.gluon import language as gl


_Memory = gl.shared_memory_descriptor

# barrier() of all threads of a program or partition
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7
# reinterpret(memory, dtype, shape, layout): the same shared memory, read as something else
reinterpret = getattr(_Memory, "reinterpret", None) or _Memory._reinterpret  # renamed in Triton 3.9
