"""Save and load the statistics of timestep scaling, so that a new process starts with them.

A scale file is one safetensors file. It holds the tensors of `ScaleState.snapshot` for every denoiser, and one
metadata entry. That is JSON with the format, models (class, config, dtype, LoRA adapters), layers, heads, bins and
margin that the tensors belong to. It names no schedulers, step counts or resolutions: the table is by noise level, and
a plan for other shapes is not used.

Nothing in a file is trusted. The size is limited before anything is read, and the header before it is parsed. Every
name, shape, dtype and value is compared with the handle before the handle is changed. Nothing in a file is executed or
used as a name to import, and no other format is tried.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from pathlib import Path

import torch

from sage_kernels.facts.state import (
    PLAN_K_WEIGHT,
    PLAN_Q_WEIGHT,
    PLAN_V_SCALE,
    STAT_K_MAX,
    STAT_K_MIN,
    STAT_Q_AMAX,
    STAT_V_AMAX,
)

from ...files.strict_json import config_hash, some, strict_json, strict_object
from ...files.whole_file import check_input, given_path, write_whole
from ...installation import pip_install
from ...version import __version__


logger = logging.getLogger("sage_processors")

FORMAT_VERSION = 3  # 2 had no "steady"
MAX_FILE_BYTES = 512 * 2**20  # ten times the need of a video model of 40 layers and 40 heads
MAX_HEADER_BYTES = 4 * 2**20
MAX_METADATA_BYTES = 2 * 2**20
MAX_RUN = 2**31 - 2**16  # fits into int32, with room for later runs

_METADATA_KEY = "sage_processors"
_FILE_FIELDS = {"format_version": int, "package_version": str, "parts": list}
_PART_FIELDS = {
    "name": str, "model_class": str, "config_hash": str, "dtype": str, "adapters": list, "bins": int, "margin": float,
    "layers": list,
}  # fmt: skip
_LAYER_FIELDS = {"name": str, "kv_heads": int, "head_dim": int, "rotation": str}
_DTYPE_NAMES = {torch.float32: "F32", torch.int32: "I32", torch.bool: "BOOL"}
_SAVE_AGAIN = "save it again with handle.save_scales"
_NO_JSON = f"safetensors only, {_SAVE_AGAIN}"
_NO_OTHER = "; safetensors only: other formats can run code when they are read"


def save_scales(handle, path: str | os.PathLike) -> None:
    """Write the learnt scales of a handle to `path`. Replaces a file in one step. Waits for the device.

    Args: path: must end in .safetensors.
    Raises: TypeError or ValueError for a wrong path, and for a handle without timestep scales; RuntimeError for a
        removed handle; OSError.
    """
    path = given_path(path, ".safetensors", _NO_OTHER)
    denoisers = _planned_denoisers(handle)
    tensors: dict[str, torch.Tensor] = {}
    for denoiser in denoisers:
        own = _snapshot(denoiser)
        _check_values(denoiser, own)
        tensors |= {_key(denoiser, name): tensor for name, tensor in own.items()}
    parts = [_describe(denoiser) for denoiser in denoisers]
    metadata = {"format_version": FORMAT_VERSION, "package_version": __version__, "parts": parts}
    content = _safetensors().save(tensors, metadata={_METADATA_KEY: json.dumps(metadata)})
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"handle: got scales of {len(content)} bytes, expected at most {MAX_FILE_BYTES}")
    write_whole(path, content)


class _MismatchError(ValueError):
    """Raised for an intact file of another model."""


def load_scales(handle, path: str | os.PathLike, on_mismatch: str = "error") -> bool:
    """Load the scales that a handle of the same model saved, and freeze them.

    Each run then gives bit for bit the result that the saving handle would give after `freeze_scales`. With
    "timestep_adaptive" nothing is frozen, and the runs go on learning. Counts in the report go on. The model should
    already be on the device that it runs on. The handle is unchanged if this raises or returns False.
    Args: on_mismatch: for an intact file of another model, config, dtype, adapters, layers or margin. "error" raises
        ValueError; "fresh" logs a warning, and the scales are learnt from the start.
    Returns: True if the file was used.
    Raises: TypeError; ValueError, with the difference in the message, for a file that is damaged, too large, of
        another format or of another model; RuntimeError for a removed handle; FileNotFoundError and other OSErrors.
    """
    if on_mismatch not in ("error", "fresh"):
        raise ValueError(f'on_mismatch: got {on_mismatch!r}, expected "error" or "fresh"')
    _safetensors()
    path = given_path(path, ".safetensors", _NO_OTHER)
    denoisers = _planned_denoisers(handle)
    snapshots = [_snapshot(denoiser) for denoiser in denoisers]
    expected = {
        _key(denoiser, name): x for denoiser, own in zip(denoisers, snapshots, strict=True) for name, x in own.items()
    }
    try:
        tensors = _parse(_read(path, expected, [_describe(denoiser) for denoiser in denoisers]))
    except _MismatchError as error:
        if on_mismatch == "error":
            raise ValueError(str(error)) from None
        logger.warning("scales are learnt from the start: %s", error)
        return False
    read = [
        {name: tensors[_key(denoiser, name)] for name in own}
        for denoiser, own in zip(denoisers, snapshots, strict=True)
    ]
    for denoiser, own in zip(denoisers, read, strict=True):
        _check_values(denoiser, own)
    for denoiser, own in zip(denoisers, read, strict=True):
        with torch.inference_mode(False):
            denoiser._reader.restore(own.pop("timestep"))
            denoiser.state.restore(own)
            if not denoiser.state.rule.adapts:
                denoiser.freeze_scales()
    handle._rotation.watch()
    return True


def _safetensors():
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"scale files need safetensors: {pip_install('diffusers')}") from error
    return safetensors.torch


def _parse(content: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError

    try:
        return _safetensors().load(content)
    except SafetensorError as error:  # offsets that overlap, leave gaps, or end beyond the file
        raise ValueError(f"path: got a file that safetensors refuses ({error}); {_SAVE_AGAIN}") from error


def _planned_denoisers(handle) -> list:
    handle._check_active()
    denoisers = [denoiser for denoiser in handle._denoisers if denoiser.state is not None]
    if not denoisers:
        raise ValueError(
            f"handle: got scaling={handle.config.scaling.name!r} without planned scales, expected some layers with; "
            'use SageAttnProcessor(scaling="timestep")'
        )
    return denoisers


def _describe(denoiser) -> dict:
    """Return the metadata that a file for this denoiser must have."""
    layers = [{name: getattr(site, name) for name in _LAYER_FIELDS} for site in denoiser.state.sites]
    return {
        "name": denoiser.name,
        "model_class": type(denoiser.model).__name__,
        "config_hash": config_hash(denoiser.model),
        "dtype": str(next((p.dtype for p in denoiser.model.parameters() if p.is_floating_point()), None)),
        "adapters": _adapters(denoiser.model),
        "bins": denoiser.state.bins,
        "margin": float(denoiser.state.margin),
        "layers": layers,
    }


def _adapters(model) -> list[str]:
    """Return active LoRA adapters as "name:scale". IP-Adapters show in the list of layers."""
    found = set()
    for module in model.modules():
        active, scaling = getattr(module, "active_adapters", None), getattr(module, "scaling", None)
        if isinstance(active, (list, tuple)) and isinstance(scaling, dict) and not module.disable_adapters:
            found |= {f"{name}:{scaling[name]:g}" for name in active if name in scaling}
    return sorted(found)


def _key(denoiser, name: str) -> str:
    return f"{denoiser.name or 'model'}.{name}"


def _snapshot(denoiser) -> dict[str, torch.Tensor]:
    return denoiser.state.snapshot() | {"timestep": denoiser._reader.snapshot()}


# --- reading: size, then header, then metadata and entries ---


def _read(path: Path, expected: dict[str, torch.Tensor], parts: list[dict]) -> bytes:
    """Read a file and check everything but its values. Reads no more bytes than the handle needs."""
    check_input(path, "a file of handle.save_scales")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(
                f"path: got a file of {size} bytes, expected at most {MAX_FILE_BYTES}; it is no scale file"
            )
        start = file.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"path: got a header of {header_bytes} bytes in a file of {size}, expected 2 to {MAX_HEADER_BYTES} "
                f"inside the file; safetensors only, {_SAVE_AGAIN}"
            )
        header = file.read(header_bytes)
        entries = strict_json(header, "the header", _NO_JSON)
        _check_metadata(entries.pop("__metadata__", None), parts)
        _check_entries(entries, expected)
        wanted = 8 + header_bytes + sum(tensor.nbytes for tensor in expected.values())
        if size != wanted:
            raise ValueError(f"path: got a file of {size} bytes, expected {wanted}; it is damaged: {_SAVE_AGAIN}")
        return start + header + file.read(wanted - 8 - header_bytes)


def _check_metadata(entries, parts: list[dict]) -> None:
    text = strict_object(entries, {_METADATA_KEY: str}, "the metadata", _SAVE_AGAIN)[_METADATA_KEY]
    if len(text) > MAX_METADATA_BYTES:
        raise ValueError(f"path: got metadata of {len(text)} characters, expected at most {MAX_METADATA_BYTES}")
    metadata = strict_json(text, "the metadata", _NO_JSON)
    version = metadata.get("format_version")  # checked first: another version may have other keys
    if type(version) is int and version != FORMAT_VERSION:
        raise _MismatchError(
            f"path: got format_version {version}, expected {FORMAT_VERSION}; {_SAVE_AGAIN} of this version"
        )
    strict_object(metadata, _FILE_FIELDS, "the metadata", _SAVE_AGAIN)
    got = [strict_object(part, _PART_FIELDS, "an entry of parts", _SAVE_AGAIN) for part in metadata["parts"]]
    for part in got:
        for layer in part["layers"]:
            strict_object(layer, _LAYER_FIELDS, f"a layer of {part['name'] or 'the model'}", _SAVE_AGAIN)
    try:
        _check_parts(got, parts)
    except ValueError as error:
        raise _MismatchError(str(error)) from None


def _check_parts(got: list[dict], parts: list[dict]) -> None:
    """Raise ValueError unless an intact file is of this model."""
    _same_names([part["name"] for part in got], [part["name"] for part in parts], "denoisers")
    for part, wanted in zip(got, parts, strict=True):
        label = part["name"] or "the model"
        _same(part["model_class"], wanted["model_class"], f"model_class of {label}", "load it into the same model")
        _same_names([x["name"] for x in part["layers"]], [x["name"] for x in wanted["layers"]], f"layers of {label}")
        for name, remedy in (
            ("config_hash", "load it into the same model"),
            ("dtype", "load it into the model in that dtype"),
            ("adapters", "load it with the same LoRA adapters active, at the same scales"),
        ):
            _same(part[name], wanted[name], f"{name} of {label}", f'{remedy}, or pass on_mismatch="fresh"')
        for layer, known in zip(part["layers"], wanted["layers"], strict=True):
            for name in ("kv_heads", "head_dim"):
                remedy = "load it into the same model (after a first run and handle.refresh() where it was saved so)"
                _same(layer[name], known[name], f"{name} of layer {layer['name']!r}", remedy)
            remedy = (
                f"use SageAttnProcessor(layers={{{layer['name']!r}: {{'rotation': {layer['rotation'][:20]!r}}}, …}})"
            )
            _same(layer["rotation"], known["rotation"], f"rotation of layer {layer['name']!r}", remedy)
        _same(part["bins"], wanted["bins"], f"bins of {label}", _SAVE_AGAIN)
        remedy = f"use SageAttnProcessor(scaling={{..., 'margin': {part['margin']}}})"
        _same(part["margin"], wanted["margin"], f"margin of {label}", remedy)


def _same(got, expected, what: str, remedy: str) -> None:
    if got != expected:
        raise ValueError(f"path: got {str(got)[:200]} for {what}, expected {expected}; {remedy}")


def _same_names(got: list[str], expected: list[str], what: str) -> None:
    """Raise unless the names are equal and in the same order.

    Whole names are compared, so "blocks.0" does not match "single_blocks.0".
    """
    if got == expected:
        return
    extra, missing = sorted(set(got) - set(expected)), sorted(set(expected) - set(got))
    if extra or missing:
        why = f"that the model lacks: {some(extra)}, and none for {some(missing)}"
    else:
        why = f"in another order or twice: {some(got)}"
    raise ValueError(
        f"path: got {what} {why}, expected exactly the {len(expected)} of the model; the file belongs to another "
        "model or to other processors (IP-Adapter, fused projections)"
    )


def _check_entries(entries: dict, expected: dict[str, torch.Tensor]) -> None:
    unknown, missing = sorted(set(entries) - set(expected)), sorted(set(expected) - set(entries))
    if unknown or missing:
        raise ValueError(
            f"path: got unknown tensors {some(unknown)} and missing tensors {some(missing)}, expected exactly "
            f"{len(expected)}; {_SAVE_AGAIN}"
        )
    for name, tensor in expected.items():
        entry = strict_object(
            entries[name], {"dtype": str, "shape": list, "data_offsets": list}, f"tensor {name}", _SAVE_AGAIN
        )
        _same(entry["dtype"], _DTYPE_NAMES[tensor.dtype], f"dtype of tensor {name}", _SAVE_AGAIN)
        _same(entry["shape"], list(tensor.shape), f"shape of tensor {name}", _SAVE_AGAIN)


# --- values ---


def _check_values(denoiser, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError for statistics and scales that no run can produce.

    Row r of every tensor is one head of a layer.
    """
    layers = [site.name for site in denoiser.state.sites for _ in range(site.kv_heads)]

    def refuse(bad, what, expected):
        """Raise if any value is bad. bad: bool tensor [rows, ...], True for wrong values."""
        rows = bad.reshape(bad.shape[0], -1).any(-1)
        if rows.any():
            layer = layers[int(rows.nonzero()[0])]
            raise ValueError(f"path: got {what} in layer {layer!r}, expected {expected}; {_SAVE_AGAIN}")

    plan, scale = tensors["plan"], tensors["plan_scale"]
    per_row = {"table": tensors["table"].transpose(0, 1), "stats": tensors["stats"], "plan": plan, "plan_scale": scale}
    for name, tensor in per_row.items():
        refuse(~torch.isfinite(tensor), f"NaN or infinity in {name}", "finite values")
    for name in ("table", "stats"):
        q_amax, k_max, k_min = (per_row[name][..., i, :] for i in (STAT_Q_AMAX, STAT_K_MAX, STAT_K_MIN))
        refuse(q_amax < 0, f"a negative max |q| in {name}", "values >= 0")
        refuse(per_row[name][..., STAT_V_AMAX, :] < 0, f"a negative max |v| in {name}", "values >= 0")
        refuse(k_max < k_min, f"a max k below min k in {name}", "max k >= min k")
    refuse(scale < 0, "a negative plan_scale", "values >= 0")
    refuse(plan[:, [PLAN_K_WEIGHT, PLAN_Q_WEIGHT, PLAN_V_SCALE]] < 0, "a negative weight in plan", "values >= 0")
    # 0 always means a head without a plan
    for weight in (PLAN_K_WEIGHT, PLAN_Q_WEIGHT):
        unequal = (scale > 0) != (plan[:, weight] > 0).any(-1)
        refuse(unequal, "a plan_scale of 0 with a plan, or a plan without", "both or neither")
    refuse(tensors["keys"] < 0, "a negative shape key", "values >= 0")
    run = int(tensors["run"])
    if not 0 <= run <= MAX_RUN:
        raise ValueError(f"path: got run {run}, expected 0 to {MAX_RUN}; {_SAVE_AGAIN}")
    table_run = tensors["table_run"].t()
    refuse((table_run < 0) | (table_run > run), "a table entry of a run that was not", f"runs 0 to {run}")
    largest, level = tensors["timestep"].tolist()
    if not (0 <= largest < float("inf") and 0 <= level <= 1):
        raise ValueError(f"path: got timestep {(largest, level)}, expected a finite one and a level of 0 to 1")
