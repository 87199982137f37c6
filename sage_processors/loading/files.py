"""Checks of the headers of safetensors files, made before a model is filled from them."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..files.strict_json import some, strict_json


MAX_HEADER_BYTES = 64 * 2**20
NAMES = {torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
_SCALE = ".weight_scale"  # how names of the scales of 8-bit layers end
_LOAD_AGAIN = "copy or download the folder again"


# What a name in a file becomes in the model, and whether its tensor stays as it is (is not joined or split).
Renaming = Callable[[str], tuple[list[str], bool]]


def as_named(name: str) -> tuple[list[str], bool]:
    """Rename nothing: the `Renaming` of models whose files have the names of the model."""
    return [name], True


def check_files(
    paths: Iterable[str | os.PathLike[str]],
    expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    renaming: Renaming | None = as_named,
    absent: Collection[str] = (),
) -> None:
    """Raise ValueError unless the files are whole and have the expected tensors.

    Args: expected: {name: (dtype, shape)} of the tensors of 8-bit layers, named as in the model; {} for files in
        16 bit. renaming: of names in the files to names in the model. None where it is not known: then a name that
        one of both lacks says nothing. absent: names of 8-bit layers in the files that the model lacks.
    """
    found: dict[str, Any] = {}
    converted: set[str] = set()
    for path in map(Path, paths):
        if path.suffix == ".safetensors":
            for raw, entry in _header(path).items():
                names, is_kept = (renaming or as_named)(raw)
                found |= dict.fromkeys(names, entry)
                converted |= set() if is_kept else set(names)
        elif expected:
            raise ValueError(
                f"{path.name}: got {path.suffix!r}, expected .safetensors: 8-bit weights are in no other files"
            )
    missing = sorted(set(expected) - set(found)) if renaming else []
    unknown = sorted(name for name in found if name.endswith(_SCALE) and name not in expected)
    unknown = [name for name in unknown if name.removesuffix(_SCALE) not in absent] if expected and renaming else []
    if unknown:
        raise ValueError(
            f"files: got 8-bit layers {some(unknown)} that quantization_config in config.json does not name, expected "
            f"the same ones in both; {_LOAD_AGAIN}"
        )
    if missing and all(_is_in_16_bit(name, found) for name in missing):
        raise ValueError(
            f"files: got 16-bit weights without {some(missing)}, expected 8-bit ones, as quantization_config in "
            "config.json says; remove that entry to load this folder"
        )
    if missing:
        raise ValueError(
            f"files: got no tensors {some(missing)}, expected the 8-bit layers of config.json; {_LOAD_AGAIN}"
        )
    for name in (name for name in expected if name in found and name not in converted):
        (dtype, shape), entry = expected[name], found[name]
        if (entry.get("dtype"), entry.get("shape")) != (NAMES[dtype], list(shape)):
            got = f"{str(entry.get('dtype'))[:20]} {str(entry.get('shape'))[:100]}"
            raise ValueError(
                f"files: got {got} for {name}, expected {NAMES[dtype]} {list(shape)}, as quantization_config in "
                "config.json says; for a folder in 16 bit remove that entry, else save the model again"
            )


def _is_in_16_bit(name: str, found: Mapping[str, Any]) -> bool:
    """Return True for the name of a scale whose weight the files have in 16 or 32 bit."""
    weight = found.get(name.removesuffix(_SCALE) + ".weight", {})
    return name.endswith(_SCALE) and weight.get("dtype") in ("BF16", "F16", "F32")


def _header(path: Path) -> dict[str, Any]:
    """Return {name: entry} of the header of a safetensors file. A file that is cut off is refused."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{path.name}: got no header of a safetensors file in {size} bytes, expected one; {_LOAD_AGAIN}"
            )
        entries: dict[str, Any] = strict_json(file.read(length), f"the header of {path.name}", _LOAD_AGAIN)
    entries.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(
            f"{path.name}: got a header without offsets, expected a safetensors file; {_LOAD_AGAIN}"
        ) from error
    if size != 8 + length + end:
        raise ValueError(
            f"{path.name}: got {size} bytes, expected {8 + length + end} as its header says: it is not whole; "
            f"{_LOAD_AGAIN}"
        )
    return entries
