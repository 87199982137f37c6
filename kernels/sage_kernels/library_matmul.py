"""FP8 linear layers through PyTorch's own scaled matmul, on GPUs where it is faster than our kernel."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

from .compat import scaled_matmul
from .recipe import GATED


_CAPABILITIES = ((9, 0), (10, 0))  # that have it with a scale for each row and column
_ACTIVATIONS = {"none": lambda y: y, "gelu": gelu, "gelu_tanh": lambda y: gelu(y, approximate="tanh"), "silu": silu}


def does(codes: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether it multiplies codes [..., K] and weight [N, K] with outputs of this type."""
    if codes.dtype != torch.float8_e4m3fn or not codes.is_cuda or dtype != torch.bfloat16 or scaled_matmul is None:
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(codes.device) not in _CAPABILITIES:
        return False
    whole = weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    return whole and codes.is_contiguous() and weight.is_contiguous() and is_aligned(codes, weight)


def is_aligned(codes: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether they begin where it can read: all of `does` that shapes, strides and types don't say."""
    return codes.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0


def linear(codes, scale, weight, weight_scale, bias, *, activation, gate, residual, dtype) -> torch.Tensor:
    """As `ref_quantized_linear`, with a rounding to bf16 before the activation function.

    Never with `use_fast_accum`: matrix units then cut off what they add to a long sum, the more the longer it is.
    """
    x = codes.reshape(-1, codes.shape[-1])
    bias = None if bias is None else bias.to(dtype)
    y = scaled_matmul(
        x, weight.t(), scale.reshape(-1, 1), weight_scale.view(1, -1), bias=bias, out_dtype=dtype, use_fast_accum=False
    )
    y = y.view(*codes.shape[:-1], -1)
    if activation in GATED:
        value, pair = y.unflatten(-1, (-1, 2)).unbind(-1)
        y = value * _ACTIVATIONS[GATED[activation]](pair)
    else:
        y = _ACTIVATIONS[activation](y)
    if gate is not None and residual is not None:
        return torch.addcmul(residual.to(dtype), y, gate.to(dtype)).contiguous()  # it may take the residual's strides
    y = y if gate is None else y * gate.to(dtype)
    return y if residual is None else (residual.to(dtype) + y).contiguous()
