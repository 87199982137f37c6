"""Which linear layers of a model run in 8 bit: those of its repeated blocks that are large enough to gain."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn


# Below this many input or output features a layer stays in 16 bit: quantising costs more than the matmul saves.
MIN_FEATURES = 1024
# Parts of a qualified name whose linear layers stay in 16 bit: modulation and embedding, few rows and much error.
_PROTECTED_PARTS = ("embed", "modulation", "adaln", "ada_ln", "time_emb", "temb", "lm_head", "router")
_PROTECTED_CLASSES = ("AdaLayerNorm", "Norm", "Modulation", "Embed", "Router")
# Of the layers that stay in 16 bit, those whose input is one row a sample: made of the time and of pooled text.
_SAMPLE_PARTS = ("modulation", "adaln", "ada_ln", "time_", "timestep", "temb", "guidance")
_SAMPLE_CLASSES = ("Norm", "Modulation", "Timestep")
# A pooling attention beside the time's embedding: of many rows, and PyTorch is handed the weights of its layers.
_POOL_CLASSES = ("AttentionPool",)
# Their format where 16-bit weights are dropped: the weight as of "int8", the activation as it is.
WEIGHT_ONLY = "int8_weights"


class Choice:
    """One linear layer: its name, the module, its format and why it is that.

    format: "int8" or "fp8"; WEIGHT_ONLY; "none": 16 bit.
    """

    __slots__ = ("name", "module", "format", "why")

    def __init__(self, name, module, format, why):
        self.name, self.module, self.format, self.why = name, module, format, why


def linear_layers(model: nn.Module):
    """(name, module) of every plain linear layer, without those of adapters. The name is without "base_layer"."""
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
    """What makes each linear layer that `linear_layers` leaves out another one: its class, or that of its weight."""
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


def _forward_of(cls: Any):
    return getattr(cls, "_sage_base", cls).forward


def choose(model: nn.Module, *, label, linears: str, layers=(), min_features=None, drop_weights=False) -> list[Choice]:
    """What is to happen to every linear layer of a model.

    Args:
        label: name in the model -> name in the report, which patterns are matched with.
        linears: "none", "int8" or "fp8" for the layers that nothing else is said of.
        layers: (pattern, format) pairs; the first match counts, for protected and small layers, too.
        min_features: smaller layers stay in 16 bit; None: MIN_FEATURES.
        drop_weights: no layer of one row a sample that has min_features² weights or more stays in 16 bit, unless it
            is named: it is WEIGHT_ONLY.
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
        found.append(Choice(own, module, format, why))
    return found


def repeated_blocks(model) -> list[str]:
    """Prefixes of the names of repeated blocks; [""] for a model without, which is a block itself."""
    blocks: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(block) for block in blocks):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for key, child in module.named_children():
                if sum(1 for _ in linear_layers(child)) >= 2:
                    blocks.append(f"{name}.{key}." if name else f"{key}.")
    return blocks or [""]


def _protection(name: str, owners: dict, inside: list[str]) -> str:
    """Why a layer stays in 16 bit unless it is named, or ""."""
    if not any(name.startswith(block) for block in inside):
        return "outside of the blocks"
    if _is_modulation(name, owners) or _is_called(name, owners, _PROTECTED_PARTS, _PROTECTED_CLASSES):
        return "protected"
    return ""


def _may_be_weight_only(name: str, module, model: nn.Module, owners: dict, least: int) -> bool:
    """Whether a layer is large, of one row a sample, and not one that the model wants in fp32."""
    in_fp32 = getattr(model, "_keep_in_fp32_modules", None) or ()
    if module.in_features * module.out_features < least**2 or not set(name.split(".")).isdisjoint(in_fp32):
        return False
    if _is_called(name, owners, (), _POOL_CLASSES):
        return False
    return _is_modulation(name, owners) or _is_called(name, owners, _SAMPLE_PARTS, _SAMPLE_CLASSES)


def _is_modulation(name: str, owners: dict) -> bool:
    """Whether a layer modulates what a norm returns, by its place."""
    *above, last = name.split(".")
    if any(part.startswith("norm") or part.endswith("_mod") for part in above):
        return True
    owner = owners.get(".".join(above)) if above else None
    # a SiLU of the time embedding, then a linear layer
    return isinstance(owner, nn.Sequential) and last.isdigit() and isinstance(owner[0], nn.SiLU)


def _is_called(name: str, owners: dict, words, class_words) -> bool:
    """Whether a part of a layer's name has one of the words, or the class of a module that it is in."""
    parts = name.split(".")
    if any(word in part for part in parts for word in words):
        return True
    above = (owners.get(".".join(parts[:i])) for i in range(1, len(parts)))
    return any(word in _class_name(owner) for owner in above if owner is not None for word in class_words)


def _class_name(module) -> str:
    return getattr(type(module), "_sage_base", type(module)).__name__
