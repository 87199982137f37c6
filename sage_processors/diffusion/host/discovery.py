"""Find what there is to swap: denoisers of a pipeline, attention modules of a model, heads of an attention call.

The tensors of a scale state must exist before torch.compile sees the model, so the layout of every attention call is
read from its module. A wrong guess is harmless: the call notices it and scales from its inputs, and the report names
the layer.
"""

from __future__ import annotations

from types import FunctionType

import torch
from torch import nn


# Components that run once per image, or in which INT8 attention has no place (head_dim 512 in VAEs).
_NEVER = ("vae", "vqvae", "vqgan", "movq", "text_encoder", "image_encoder", "safety_checker")
_DENOISER_NAMES = ("unet", "transformer", "controlnet", "prior", "decoder", "dit")

_HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads")
_KV_HEADS = ("kv_heads", "num_kv_heads", "num_key_value_heads", "n_kv_heads")
_HEAD_DIM = ("head_dim", "dim_head", "attention_head_dim", "head_size")
_QUERY = ("to_q", "to_query", "q_proj", "q", "wq")
_KEY = ("to_k", "to_key", "k_proj", "k", "wk")


def _number(module, names) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _width(module, names) -> int | None:
    """Output width of the first projection found."""
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
    """(kv_heads, head_dim) of every attention call of a module with Sage processor `sage`; None where it can't be
    told.

    After a first run, what the calls really had comes first.
    """
    heads, head_dim = _number(module, _HEADS), _number(module, _HEAD_DIM)
    query, key = _width(module, _QUERY), _width(module, _KEY)
    if heads is None and head_dim and query:
        heads = query // head_dim
    if head_dim is None and heads:
        width = query or _number(module, ("inner_dim", "embed_dim", "dim"))
        head_dim = width // heads if width and width % heads == 0 else None
    kv_heads = heads
    # most processors repeat the key/value heads before the op; those that don't say enable_gqa
    if heads and head_dim and _mentions(type(sage)._sage_base.__call__.__code__, "enable_gqa"):
        kv_heads = _number(module, _KV_HEADS) or (key // head_dim if key and key % head_dim == 0 else heads)
    guess = (kv_heads, head_dim) if kv_heads and head_dim else None
    return [
        (site.seen_kv_heads, site.seen_head_dim) if site.seen_kv_heads and site.seen_head_dim else guess
        for site in sage._sage_sites
    ]


def attention_modules(model):
    """(name, module) of every module of `model` that calls an attention processor."""
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if isinstance(getattr(type(processor), "__call__", None), FunctionType):  # noqa: B004 (not any callable)
            yield name, module


def put_processor(module, processor) -> None:
    """module.processor = processor, between plain objects and nn.Module processors in both directions."""
    module._modules.pop("processor", None)
    module.__dict__.pop("processor", None)
    module.processor = processor


def unwrap(target):
    """The model inside of `torch.compile(model)`."""
    return getattr(target, "_orig_mod", target)


def is_pipeline(target) -> bool:
    """Whether `target` has components, as diffusers' pipelines do."""
    return not isinstance(target, nn.Module) and isinstance(getattr(target, "components", None), dict)


def denoisers(pipe) -> dict[str, nn.Module]:
    """The denoising models of a pipeline, by component name."""
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
    """Where the first real input lives. Not the model's device: offloading moves a model inside its forward."""
    for value in values:
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            return value.device
    return None


def device_of(model) -> torch.device:
    """Where the parameters live; the CPU while they are nowhere (meta)."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None or parameter.device.type == "meta" else parameter.device
