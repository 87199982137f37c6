"""Which linear layers of a model run in 8 bit: those of its repeated blocks that are large enough to gain."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn


# Below this many input or output features a layer stays in 16 bit: quantising costs more than the matmul saves.
MIN_FEATURES = 1024
# Parts of a qualified name whose linear layers stay in 16 bit: modulation and embedding, few rows and much error.
_PROTECTED_PARTS = ("embed", "modulation", "adaln", "ada_ln", "time_emb", "temb", "lm_head", "router")
_PROTECTED_CLASSES = ("AdaLayerNorm", "Norm", "Modulation", "Embed", "Router")


class Choice:
    """One linear layer: its name, the module, its format ("none": 16 bit) and why it is that."""

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
        weight = module._parameters.get("weight")
        if type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and weight.is_floating_point():
            yield ".".join(part for part in parts if part != "base_layer"), module


def _forward_of(cls: type):
    return getattr(cls, "_sage_base", cls).forward


def choose(model: nn.Module, *, label, linears: str, keep=(), layers=(), min_features=None) -> list[Choice]:
    """What is to happen to every linear layer of a model.

    Args:
        label: name in the model -> name in the report, which patterns are matched with.
        linears: "none", "int8" or "fp8" for the layers that nothing else is said of.
        keep: patterns of layers that stay in 16 bit. layers: (pattern, format) pairs; the first match counts, and
            they hold for protected and small layers too.
        min_features: smaller layers stay in 16 bit; None: MIN_FEATURES.
    """
    least = MIN_FEATURES if min_features is None else min_features
    owners = dict(model.named_modules())
    inside = _repeated(model)
    found = []
    for name, module in linear_layers(model):
        own = label(name)
        format, why = linears, ""
        named = next((value for pattern, value in layers if fnmatchcase(own, pattern)), None)
        if any(fnmatchcase(own, pattern) for pattern in keep):
            format, why = "none", "kept"
        elif named is not None:
            format, why = named, "kept" if named == "none" else ""
        elif linears != "none":
            why = _protection(name, owners, inside)
            if not why and min(module.in_features, module.out_features) < least:
                why = "small"
            format = "none" if why else linears
        found.append(Choice(own, module, format, why))
    return found


def _repeated(model) -> list[str]:
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
    parts = name.split(".")
    if any(part.startswith("norm") or part.endswith("_mod") for part in parts[:-1]):
        return "protected"
    if any(word in part for part in parts for word in _PROTECTED_PARTS):
        return "protected"
    path = [".".join(parts[:i]) for i in range(1, len(parts))]
    for above in path:
        owner = owners.get(above)
        if owner is not None and any(word in _class_name(owner) for word in _PROTECTED_CLASSES):
            return "protected"
    owner = owners.get(path[-1]) if path else None
    if isinstance(owner, nn.Sequential) and parts[-1].isdigit() and isinstance(owner[0], nn.SiLU):
        return "protected"  # modulation is a SiLU of the time embedding, then a linear layer
    return ""


def _class_name(module) -> str:
    return getattr(type(module), "_sage_base", type(module)).__name__
