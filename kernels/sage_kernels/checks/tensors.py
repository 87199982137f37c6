"""What every op asks of a tensor: dtype, head_dim, strides, that it can be written, that nothing differentiates it."""

from __future__ import annotations

import torch

from ..compat import has_tangent


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


def is_strided(x: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie in memory by strides: not sparse, nested or blocked for some library."""
    return x.layout is torch.strided and not x.is_nested


def check_strided(name: str, x: torch.Tensor) -> None:
    if not is_strided(x):
        got = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name}: got {got}, expected a strided tensor; pass {name}.to_dense(), or pad it")


def check_writable(name: str, x: torch.Tensor) -> None:
    """Raise for a view through which nothing can be written: PyTorch resolves it into a copy."""
    if not torch.compiler.is_compiling() and x.is_neg():
        raise ValueError(
            f"{name}: got a view with its negative bit set, expected memory to write to; pass {name}.resolve_neg()"
        )


def check_no_tangent(name: str, x: torch.Tensor) -> None:
    """Raise where forward-mode differentiation would take the result for a constant."""
    if has_tangent(x):
        raise NotImplementedError(
            f"{name}: got a tangent (forward-mode differentiation), expected inference: there is no derivative; use "
            "scaled_dot_product_attention for that"
        )
