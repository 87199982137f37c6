"""Linear layers in 8 bit as other packages have them, where they are installed: torchao and comfy-kitchen."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial

import torch
import torch._inductor.config
from torch import nn


RIVALS = ("torchao_int8", "torchao_fp8", "comfy_kitchen")
PEER_ERROR = 0.1  # relative L2; a peer's error is its own, this only tells its layer from something else
COMPILED = ("torchao_int8", "torchao_fp8")  # which are slower than 16 bit without the compiler


def quantize_in_place(rival: str, layer: nn.Linear, *, searches: bool = True) -> None:
    """Have a layer run in 8 bit: weights by output channel, activations by row, each time anew.

    Args: searches: torchao may set the compiler, for the whole process, to what it recommends.
    Raises: ImportError where the package is not installed; what the package raises where it can't run.
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
    """The layers of a model quantised so for a while; their own weights stay in memory meanwhile.

    Of what torchao recommends to the compiler the fusion of an INT8 product with its scales is switched on. The search
    for faster kernels is not: for the two kinds of FLUX's blocks it did not end within three minutes.
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
