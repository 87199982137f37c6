"""Reference of 8-bit linear layers in plain PyTorch: rounds where the kernels round."""

from __future__ import annotations

import torch

from ..facts.numerics import divide, round_to_e4m3
from ..facts.recipe import AMAX_FLOOR, E4M3_MAX, GATED, INT8_MAX, SHRINKS


# Constants of GELU's tanh form, x · sigmoid(2 · sqrt(2 / pi) · (x + 0.044715 x³))
_SQRT_2_OVER_PI, _CUBIC = 0.7978845608028654, 0.044715


def ref_quantize_activation(x, format, norm, weight, bias, eps, gain, shift, balance, beside=None):
    """Compute `sage_kernels.quantize_activation`: codes [..., K] and scale fp32 [...] of x [..., K]."""
    x = x if beside is None else torch.cat([x, beside], -1)
    x = normalized(x.float(), norm, weight, bias, eps)
    if gain is not None:
        x = x * gain.float()
    if shift is not None:
        x = x + shift.float()
    if balance is not None:
        x = x * balance.float()
    return quantize(x, format)


def normalized(x, norm: str, weight, bias, eps: float):
    """Apply LayerNorm ("layer"), RMSNorm ("rms") or no norm ("none") to x fp32 [..., K], in fp32."""
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    if norm != "none":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        x = x * weight.float()
    return x if bias is None else x + bias.float()


def quantize(x, format: str, amax=None):
    """Quantise the rows of x fp32 [..., K] to codes and scale.

    amax: fp32 [...] in place of the rows' own; larger elements are then clipped. A row with NaN or inf has the scale
        NaN, and so has everything computed from the row.
    """
    largest = E4M3_MAX if format == "fp8" else float(INT8_MAX)
    finite = torch.where(x.isfinite(), x, 0.0)
    amax = (finite.abs().amax(-1) if amax is None else amax).clamp_min(AMAX_FLOOR)
    lost = (x * 0.0).sum(-1)
    y = finite * divide(largest, amax)[..., None]
    y = round_to_e4m3(y).to(torch.float8_e4m3fn) if format == "fp8" else torch.round(y).clamp(-127, 127).to(torch.int8)
    return y, amax / largest + lost


def ref_quantize_weight(weight, format: str, balance=None):
    """Compute `sage_kernels.quantize_weight` for rows [N, K]: codes [N, K] and scale fp32 [N]."""
    w = weight.float() if balance is None else weight.float() / balance.float()
    if format == "fp8":  # relative precision does not depend on the range
        return quantize(w, format)
    amax = w.abs().amax(-1)
    best, least = amax, torch.full_like(amax, torch.inf, dtype=torch.float64)
    for shrink in SHRINKS:
        codes, scale = quantize(w, format, amax * shrink)
        error = (codes.float() * scale[:, None] - w).square().sum(-1, dtype=torch.float64)
        best = torch.where(error < least, amax * shrink, best)
        least = torch.minimum(error, least)
    return quantize(w, format, best)


def ref_quantized_linear(codes, scale, weight, weight_scale, bias, activation, gate, residual, dtype):
    """Compute `sage_kernels.quantized_linear`: [..., N].

    codes [..., K], scale [...], weight [N, K] and weight_scale [N].
    """
    # INT8 products of up to 2^24 / 127² elements are exact in fp32, and longer ones in fp64
    sums = (codes.double() @ weight.double().mT).float()
    return _finished(sums * scale[..., None] * weight_scale, bias, activation, gate, residual, dtype)


def ref_weight_only_linear(x, weight, weight_scale, bias, activation, gate, residual, dtype, batch_invariant=False):
    """Compute `sage_kernels.weight_only_linear`: [..., N] of x [..., K], codes [N, K] and scale [N]."""
    sums = (x.double() @ weight.double().mT).float()
    return _finished(sums * weight_scale, bias, activation, gate, residual, dtype)


def _finished(y, bias, activation: str, gate, residual, dtype):
    """Compute residual + gate · activation(y + bias) in fp32, rounded once to dtype."""
    if bias is not None:
        y = y + bias.float()
    y = activated(y, activation)
    if gate is not None:
        y = y * gate.float()
    if residual is not None:
        y = residual.float() + y
    return y.to(dtype).contiguous()  # it may have a residual's strides


def activated(y, activation: str):
    """Apply an activation function to y fp32 [..., N]. Gated ones take pairs of columns: [..., N / 2]."""
    if activation in GATED:
        value, gate = y.unflatten(-1, (-1, 2)).unbind(-1)
        return value * activated(gate, GATED[activation])
    if activation == "gelu":
        return torch.nn.functional.gelu(y)
    if activation == "gelu_tanh":
        return y * torch.sigmoid(y * (1 + _CUBIC * y * y) * (2 * _SQRT_2_OVER_PI))
    return torch.nn.functional.silu(y) if activation == "silu" else y
