"""How kernels read a mask: its elements as biases on base-2 scores, and the strides that it is read with."""

import torch
import triton
import triton.language as tl


_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def load_bias(pointers, inside):
    """Mask elements as biases on base-2 scores: bool (as uint8) gives 0 and -inf; -inf outside. No overflow."""
    if pointers.dtype.element_ty == tl.uint8:
        bias = tl.where(tl.load(pointers, mask=inside, other=0) != 0, 0.0, float("-inf"))
    else:
        given = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
        bias = tl.where(given == float("-inf"), given, tl.maximum(given * _LOG2_E, _LOWEST))
    return bias


def as_loadable(mask: torch.Tensor) -> torch.Tensor:
    """The mask itself in a type that kernels load: bool as the bytes that it is."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def broadcast_strides(mask: torch.Tensor) -> list[int]:
    """Strides of the mask, 0 where one element serves the whole dimension."""
    return [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
