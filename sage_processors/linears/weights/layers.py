"""Chooses the linear layers that run in 8 bit: those in repeated blocks, large enough to gain from it."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from sage_kernels.facts.few_rows import WEIGHT_ONLY


# Below this many input or output features a layer stays in 16 bit: quantising costs more than the matmul saves.
MIN_FEATURES = 1024
# Name parts of linear layers that stay in 16 bit: modulation and embedding have few rows and large errors.
_PROTECTED_PARTS = ("embed", "modulation", "adaln", "ada_ln", "time_emb", "temb", "lm_head", "router")
_PROTECTED_CLASSES = ("AdaLayerNorm", "Norm", "Modulation", "Embed", "Router")
# Name parts of those among them whose input has one row per sample, made from the time step and pooled text.
_SAMPLE_PARTS = ("modulation", "adaln", "ada_ln", "time_", "timestep", "temb", "guidance")
_SAMPLE_CLASSES = ("Norm", "Modulation", "Timestep")
# Matrices of fewer rows or columns are tables, such as the six rows of a block's modulation.
_TABLE_ROWS = 16
# Attention pooling beside the time embedding: its layers have many rows, and PyTorch's own attention reads weights.
_POOL_CLASSES = ("AttentionPool",)


class Choice:
    """The format that was chosen for one linear layer.

    Attributes:
        name: of the layer, in the report. module: the layer.
        format: "int8", "fp8", WEIGHT_ONLY (if 16-bit weights are dropped), or "none" for 16 bit.
        why: the reason for 16 bit, as a status in the report; "" without one.
        is_gated: calls of many rows run in 16 bit, too.
    """

    __slots__ = ("name", "module", "format", "why", "is_gated")

    def __init__(self, name, module, format, why, is_gated=False):
        self.name, self.module, self.format, self.why, self.is_gated = name, module, format, why, is_gated


def linear_layers(model: nn.Module):
    """Yield (name, module) of every plain linear layer of a model.

    Layers of adapters are left out, and "base_layer" is left out of the names of layers that an adapter wraps.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or _forward_of(type(module)) is not nn.Linear.forward:
            continue
        parts = name.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        weight: Any = module._parameters.get("weight")
        if type(weight) is not nn.Parameter or "bias" not in module._parameters:  # pruned, or parametrized
            continue
        if type(weight.data) is torch.Tensor and weight.is_floating_point():
            yield ".".join(part for part in parts if part != "base_layer"), module


def layers_of_others(model: nn.Module) -> list[str]:
    """Return the kind of each linear layer that `linear_layers` leaves out, except for those of adapters.

    The kind is the name of its class or, if that has torch's own forward, of the class of its weight.
    """
    plain = {id(module) for _, module in linear_layers(model)}
    found = []
    for name, module in model.named_modules():
        is_adapter = any(part.startswith("lora_") for part in name.split("."))
        if isinstance(module, nn.Linear) and id(module) not in plain and not is_adapter:
            kind: Any = type(module)
            weight = module._parameters.get("weight")
            if _forward_of(kind) is nn.Linear.forward and weight is not None:
                kind = type(weight.data) if type(weight) is nn.Parameter else type(weight)
            found.append(kind.__name__)
    return found


def matrices_of_others(model: nn.Module, min_features: int | None) -> list[tuple[str, int]]:
    """Return (class of its module, number of parameters) of each large 16-bit matrix outside of nn.Linear.

    Such are the experts of a mixture that are one parameter of three dimensions. Only repeated blocks are searched.
    Convolutions, embeddings, routers and the parameters of adapters are left out.
    """
    least = MIN_FEATURES if min_features is None else min_features
    owners, inside = dict(model.named_modules()), repeated_blocks(model)
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    known = (nn.Linear, nn.Embedding, nn.EmbeddingBag, *convolutions, ParametrizationList)
    found = []
    for above, module in owners.items():
        for key, parameter in {} if isinstance(module, known) else module._parameters.items():
            name = f"{above}.{key}" if above else key
            if parameter is None or parameter.ndim < 2 or "lora_" in name or _protection(name, owners, inside):
                continue
            is_large = min(parameter.shape[-2:]) >= _TABLE_ROWS and parameter.numel() >= least**2
            is_16bit = type(parameter.data) is torch.Tensor and parameter.is_floating_point()
            if is_large and is_16bit and parameter.element_size() > 1:
                found.append((_class_name(module), parameter.numel()))
    return found


def _forward_of(cls: Any):
    return getattr(cls, "_sage_base", cls).forward


def choose(
    model: nn.Module, *, label, linears: str, layers=(), min_features=None, drop_weights=False, gated="8bit"
) -> list[Choice]:
    """Choose a format for every linear layer of a model.

    Args:
        label: (name in the model) -> name in the report. Patterns are matched with the latter.
        linears: "none", "int8" or "fp8", for layers that no pattern of `layers` matches.
        layers: (pattern, format) pairs. The first match counts, also for protected and small layers.
        min_features: smaller layers stay in 16 bit; None: MIN_FEATURES.
        drop_weights: layers with one row per sample and at least min_features² weights are WEIGHT_ONLY instead of in
            16 bit, unless `layers` names them.
    """
    least = MIN_FEATURES if min_features is None else min_features
    owners = dict(model.named_modules())
    inside = repeated_blocks(model)
    found = []
    for name, module in linear_layers(model):
        own = label(name)
        format, why = linears, ""
        named = next((value for pattern, value in layers if fnmatchcase(own, pattern)), None)
        if named is not None:
            format, why = named, "kept" if named == "none" else ""
        elif linears != "none":
            why = _protection(name, owners, inside)
            if not why and min(module.in_features, module.out_features) < least:
                why = "small"
            format = "none" if why else linears
            if why and drop_weights and _may_be_weight_only(name, module, model, owners, least):
                format, why = WEIGHT_ONLY, ""
        keeps = gated == "16bit" and named is None and format != "none" and follows_gate(name, owners)
        found.append(Choice(own, module, format, why, keeps))
    return found


def repeated_blocks(model) -> list[str]:
    """Return the name prefixes of the repeated blocks of a model.

    A block is a child of an nn.ModuleList or nn.Sequential with two linear layers or more. Returns
    [""] for a model without such blocks: the whole model counts as one.
    """
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(block) for block in blocks):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for key, child in module.named_children():
                if sum(1 for _ in linear_layers(child)) >= 2:
                    blocks.append(f"{name}.{key}." if name else f"{key}.")
    return blocks or [""]


def follows_gate(name: str, owners: dict) -> bool:
    """Return True for the second layer of a gated feed-forward, such as SwiGLU's, by the layers beside it.

    Value and gate are two layers of the opposite shape, or one of twice as many features. Three of that shape are the
    projections of attention.
    """
    above, _, _ = name.rpartition(".")
    own, owner = owners[name], owners.get(above)
    if owner is None or not above:
        return False
    shapes = [(x.in_features, x.out_features) for x in owner.children() if isinstance(x, nn.Linear) and x is not own]
    whole, double = (own.out_features, own.in_features), (own.out_features, 2 * own.in_features)
    return not is_in_attention(name, owners) and (shapes == [whole] * 2 or shapes == [double])


def is_in_attention(name: str, owners: dict) -> bool:
    """Return True for a layer inside of a module whose class is called Attention. owners: {name: module}.

    Whole decoder layers are called so in some models: JambaAttentionDecoderLayer has its feed-forward layers, too.
    """
    parts = name.split(".")
    above = (owners.get(".".join(parts[:i])) for i in range(1, len(parts)))
    kinds = [_class_name(owner) for owner in above if owner is not None]
    return any("Attention" in kind and not kind.endswith(("Layer", "Block")) for kind in kinds)


def _protection(name: str, owners: dict, inside: list[str]) -> str:
    """Return why a layer stays in 16 bit unless an option names it, or "" if it does not."""
    if not any(name.startswith(block) for block in inside):
        return "outside of the blocks"
    if _is_modulation(name, owners) or _is_called(name, owners, _PROTECTED_PARTS, _PROTECTED_CLASSES):
        return "protected"
    return ""


def _may_be_weight_only(name: str, module, model: nn.Module, owners: dict, least: int) -> bool:
    """Return True for a large layer with one row per sample, unless the model keeps it in fp32."""
    in_fp32 = getattr(model, "_keep_in_fp32_modules", None) or ()
    if module.in_features * module.out_features < least**2 or not set(name.split(".")).isdisjoint(in_fp32):
        return False
    if _is_called(name, owners, (), _POOL_CLASSES):
        return False
    return _is_modulation(name, owners) or _is_called(name, owners, _SAMPLE_PARTS, _SAMPLE_CLASSES)


def _is_modulation(name: str, owners: dict) -> bool:
    """Return True if a layer's place in the model says that it computes a norm's modulation."""
    *above, last = name.split(".")
    if any(part.startswith("norm") or part.endswith("_mod") for part in above):
        return True
    owner = owners.get(".".join(above)) if above else None
    # SiLU of the time embedding, followed by a linear layer
    return isinstance(owner, nn.Sequential) and last.isdigit() and isinstance(owner[0], nn.SiLU)


def _is_called(name: str, owners: dict, words, class_words) -> bool:
    """Return True if a part of a layer's name, or the class of a module around it, contains a given word."""
    parts = name.split(".")
    if any(word in part for part in parts for word in words):
        return True
    above = (owners.get(".".join(parts[:i])) for i in range(1, len(parts)))
    return any(word in _class_name(owner) for owner in above if owner is not None for word in class_words)


def _class_name(module) -> str:
    return getattr(type(module), "_sage_base", type(module)).__name__


# --- parts of a model that torch.compile runs by themselves ---


def compiled_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost compiled modules of a model."""
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            parts = module._modules
            if module._compiled_call_impl is not None or "_orig_mod" in parts:
                yield module
            elif parts:
                left.extend(parts.values())


def modules_in_compiled_parts(model: nn.Module) -> set[int]:
    """Return the ids of all modules that are compiled, by themselves or as a part of another one."""
    return {id(module) for part in compiled_parts(model) for module in part.modules()}
