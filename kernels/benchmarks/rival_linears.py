"""8-bit linear layers of other packages, if they are installed: torchao and comfy-kitchen."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial

import torch
import torch._inductor.config
from torch import nn


RIVALS = ("torchao_int8", "torchao_fp8", "comfy_kitchen")
PEER_ERROR = 0.1  # relative L2: a loose bound, which only detects a result of something else
COMPILED = ("torchao_int8", "torchao_fp8")  # to be compiled: without the compiler they are slower than 16 bit


def quantize_in_place(rival: str, layer: nn.Linear, *, searches: bool = True) -> None:
    """Make a layer run in 8 bit: weight scales per output channel, activation scales per row and call.

    Args: searches: let torchao change the compiler's settings, for the whole process, to those it recommends.
    Raises: ImportError if the package is not installed; any error of a package that can't run here.
    """
    if rival == "comfy_kitchen":
        import comfy_kitchen

        codes, scale = comfy_kitchen.quantize_int8_rowwise(layer.weight)
        bias, dtype = layer.bias, layer.weight.dtype
        layer.forward = lambda x: comfy_kitchen.int8_linear(x, codes, scale, bias, out_dtype=dtype)
        return
    import torchao.quantization as ao

    make = {
        "torchao_int8": ao.Int8DynamicActivationInt8WeightConfig,
        "torchao_fp8": partial(ao.Float8DynamicActivationFloat8WeightConfig, granularity=ao.PerRow()),
    }[rival]
    holder = nn.Sequential(layer)
    ao.quantize_(holder, make(set_inductor_config=searches))
    if holder[0] is not layer:
        raise RuntimeError(f"{rival}: got a {type(holder[0]).__name__} in its place, expected the layer itself")


@contextmanager
def rival_linears(rival: str, layers: Iterable[nn.Linear]):
    """Quantise the layers of a model inside of the with-statement. Their own weights stay in memory.

    Of the compiler settings that torchao recommends, the fusion of an INT8 product with its scales is on. The search
    for faster kernels is off: for FLUX's two kinds of blocks it did not end within three minutes.
    """
    layers = list(layers)
    before = [(dict(layer.__dict__), dict(layer._parameters)) for layer in layers]
    try:
        with torch.no_grad():
            for layer in layers:
                quantize_in_place(rival, layer, searches=False)
        with torch._inductor.config.patch(force_fuse_int_mm_with_mul=True):
            yield
    finally:
        for layer, (attributes, parameters) in zip(layers, before, strict=True):
            layer.__dict__.clear()
            layer.__dict__.update(attributes)
            layer._parameters.clear()
            layer._parameters.update(parameters)
