"""Find denoisers of a pipeline, attention modules of a model, and the head layout of attention calls.

The tensors of a scale state must exist before torch.compile sees the model. So the number of heads and the head_dim of
each attention call are guessed from its module. A wrong guess is harmless: the call notices it, takes its scales from
its inputs, and the report names the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn


# Components that run once per image, or that INT8 attention does not suit (VAEs have a head_dim of 512).
_NEVER = ("vae", "vqvae", "vqgan", "movq", "text_encoder", "image_encoder", "safety_checker")
_DENOISER_NAMES = ("unet", "transformer", "controlnet", "prior", "decoder", "dit")

_HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads")
_KV_HEADS = ("kv_heads", "num_kv_heads", "num_key_value_heads", "n_kv_heads")
_HEAD_DIM = ("head_dim", "dim_head", "attention_head_dim", "head_size")
_QUERY = ("to_q", "to_query", "q_proj", "q", "wq")
_KEY = ("to_k", "to_key", "k_proj", "k", "wk")
_PROJECTIONS = ("encoder_hid_proj", "image_proj")  # of IP-Adapters' images: in UNets and FLUX; in SD3


def _number(module, names) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _width(module, names) -> int | None:
    """Return the output width of the first of these projections; None if there is none."""
    for name in names:
        layer = getattr(module, name, None)
        layer = layer[0] if isinstance(layer, nn.Sequential) and len(layer) else layer
        width = getattr(layer, "out_features", None)
        if isinstance(width, int):
            return width
    return None


def _mentions(code, word: str) -> bool:
    flat = [x for c in code.co_consts for x in (c if isinstance(c, tuple) else (c,))]
    return word in flat or word in code.co_varnames or word in code.co_names


def discover_sites(module, sage) -> list[tuple[int, int] | None]:
    """Return (kv_heads, head_dim) of each attention call in a module's Sage processor; None if unknown.

    After a first run these are the values that the calls really had.
    """
    heads, head_dim = _number(module, _HEADS), _number(module, _HEAD_DIM)
    query, key = _width(module, _QUERY), _width(module, _KEY)
    if heads is None and head_dim and query:
        heads = query // head_dim
    if head_dim is None and heads:
        width = query or _number(module, ("inner_dim", "embed_dim", "dim"))
        head_dim = width // heads if width and width % heads == 0 else None
    kv_heads = heads
    # most processors repeat the key/value heads before the call; the others pass enable_gqa
    if heads and head_dim and _mentions(type(sage)._sage_base.__call__.__code__, "enable_gqa"):
        kv_heads = _number(module, _KV_HEADS) or (key // head_dim if key and key % head_dim == 0 else heads)
    guess = (kv_heads, head_dim) if kv_heads and head_dim else None
    return [
        (site.seen_kv_heads, site.seen_head_dim) if site.seen_kv_heads and site.seen_head_dim else guess
        for site in sage._sage.sites
    ]


def attention_modules(model):
    """Yield (name, module) for every module of a model that calls an attention processor."""
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if isinstance(getattr(type(processor), "__call__", None), FunctionType):  # noqa: B004 (not any callable)
            yield name, module


def put_processor(module, processor) -> None:
    """Set `module.processor`, also if an nn.Module replaces a plain object or the other way round."""
    module._modules.pop("processor", None)
    module.__dict__.pop("processor", None)
    module.processor = processor


def unwrap(target):
    """Return the model inside `torch.compile(model)` or DistributedDataParallel, or any other object."""
    inner = getattr(target, "_orig_mod", target)
    return inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner


def is_pipeline(target) -> bool:
    """True for an object with a dict of components, as diffusers' pipelines have."""
    return not isinstance(target, nn.Module) and isinstance(getattr(target, "components", None), dict)


def denoisers(pipe) -> dict[str, nn.Module]:
    """Return the denoising models of a pipeline by component name; none for None."""
    found: dict[str, nn.Module] = {}
    for name, component in ({} if pipe is None else pipe.components).items():
        model = unwrap(component)
        home = model.__class__.__module__
        if not isinstance(model, nn.Module) or name.startswith(_NEVER) or ".autoencoders." in home:
            continue
        inside = ("models.transformers.", "models.unets.", "models.controlnets.")
        if any(word in name for word in _DENOISER_NAMES) or any(part in home for part in inside):
            if any(True for _ in attention_modules(model)) and not any(model is other for other in found.values()):
                found[name] = model
    return found


def input_device(values) -> torch.device | None:
    """Return the device of the first input tensor with two or more dimensions; None without one.

    The model's own device is no guide: offloading moves a model inside its forward.
    """
    for value in values:
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value.device
    return None


def device_of(model) -> torch.device:
    """Return the device of a model's parameters; the CPU without any, or on the meta device."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None or parameter.device.type == "meta" else parameter.device


def signs_of(model: Any, modules: Iterable[Any]) -> tuple[Any, ...]:
    """Return values that change when diffusers puts other processors into a model.

    diffusers does so for IP-Adapters and fused projections, and tells nobody. But it leaves a sign: another image
    projection on the model, or a flag on its attention modules. A processor set by the user leaves no sign, and stays.

    Args: modules: the attention modules to look at.
    """
    projections = (getattr(model, name, None) for name in _PROJECTIONS)
    fused = (getattr(module, "fused_projections", False) for module in modules)
    # weak references, so that an unloaded adapter's memory is freed
    return (*(None if found is None else weakref.ref(found) for found in projections), *fused)
