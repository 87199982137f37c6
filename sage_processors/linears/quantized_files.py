"""Files of models with 8-bit linear layers: saving a swapped model, loading it without 16-bit weights.

A safetensors file has every parameter and buffer of the model. Non-persistent buffers are included, since a model on
the meta device has no numbers for them. A swapped layer has "<name>.codes" and "<name>.scale" in place of
"<name>.weight", and "<name>.balance" if its input has a balance. One metadata entry, in JSON, says which model, layers
and formats these are.
Reading trusts nothing. The header's size is checked before it is parsed, every name, dtype and shape is compared with
the model, and the size of the file with their sum. The model is changed only after all of the file has been read.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sage_kernels import QuantizedRows

from ..files.strict_json import config_hash, some, strict_json, strict_object
from ..files.whole_file import whole_file
from ..option_checks import one_of
from ..options import ON_UNSUPPORTED
from ..version import __version__
from .balance import MOST
from .modules import is_swapped
from .swap import LinearSwap, swap_of
from .weights.layers import WEIGHT_ONLY, linear_layers
from .weights.storage import CODES, SCALE


FORMAT_VERSION = 2  # version 1 had no balances
MAX_HEADER_BYTES = 64 * 2**20
_METADATA_KEY = "sage_processors_linears"
_FILE_FIELDS = {
    "format_version": int,
    "package_version": str,
    "model_class": str,
    "config_hash": str,
    "layers": dict,
    "balanced": list,
}
_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, WEIGHT_ONLY: torch.int8}
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.complex64: "C64",
}
_BYTES = {name: dtype.itemsize for dtype, name in _NAMES.items()}
_SAVE_AGAIN = "save it again with sage_processors.save_quantized"


def save_quantized(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model with 8-bit linear layers to `path`, which must end in .safetensors. Syncs.

    Args: model: one that `quantize_linears` or SageAttnProcessor(linears=...) swapped, with or without its 16-bit
        weights. Its config is not in the file: keep it as save_config or config.save_pretrained writes it.
    Raises: TypeError, ValueError for a model without 8-bit layers or with adapters, for a layer that can't be
        quantised, for parameters that layerwise casting keeps in FP8; OSError.
    """
    swap, path = _swap_of(model), _checked_path(path)
    tensors: dict[str, torch.Tensor] = {}
    layers, balanced = {}, []
    for choice in swap.choices:
        state = swap.state_of(choice.module)
        if state is None:
            continue
        if not state.prepare(choice.module) or not state.is_filled:
            raise ValueError(
                f"model: got layer {choice.name!r} without an 8-bit weight, expected finite weights that are on a "
                "device; call the model once first"
            )
        name = _plain(choice.name, swap)
        layers[name] = state.format
        codes, scale = state.storage.plain_rows(state.index)
        tensors |= {f"{name}.codes": codes, f"{name}.scale": scale}
        if state.balance is not None:
            balanced.append(name)
            tensors[f"{name}.balance"] = state.balance.vector
    weights = {f"{name}.weight" for name in layers}
    for name, tensor in _own_tensors(model).items():
        if name not in weights:
            if tensor.is_meta:
                raise ValueError(f"model: got {name} on the meta device, expected its numbers; load the weights first")
            if tensor.dtype == torch.float8_e4m3fn and isinstance(tensor, nn.Parameter):  # no stock model has such
                raise ValueError(
                    f"model: got {tensor.dtype} for parameter {name}, expected 16 bit or more; save it without "
                    "layerwise casting"
                )
            tensors[name] = tensor.detach().contiguous()
    metadata = _describe(model) | {"layers": layers, "balanced": balanced}
    with whole_file(path) as file:
        _write(file, tensors, metadata)


def load_quantized(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    on_unsupported: str = "fallback",
) -> LinearSwap:
    """Load a file of `save_quantized` into a model. 16-bit weights of 8-bit layers are never in memory.

    Args:
        model: of the same class and config, without adapters. On the meta device it takes no memory before:
            `with torch.device("meta"): model = FluxTransformer2DModel.from_config(config)`.
        device: where parameters and codes go. on_unsupported: as in `quantize_linears`.
    Returns: a LinearSwap whose 16-bit weights are dropped.
    Raises: TypeError; ValueError for another on_unsupported, for a file that is damaged, or of another model, version
        or format; FileNotFoundError and other OSErrors. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    one_of("on_unsupported", on_unsupported, ON_UNSUPPORTED)
    path = _checked_path(path)
    _refuse_swapped(model)
    entries, metadata = _read_header(path)
    layers, balanced = _check_metadata(metadata, model)
    expected = _expected(model, layers, balanced)
    _check_entries(entries, expected, path)
    tensors = _read_tensors(path, entries, expected, device)
    rows = {name: QuantizedRows(tensors.pop(f"{name}.codes"), tensors.pop(f"{name}.scale")) for name in layers}
    ready = {name: (rows[name], tensors.pop(f"{name}.balance", None)) for name in layers}
    _check_values(ready)
    swap = LinearSwap(model, linears="none", layers=tuple(layers.items()), on_unsupported=on_unsupported, ready=ready)
    swap.drop_weights = True
    _fill(model, tensors)
    return swap


def _plain(name: str, swap: LinearSwap) -> str:
    return name[len(swap.name) + 1 :] if swap.name else name


def _swap_of(model: nn.Module) -> LinearSwap:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    swap = swap_of(model)
    if swap is None or not any(choice.format != "none" for choice in swap.choices):
        raise ValueError(
            "model: got one without 8-bit linear layers, expected one that quantize_linears or "
            'SageAttnProcessor(linears="int8") swapped'
        )
    _refuse_adapters(model)
    return swap


def _refuse_adapters(model: nn.Module) -> None:
    if any("base_layer" in module._modules for module in model.modules()):
        raise ValueError(
            "model: got one with adapters, expected none: fuse them into the weights or unload them first"
        )


def _refuse_swapped(model: nn.Module) -> None:
    _refuse_adapters(model)
    if any(is_swapped(module) for module in model.modules()):
        raise ValueError("model: got one whose linear layers are swapped, expected a stock one")


def _checked_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: got {type(path).__name__}, expected a str or a Path that ends in .safetensors")
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path: got {path.name!r}, expected a name that ends in .safetensors; safetensors only")
    return path


def _describe(model: nn.Module) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "model_class": model.__class__.__name__,
        "config_hash": config_hash(model),
    }


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, but not our own. Tied ones have their first name only."""
    found, seen = {}, set()
    for prefix, module in model.named_modules():
        own = {**module._parameters}
        own |= {k: v for k, v in module._buffers.items() if k not in (CODES, SCALE)}
        for key, tensor in own.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}.{key}" if prefix else key] = tensor
    return found


def _write(file: Any, tensors: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Write a safetensors file tensor by tensor, so that the model is not in memory twice."""
    header: dict[str, dict[str, Any]] = {"__metadata__": {_METADATA_KEY: json.dumps(metadata, sort_keys=True)}}
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ValueError(f"model: got {tensor.dtype} for {name}, expected one of {sorted(_BYTES)}")
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in sorted(tensors):
        file.write(tensors[name].cpu().reshape(-1).view(torch.uint8).numpy().data if tensors[name].numel() else b"")


# --- reading: first the header, then the tensors ---


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not path.exists():
        raise FileNotFoundError(f"path: got {path.name!r}, which does not exist, expected a file of save_quantized")
    if not path.is_file():
        raise ValueError(f"path: got {path.name!r}, which is no regular file, expected a file of save_quantized")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"path: got a header of {length} bytes in a file of {size}, expected 2 to {MAX_HEADER_BYTES} inside "
                f"the file; safetensors only: {_SAVE_AGAIN}"
            )
        entries = strict_json(file.read(length), "the header", f"safetensors only, {_SAVE_AGAIN}")
    text = strict_object(entries.pop("__metadata__", None), {_METADATA_KEY: str}, "the metadata", _SAVE_AGAIN)
    return entries, strict_json(text[_METADATA_KEY], "the metadata", _SAVE_AGAIN)


def _check_metadata(metadata: dict[str, Any], model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Check the metadata. Return {name of an 8-bit layer: format} and the names of layers with a balance."""
    version = metadata.get("format_version")  # checked before the keys, as other versions have other keys
    if type(version) is int and version not in (1, FORMAT_VERSION):
        raise ValueError(
            f"path: got format_version {version}, expected {FORMAT_VERSION}; {_SAVE_AGAIN} of this version"
        )
    if version == 1 and "balanced" not in metadata:
        metadata = metadata | {"balanced": []}
    strict_object(metadata, _FILE_FIELDS, "the metadata", _SAVE_AGAIN)
    own = _describe(model)
    for field in ("model_class", "config_hash"):
        if metadata[field] != own[field]:
            raise ValueError(
                f"path: got {field} {metadata[field][:200]}, expected {own[field]}; load it into the same model"
            )
    known = {name for name, _ in linear_layers(model)}
    for name, format in metadata["layers"].items():
        if name not in known:
            raise ValueError(f"path: got layer {name[:200]!r}, expected a linear layer of the model; {_SAVE_AGAIN}")
        if format not in _CODES:
            raise ValueError(f"path: got format {str(format)[:50]!r} of {name!r}, expected one of {sorted(_CODES)}")
    layers: dict[str, str] = metadata["layers"]
    balanced: list[str] = metadata["balanced"]
    for name in balanced:
        if not isinstance(name, str) or name not in layers or balanced.count(name) > 1:
            raise ValueError(f"path: got balance of {str(name)[:200]!r}, expected one 8-bit layer each; {_SAVE_AGAIN}")
    return layers, balanced


def _expected(
    model: nn.Module, layers: dict[str, str], balanced: list[str]
) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
    """Return {name: (dtype, shape)} of all tensors in the file; dtype None allows any floating type."""
    modules = dict(model.named_modules())
    found: dict[str, tuple[Any, ...]] = {}
    for name, tensor in _own_tensors(model).items():
        dtype = None if tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn else tensor.dtype
        found[name] = (dtype, tuple(tensor.shape))
    for name, format in layers.items():
        shape = (modules[name].out_features, modules[name].in_features)
        found.pop(f"{name}.weight", None)
        found |= {f"{name}.codes": (_CODES[format], shape), f"{name}.scale": (torch.float32, shape[:1])}
    for name in balanced:
        found[f"{name}.balance"] = (torch.float32, (modules[name].in_features,))
    return found


def _check_entries(entries: dict[str, Any], expected: dict[str, Any], path: Path) -> None:
    unknown, missing = sorted(set(entries) - set(expected)), sorted(set(expected) - set(entries))
    if unknown or missing:
        raise ValueError(
            f"path: got unknown tensors {some(unknown)} and missing tensors {some(missing)}, expected exactly "
            f"{len(expected)}; {_SAVE_AGAIN}"
        )
    total = 0
    for name, (dtype, shape) in expected.items():
        fields = {"dtype": str, "shape": list, "data_offsets": list}
        entry = strict_object(entries[name], fields, f"tensor {name}", _SAVE_AGAIN)
        allowed = ["BF16", "F16", "F32", "F64"] if dtype is None else [_NAMES[dtype]]
        if entry["dtype"] not in allowed or entry["shape"] != list(shape):
            got = f"{entry['dtype'][:20]} {str(entry['shape'])[:100]}"
            raise ValueError(f"path: got {got} for {name}, expected {allowed} {list(shape)}; {_SAVE_AGAIN}")
        total += _BYTES[entry["dtype"]] * torch.Size(shape).numel()
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, struct.unpack("<Q", file.read(8))[0]
    if size != 8 + length + total:
        raise ValueError(
            f"path: got a file of {size} bytes, expected {8 + length + total}; it is damaged: {_SAVE_AGAIN}"
        )


def _read_tensors(
    path: Path, entries: dict[str, Any], expected: dict[str, Any], device: torch.device | str
) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError('these files need safetensors: pip install "sage-processors[diffusers]"') from error
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name).to(device) for name in expected}
    except SafetensorError as error:  # such as offsets that overlap or leave gaps
        raise ValueError(f"path: got a file that safetensors refuses ({error}); {_SAVE_AGAIN}") from error
    for name, tensor in tensors.items():  # the file was opened again and may be another one
        if _NAMES.get(tensor.dtype) != entries[name]["dtype"] or tuple(tensor.shape) != expected[name][1]:
            raise ValueError(f"path: got another tensor {name} than its header says; {_SAVE_AGAIN}")
    return tensors


def _check_values(ready: dict[str, tuple[QuantizedRows, torch.Tensor | None]]) -> None:
    for name, ((codes, scale), balance) in ready.items():
        bad = codes.float().isnan().any() if codes.dtype != torch.int8 else (codes == -128).any()
        if bad or not (scale.isfinite() & (scale > 0)).all():
            raise ValueError(
                f"path: got codes or scales of layer {name!r} that no weight has, expected finite positive scales and "
                f"codes of at most 127 either way; {_SAVE_AGAIN}"
            )
        if balance is not None and not ((balance >= 2.0**-MOST) & (balance <= 1)).all():
            raise ValueError(
                f"path: got a balance of layer {name!r} that no layer has, expected numbers from 2^-{MOST:.0f} to 1; "
                f"{_SAVE_AGAIN}"
            )


def _fill(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Put parameters and buffers into the model, tied ones in all of their places."""
    first = {id(tensor): name for name, tensor in _own_tensors(model).items()}
    made: dict[str, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, old in table.items():
                name = None if old is None else first.get(id(old))
                if name not in tensors:
                    continue
                if name not in made:
                    is_parameter = table is module._parameters
                    made[name] = nn.Parameter(tensors[name], False) if is_parameter else tensors[name]
                table[key] = made[name]
