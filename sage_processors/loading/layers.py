"""The linear layers of a model while its files are read, in 16 or in 8 bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from sage_kernels import QuantizedRows
from sage_kernels.facts.few_rows import WEIGHT_ONLY
from sage_kernels.facts.numerics import CODE_TYPES

from ..linears.balance import MOST, weight_on_hand
from ..linears.swap import LinearSwap
from ..linears.swap_checks import checked_options
from ..linears.weights.layers import choose, linear_layers
from .config import Gated, SageConfig


CODES = {**CODE_TYPES, WEIGHT_ONLY: torch.int8}
# Largest weight that is believed. Numbers of 16-bit weights end at 2^16, and a balance divides by 2^-24 at the least.
LARGEST = 2.0**40


class QuantizedHere:
    """Linear layers with 16-bit weights that arrive one by one, quantised once their neighbours are there.

    Args: model: on the meta device; its layers are swapped. config: SageConfig of this model. gated: config's, if it
        has none.
    Raises: ValueError for a model without a layer to quantise, or a pattern that matches none.
    """

    def __init__(self, model: nn.Module, config: SageConfig, gated: Gated = "8bit") -> None:
        self.config = config
        gated = config.gated or gated
        options: dict[str, Any] = {
            "linears": config.format,
            "layers": config.layers,
            "min_features": config.min_features,
            "gated": gated,
        }
        names = [name for name, _ in linear_layers(model)]
        checked_options(names, config.format, config.layers, config.min_features, "fallback", True)
        found = choose(model, label=str, drop_weights=True, **options)
        if all(choice.format == "none" for choice in found):
            reasons = Counter(choice.why or "kept" for choice in found)
            why = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            raise ValueError(
                f"model: got {type(model).__name__}, in which {config} would quantise nothing (linear layers: "
                f"{why or 'none'}), expected at least one; lower min_features, name layers in `layers`, or leave "
                "quantization_config out"
            )
        config.gated = gated
        self.swap = LinearSwap(model, drop_weights=True, **options)
        self.swap.drop()  # swaps layers with one row per sample too; weights on the meta device are made later
        self.swap._shared.saving = "placeholder"
        self._waiting = {f"{state.label}.weight": (module, state) for module, state in self.swap._states.values()}

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Take a 16-bit weight [N, K] on the device where the layer will be. `name` is its parameter's."""
        module, state = self._waiting[name]
        module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        units = [[module]] if state.neighbours is None else state.neighbours.units
        group = [each for unit in units for each in unit]
        if all(each._sage.dropped or weight_on_hand(each) is not None for each in group):
            self._quantise(group)

    def _quantise(self, modules: list[Any]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for module in modules:
                self.swap._prepare_one(module, module._sage)
                module._parameters["weight"]._is_hf_initialized = True  # transformers initialises no placeholder
                module._sage.storage.be_persistent(True)  # it empties all other buffers when the files are read

    def finish(self) -> LinearSwap:
        """Quantise the layers that still wait for a neighbour.

        Raises: ValueError for layers without a weight."""
        left = [module for module, state in self._waiting.values() if not state.dropped]
        missing = [module._sage.label for module in left if module._parameters["weight"].is_meta]
        if missing:
            raise ValueError(
                f"files: got no weight of {missing[0]!r} ({len(missing)} in all), expected it in one file"
            )
        self._quantise(left)
        for state in self.swap.states():
            state.storage.be_persistent(False)
        return noted(self.swap, self.config)


class ReadyMade:
    """Linear layers that a folder has in 8 bit. Their tensors are ordinary parameters until all are there.

    Args: model: on the meta device. config: SageConfig of the folder, whose layers get their names in this model.
    Attributes: absent: layers of the folder that a model of another class lacks, such as lm_head.
    Raises: ValueError for layers that the model does not have.
    """

    def __init__(self, model: nn.Module, config: SageConfig) -> None:
        self.model, self.config = model, config
        known = dict(linear_layers(model))
        self.absent = _rename_to(model, config, known)
        self._layers: dict[str, tuple[Any, torch.dtype]] = {}
        self.expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}  # of the tensors in the files
        for name, format in config.modules.items():
            if name not in known:
                raise ValueError(
                    f"quantization_config: got 8-bit layer {name[:200]!r}, expected a linear layer of "
                    f"{type(model).__name__}; save the model again"
                )
            module: Any = known[name]
            self._layers[name] = (module, module.weight.dtype)
            rows, columns = module.out_features, module.in_features
            tensors = {"weight": (CODES[format], (1, rows, columns)), "weight_scale": (torch.float32, (rows,))}
            if name in config.balanced:
                tensors["weight_balance"] = (torch.float32, (columns,))
            for key, (dtype, shape) in tensors.items():
                self.expected[f"{name}.{key}"] = (dtype, shape)
                empty = torch.empty(shape, dtype=dtype, device="meta")
                module.register_parameter(key, nn.Parameter(empty, requires_grad=False))

    def finish(self) -> LinearSwap:
        """Swap the layers. Raises: ValueError for codes, scales or balances that no weight has."""
        ready: dict[str, Any] = {}
        for name, (module, _) in self._layers.items():
            codes, scale = module._parameters["weight"].detach(), module._parameters["weight_scale"].detach()
            balance = module._parameters.get("weight_balance")
            ready[name] = (QuantizedRows(codes[0], scale), None if balance is None else balance.detach())
            _check_values(name, *ready[name])
        for module, dtype in self._layers.values():
            shape = (module.out_features, module.in_features)
            module._parameters["weight"] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), False)
            for key in ("weight_scale", "weight_balance"):
                module._parameters.pop(key, None)
        del codes, scale, balance
        formats = tuple(self.config.modules.items())
        swap = LinearSwap(self.model, linears="none", layers=formats, ready=ready)
        swap.drop_weights = True
        if self.config.gated == "16bit":
            options: dict[str, Any] = {"linears": self.config.format, "layers": self.config.layers}
            chosen = choose(self.model, label=str, min_features=self.config.min_features, gated="16bit", **options)
            gated = {choice.name for choice in chosen if choice.is_gated}
            for state in swap.states():
                state.is_gated = state.label in gated
        return noted(swap, self.config)


def _rename_to(model: Any, config: SageConfig, known: Any) -> set[str]:
    """Give layers of a folder their names in a model of another class, and leave out those that it lacks.

    A base model, such as LlamaModel, has no prefix "model." in its names, and no lm_head. transformers renames its
    tensors alike. Returns: names of the layers that were left out.
    """
    prefix, architectures = getattr(model, "base_model_prefix", ""), getattr(model.config, "architectures", None)
    if not prefix or type(model).__name__ in (architectures or [type(model).__name__]):
        return set()
    own: dict[str, str] = {}
    for name in config.modules:
        places = name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"
        found = next((place for place in places if place in known), None)
        if found is not None or name.startswith(f"{prefix}."):
            own[name] = name if found is None else found
    absent = set(config.modules) - set(own)
    config.balanced = [own[name] for name in config.balanced if name in own]
    config.modules = {own[name]: format for name, format in config.modules.items() if name in own}
    return absent


def noted(swap: LinearSwap, config: SageConfig) -> LinearSwap:
    """Note in swap and config which layers are in 8 bit, for processors and for saving."""
    swap._shared.saving, swap.loaded = "codes", (config.format, config.min_features)
    states = [state for state in swap.states() if state.dropped]
    config.modules = {state.label: state.format for state in states}
    config.balanced = [state.label for state in states if state.balance is not None]
    return swap


def _check_values(name: str, rows: QuantizedRows, balance: torch.Tensor | None) -> None:
    codes, scale = rows
    if codes.is_meta or scale.is_meta or (balance is not None and balance.is_meta):
        raise ValueError(f"files: got no numbers of layer {name!r}, expected them on a device, not on the disk")
    bad = (
        (codes == -128).any() if codes.dtype == torch.int8 else codes.view(torch.uint8).bitwise_and(127).eq(127).any()
    )
    largest = scale * (127 if codes.dtype == torch.int8 else 448)
    if bad or not ((scale > 0) & (largest <= LARGEST)).all():
        raise ValueError(
            f"files: got codes or scales of layer {name!r} that no weight has, expected positive scales of weights up "
            "to 2^40 and codes of at most 127 either way; save the model again"
        )
    if balance is not None and not ((balance >= 2.0**-MOST) & (balance <= 2.0**MOST)).all():
        raise ValueError(
            f"files: got a balance of layer {name!r} that no layer has, expected numbers from 2^-{MOST:.0f} to "
            f"2^{MOST:.0f}; "
            "save the model again"
        )


def refuse_offload(device_map: Any, what: str) -> None:
    """Raise ValueError for a device map that keeps a part of the model on the CPU or disk beside a GPU."""
    places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise ValueError(
            f"device_map: got {sorted(places)}, expected one kind of device: layers in 8 bit are not moved for each "
            f"call; offload with {what}, or leave device_map out"
        )


def need_accelerate() -> None:
    """Raise ImportError without accelerate, through which both libraries load in parts."""
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise ImportError("SageConfig needs accelerate: pip install accelerate") from error
