"""A feed-forward of FLUX, residual + gate · down(GELU(up(x))), with each package's own fusions."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from rival_linears import PEER_ERROR
from torch.nn import functional as F

from sage_kernels import quantize_activation, quantize_weight, quantized_linear


MAX_ERROR = {"int8": 0.0135, "fp8": 0.042}  # relative L2 on N(0, 1), of one layer or of two with a residual


class Layers(NamedTuple):
    """Tensors of a feed-forward.

    up [wide, narrow], down [narrow, wide], their biases, gate [narrow], residual [rows, narrow].
    """

    up: torch.Tensor
    up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor
    gate: torch.Tensor
    residual: torch.Tensor


def make(rows: int, narrow: int, wide: int, device, dtype=torch.bfloat16) -> tuple[torch.Tensor, Layers]:
    """Return an input [rows, narrow] and layers, all of normal random numbers."""

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, device=device).mul(scale).to(dtype)

    layers = Layers(
        normal(wide, narrow, scale=narrow**-0.5), normal(wide), normal(narrow, wide, scale=wide**-0.5), normal(narrow),
        normal(narrow), normal(rows, narrow),
    )  # fmt: skip
    return normal(rows, narrow), layers


def in_16_bit(x: torch.Tensor, layers: Layers) -> torch.Tensor:
    hidden = F.gelu(F.linear(x, layers.up, layers.up_bias), approximate="tanh")
    return torch.addcmul(layers.residual, layers.gate, F.linear(hidden, layers.down, layers.down_bias))


def exact(x: torch.Tensor, layers: Layers) -> torch.Tensor:
    """Return the result in fp64."""
    return in_16_bit(x.double(), Layers(*(part.double() for part in layers)))


def ours(layers: Layers, format: str):
    up, down = (quantize_weight(weight, format=format) for weight in (layers.up, layers.down))

    def run(x):
        hidden = quantized_linear(
            quantize_activation(x, format=format), up, layers.up_bias, activation="gelu_tanh", dtype=x.dtype
        )
        rows = quantize_activation(hidden, format=format)
        return quantized_linear(
            rows, down, layers.down_bias, gate=layers.gate, residual=layers.residual, dtype=x.dtype
        )

    return run


def of_comfy_kitchen(layers: Layers, rotated: bool):
    """Return comfy_kitchen's feed-forward, with gate and residual in its matmul.

    GELU is the activation of the second layer's input.
    rotated: with rotated weights, the form in which its quantisation kernel can fuse GELU.
    """
    import comfy_kitchen
    from comfy_kitchen.tensor import TensorWiseINT8Layout

    up, up_scale = comfy_kitchen.quantize_int8_rowwise(layers.up)
    down, made = TensorWiseINT8Layout.quantize(layers.down, is_weight=True, per_channel=True, convrot=rotated)

    def run(x):
        hidden = comfy_kitchen.int8_linear(x, up, up_scale, layers.up_bias, out_dtype=x.dtype)
        return comfy_kitchen.int8_linear(
            hidden, down, made.scale, layers.down_bias, out_dtype=x.dtype, convrot=rotated, input_act="gelu_tanh",
            residual=layers.residual, residual_scale=layers.gate,
        )  # fmt: skip

    return run


def providers(layers: Layers):
    """Yield (provider, recipe, largest relative L2 allowed, function of x)."""
    yield "torch_bf16", "", 0.01, lambda x: in_16_bit(x, layers)
    for format, error in MAX_ERROR.items():
        yield "sage_kernels", f"linears_{format}", error, ours(layers, format)
    with contextlib.suppress(ImportError):
        yield "comfy_kitchen", "", PEER_ERROR, of_comfy_kitchen(layers, False)
        yield "comfy_kitchen_rotated", "", PEER_ERROR, of_comfy_kitchen(layers, True)
