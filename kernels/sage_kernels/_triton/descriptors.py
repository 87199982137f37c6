"""Descriptors through which the copy engine reads, made on the host."""

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


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
    """Descriptor through which the copy engine reads blocks of x, swizzled as the tensor cores want them."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, _layout_of(tuple(block), x.dtype))
