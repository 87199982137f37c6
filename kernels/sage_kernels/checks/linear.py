"""Input checks of the ops of 8-bit linear layers."""

from __future__ import annotations

import math

import torch

from ..facts.numerics import CODE_TYPES
from ..facts.recipe import GATED
from .tensors import DTYPES, check_tensor


NORMS = ("none", "layer", "rms")
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", *GATED)


def check_activation(x, format, norm, weight, bias, eps, gain, shift, balance, beside=None, *, prefix="") -> None:
    """Raise unless `quantize_activation` can do this call.

    prefix: put before "weight" and "bias" in messages, where an op calls the norm's by other names.
    """
    _check_rows(x)
    columns = x.shape[-1]
    if beside is not None:
        check_tensor("beside", beside, (x.dtype,), x.device)
        if beside.shape[:-1] != x.shape[:-1] or beside.dim() != x.dim() or beside.shape[-1] == 0:
            expected = f"({', '.join([*map(str, x.shape[:-1]), 'K2'])}) with K2 >= 1"
            raise ValueError(f"beside: got shape {tuple(beside.shape)}, expected {expected}")
        columns += beside.shape[-1]
    shape = torch.Size((*x.shape[:-1], columns))
    _check_choice("format", format, CODE_TYPES)
    _check_choice("norm", norm, NORMS)
    if norm == "none" and not (weight is None and bias is None):
        names = f"{prefix}weight, {prefix}bias"
        raise ValueError(f'{names}: got them with norm="none", expected None; they are the norm\'s own')
    if not (isinstance(eps, (int, float)) and math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: got {eps!r}, expected a finite number >= 0")
    for name, vector in ((f"{prefix}weight", weight), (f"{prefix}bias", bias), ("balance", balance)):
        if vector is not None:
            check_tensor(name, vector, DTYPES, x.device)
            if vector.shape != shape[-1:]:
                raise ValueError(f"{name}: got shape {tuple(vector.shape)}, expected {tuple(shape[-1:])}")
    for name, tensor in (("gain", gain), ("shift", shift)):
        if tensor is not None:
            check_tensor(name, tensor, DTYPES, x.device)
            _check_broadcasts(name, tensor, shape)
    own = {f"{prefix}weight": weight, f"{prefix}bias": bias}
    _refuse_gradients(x=x, **own, gain=gain, shift=shift, balance=balance, beside=beside)


def check_weight(weight, format, balance, is_gated: bool) -> None:
    """Raise unless `quantize_weight` can do this call. Reads the weight: syncs on a GPU."""
    check_tensor("weight", weight, DTYPES)
    _check_choice("format", format, CODE_TYPES)
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected [N, K] with N, K >= 1")
    if weight.is_meta:
        raise ValueError("weight: got one on the meta device, expected its numbers; load the weights first")
    if is_gated and weight.shape[0] % 2:
        raise ValueError(f"weight: got {weight.shape[0]} rows, expected an even number for a gated activation")
    if balance is not None:
        check_tensor("balance", balance, DTYPES, weight.device)
        if balance.shape != weight.shape[1:]:
            raise ValueError(f"balance: got shape {tuple(balance.shape)}, expected {tuple(weight.shape[1:])}")
        if not bool(((balance > 0) & balance.isfinite()).all()):
            raise ValueError("balance: got numbers that are not positive and finite, expected those alone")
    if not bool(weight.isfinite().all()):
        raise ValueError("weight: got NaN or inf in it, expected finite numbers")


def check_linear(x, weight, bias, activation, gate, residual, dtype) -> None:
    """Raise unless `quantized_linear` can do this call."""
    for name, rows in (("x", x), ("weight", weight)):
        check_quantized(name, rows, tuple(CODE_TYPES.values()))
    (codes, _), (w_codes, _) = x, weight
    if w_codes.dim() != 2 or not 1 <= codes.dim() <= 4 or codes.shape[-1] != w_codes.shape[1]:
        got = f"{tuple(codes.shape)} and {tuple(w_codes.shape)}"
        raise ValueError(f"x.codes, weight.codes: got shapes {got}, expected [..., K] and [N, K]")
    if codes.dtype != w_codes.dtype:
        raise TypeError(f"weight.codes: got {w_codes.dtype}, expected {codes.dtype} as x.codes")
    if codes.device != w_codes.device:
        raise ValueError(f"weight.codes: got device {w_codes.device}, expected {codes.device} as x.codes")
    _check_finish(codes, w_codes.shape[0], bias, activation, gate, residual, dtype)


def _check_finish(x, columns: int, bias, activation, gate, residual, dtype) -> None:
    """Check the activation, gate and residual behind a product of rows x [..., K] with a weight."""
    _check_choice("activation", activation, ACTIVATIONS)
    if dtype not in DTYPES:
        raise TypeError(f"dtype: got {dtype}, expected one of {DTYPES}")
    if activation in GATED and columns % 2:
        raise ValueError(f"weight.codes: got {columns} rows, expected an even number for {activation!r}")
    shape = (*x.shape[:-1], columns // 2 if activation in GATED else columns)
    if bias is not None:
        check_tensor("bias", bias, DTYPES, x.device)
        if bias.shape != (columns,):
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected {(columns,)}")
    if gate is not None:
        check_tensor("gate", gate, DTYPES, x.device)
        _check_broadcasts("gate", gate, shape)
    if residual is not None:
        check_tensor("residual", residual, DTYPES, x.device)
        if residual.shape != shape:
            raise ValueError(f"residual: got shape {tuple(residual.shape)}, expected {tuple(shape)}")
    _refuse_gradients(bias=bias, gate=gate, residual=residual)


def check_weight_only(x, weight, bias, activation, gate, residual, dtype) -> None:
    """Raise unless `weight_only_linear` can do this call."""
    _check_rows(x)
    check_quantized("weight", weight, tuple(CODE_TYPES.values()))
    codes = weight[0]
    if codes.dim() != 2 or x.shape[-1] != codes.shape[1]:
        got = f"{tuple(x.shape)} and {tuple(codes.shape)}"
        raise ValueError(f"x, weight.codes: got shapes {got}, expected [..., K] and [N, K]")
    if codes.device != x.device:
        raise ValueError(f"weight.codes: got device {codes.device}, expected {x.device} as x")
    _check_finish(x, codes.shape[0], bias, activation, gate, residual, dtype)
    _refuse_gradients(x=x)


def _check_rows(x) -> None:
    check_tensor("x", x, DTYPES)
    if not 1 <= x.dim() <= 4:
        raise ValueError(f"x: got {x.dim()} dimensions, expected 1 to 4")
    if x.shape[-1] == 0:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected [..., K] with K >= 1")


def check_quantized(name: str, rows, dtypes) -> None:
    """Raise unless rows is (codes, scale) with codes of one of the dtypes and one fp32 scale a row."""
    if not (isinstance(rows, tuple) and len(rows) == 2):
        raise TypeError(f"{name}: got {type(rows).__name__}, expected QuantizedRows (codes, scale)")
    codes, scale = rows
    check_tensor(f"{name}.codes", codes, dtypes)
    check_tensor(f"{name}.scale", scale, (torch.float32,), codes.device)
    if scale.shape != codes.shape[:-1]:
        raise ValueError(f"{name}.scale: got shape {tuple(scale.shape)}, expected {tuple(codes.shape[:-1])}")


def _check_choice(name: str, value, choices) -> None:
    if value not in tuple(choices):
        raise ValueError(f"{name}: got {value!r}, expected one of {tuple(choices)}")


def _check_broadcasts(name: str, x, shape) -> None:
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    if x.dim() > len(shape) or any(mine not in (1, size) for mine, size in pairs):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected one that broadcasts to {tuple(shape)}")


def _refuse_gradients(**tensors) -> None:
    """Raise for a tensor with requires_grad, except for weights and biases that are parameters."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if (
            x is not None
            and x.requires_grad
            and not (isinstance(x, torch.nn.Parameter) and name.endswith(("weight", "bias")))
        ):
            raise NotImplementedError(
                f"{name}: got a tensor that requires a gradient, expected none; 8-bit linear layers have no backward: "
                "call under torch.no_grad(), or detach()"
            )
