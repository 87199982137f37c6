"""Calls with few rows: the weight is read in 8 bit, and the activation stays in 16 bit."""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels import QuantizedRows, quantized_linear, weight_only_linear
from sage_kernels.facts.few_rows import FEW_ROWS, LEAST_EAGER, are_few

from .linear_state import LinearState


_DTYPES = (torch.float16, torch.bfloat16)
_MOST_ROWS = max(row.rows for row in FEW_ROWS)
# A layer whose weight alone is in 8 bit dequantises it for calls of more rows than this, as models with a timestep for
# each token make. The kernel for few rows is slower than 16 bit at 64 already, and its partial sums would take four
# times the memory of the result. Where dequantising begins to pay was not measured.
_MOST_OF_WEIGHT_ONLY = 256


def is_few(state: LinearState, x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if a call multiplies its rows in 16 bit by the 8-bit weight. dtype: of the output.

    While a probe compares the layer, its calls run as they would with more rows.
    """
    if state.is_weight_only:
        return True
    if dtype not in _DTYPES or (state.probe is not None and state.probe.shared.on):
        return False
    depth, size = x.shape[-1], x.numel()
    if depth == 0 or size > _MOST_ROWS * depth:
        return False
    return are_few(x.device, state.format, size // depth, _columns(state), depth)


def stays_in_16_bit(state: LinearState, x: torch.Tensor) -> bool:
    """Return True for a call of many rows to a layer behind a gated activation.

    A dropped 16-bit weight is made from the 8-bit one for each such call. While a probe compares the layer, its calls
    run in 8 bit.
    """
    if not state.is_gated or (state.probe is not None and state.probe.shared.on):
        return False
    return not is_few(state, x, x.dtype)


def has_many_rows(state: LinearState, x: torch.Tensor) -> bool:
    """Return True if a call of a weight-only layer has more rows than its kernel is for."""
    return state.is_weight_only and x.numel() > _MOST_OF_WEIGHT_ONLY * x.shape[-1]


def pays_eagerly(state: LinearState, x: torch.Tensor) -> bool:
    """Return True if an eager call of few rows saves more time on the GPU than it takes on the host."""
    return _columns(state) * x.shape[-1] >= LEAST_EAGER and is_few(state, x, x.dtype)


def _columns(state: LinearState) -> int:
    """Return the number of columns of one product: joined projections are one."""
    columns: int = state.storage.starts[-1] if state.storage.is_joined else state.storage.modules[0].out_features
    return columns


def in_16_bit_rows(x: torch.Tensor, dtype: torch.dtype, balance: torch.Tensor | None) -> torch.Tensor:
    """Return x [..., K] times balance [K] in dtype, rounded once, to multiply by an 8-bit weight.

    Without a balance it is x itself where that has the dtype; with one a new tensor. balance: of `Balance.for_rows`.
    """
    if balance is None:
        return x if x.dtype == dtype else x.to(dtype)  # the same tensor for all layers that read it
    if x.dtype == dtype == balance.dtype:
        return x * balance  # half the time of the launch below
    if torch.compiler.is_compiling() or x.requires_grad or type(x) is not torch.Tensor:
        return (x.float() * balance).to(dtype)
    return torch.mul(x, balance, out=torch.empty(x.shape, dtype=dtype, device=x.device))  # one launch


def multiplied(x: QuantizedRows | torch.Tensor, weight: QuantizedRows, bias: Any, **options: Any) -> torch.Tensor:
    """Multiply rows in 8 or 16 bit by an 8-bit weight, with the options of `quantized_linear`."""
    if isinstance(x, torch.Tensor):
        return weight_only_linear(x, weight, bias, **options)
    return quantized_linear(x, weight, bias, **options)
