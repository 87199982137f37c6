"""Plant channel outliers in front of linear layers, which only 8-bit layers notice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn


FACTORS = (8.0, 64.0, 512.0)
_QKV, _ADDED = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_NORMS = ("LayerNorm", "FP32LayerNorm", "LlamaRMSNorm")  # norms that multiply by their weight, not by 1 + weight
# {class of a block: ((norm with a gain of its own, all layers that read it), ...)}
_AFFINE = {
    "BasicTransformerBlock": (
        ("norm1", ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
        ("norm2", ("attn2.to_q",)),
        ("norm3", ("ff.net.0.proj",)),
    ),
    "LlamaDecoderLayer": (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ),
}
# {class of a modulated norm, whose `linear` makes shift and scale: ((its name in the block, place of the shift among
# the chunks of that output, the scale being the next, all layers that read it), ...)}
_MODULATED = {
    "AdaLayerNormZero": (
        ("norm1", 0, _QKV),
        ("norm1", 3, ("ff.net.0.proj",)),
        ("norm1_context", 0, _ADDED),
        ("norm1_context", 3, ("ff_context.net.0.proj",)),
    ),
    "AdaLayerNormZeroSingle": (("norm", 0, (*_QKV, "proj_mlp")),),
}


class Site(NamedTuple):
    """An activation [..., K] = norm(x) · gain + shift, read by linear layers.

    Attributes:
        norm: name of the norm. readers: names of the linear layers.
        scaled: (parameter, first row): its K rows that make gain or shift.
        one_less: the same for parameters to which the model adds one to make the gain.
    """

    norm: str
    readers: tuple[str, ...]
    scaled: tuple[tuple[nn.Parameter, int], ...]
    one_less: tuple[tuple[nn.Parameter, int], ...]


def sites(model: nn.Module) -> list[Site]:
    """Return the activations where outliers can be planted: all their readers are known linear layers."""
    found = []
    for name, block in model.named_modules():
        children = dict(block.named_modules())
        for norm_name, *place, readers in _candidates(block):
            norm = children.get(norm_name)
            layers = [children.get(reader) for reader in readers]
            if norm is None or not all(isinstance(layer, nn.Linear) for layer in layers):
                continue
            parameters = _modulation(norm, *place) if place else _affine(norm)
            if parameters is not None:
                prefix = f"{name}." if name else ""
                found.append(Site(prefix + norm_name, tuple(prefix + reader for reader in readers), *parameters))
    return found


def _candidates(block: Any) -> Iterator[tuple[Any, ...]]:
    kind = type(block).__name__
    stock = kind != "BasicTransformerBlock" or (
        block.norm_type == "layer_norm" and not block.only_cross_attention and block.pos_embed is None
    )
    if stock:
        yield from _AFFINE.get(kind, ())
    for norm_name in ("norm1", "norm1_context", "norm"):
        made_of = type(block._modules.get(norm_name)).__name__
        for row in _MODULATED.get(made_of, ()):
            if row[0] == norm_name and "attn" in block._modules:
                yield row


def _affine(norm: Any) -> tuple[Any, Any] | None:
    own = [norm._parameters.get(name) for name in ("weight", "bias")]
    if type(norm).__name__ not in _NORMS or own[0] is None:
        return None
    return tuple((parameter, 0) for parameter in own if parameter is not None), ()


def _modulation(norm: Any, first: int) -> tuple[Any, Any] | None:
    linear = norm.linear
    if linear.bias is None:  # multiplying 1 + scale needs a bias, which takes a - 1
        return None
    width = linear.out_features // (3 if type(norm).__name__.endswith("Single") else 6)
    shift, scale = first * width, (first + 1) * width
    return ((linear.weight, shift), (linear.bias, shift), (linear.weight, scale)), ((linear.bias, scale),)


@contextmanager
def inject_channel_outliers(
    model: nn.Module, factors: Sequence[float] = FACTORS, *, seed: int = 0
) -> Iterator[list[str]]:
    """Plant outliers in channels between norms and linear layers, without changing the model's function.

    For each norm and each factor, one channel is drawn. It is multiplied by the factor in the norm's gain and shift,
    or in the modulation's 1 + scale and shift, and divided by it in the columns of all layers that read it. Factors
    are powers of two. With a norm's own gain, fp32 and bf16 pictures stay bit identical; with a modulation they change
    slightly, as 1 + scale is rounded again.

    Args:
        model: a stock denoiser or language model with norms that `sites` knows, not in use by another thread. Its
            weights are changed in place.
        factors: powers of two >= 1, no unit; at most as many as the norm has channels.
        seed: of the channels that are drawn.
    Yields: names of the norms. Weights are restored bit for bit on leaving.
    Raises: ValueError (factors, or no known norm).
    """
    if not factors or not all(math.isfinite(a) and a >= 1 and math.frexp(a)[0] == 0.5 for a in factors):
        raise ValueError(f"factors: got {tuple(factors)}, expected powers of two >= 1, so that multiplying is exact")
    places = sites(model)
    if not places:
        raise ValueError(f"model: found no known norm in front of linear layers in {type(model).__name__}")
    modules = dict(model.named_modules())
    layers = [modules[reader] for place in places for reader in place.readers]
    parameters = [layer.weight for layer in layers]
    parameters += [p for place in places for p, _ in (*place.scaled, *place.one_less)]
    before = {parameter: parameter.detach().clone() for parameter in parameters}
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for place in places:
                width = modules[place.readers[0]].in_features
                if len(factors) > width:
                    raise ValueError(f"factors: got {len(factors)}, expected at most {width} channels in {place.norm}")
                channels = torch.randperm(width, generator=generator, device="cpu")[: len(factors)]
                _plant(
                    place,
                    [modules[reader] for reader in place.readers],
                    channels,
                    torch.tensor(factors, dtype=torch.float32, device="cpu"),
                )
        yield [place.norm for place in places]
    finally:
        with torch.no_grad():
            for parameter, values in before.items():
                parameter.copy_(values)


def _plant(place: Site, readers: list[Any], channels: torch.Tensor, factors: torch.Tensor) -> None:
    for parameter, first in (*place.scaled, *place.one_less):
        rows, a = (first + channels).to(parameter.device), factors.to(parameter.device, parameter.dtype)
        parameter[rows] *= a.view(-1, *(1,) * (parameter.dim() - 1))
    for parameter, first in place.one_less:  # a · (1 + s) = 1 + (a · s + a - 1)
        rows = (first + channels).to(parameter.device)
        parameter[rows] += factors.to(parameter.device, parameter.dtype) - 1
    for layer in readers:
        layer.weight[:, channels.to(layer.weight.device)] /= factors.to(layer.weight.device, layer.weight.dtype)
