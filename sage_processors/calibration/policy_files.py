"""Policy files: the options that a calibration chose, as strict JSON.

A policy holds options and measurements, but no tensors and no code. `SageAttnProcessor` checks each option it reads.
Numbers are rounded and neither time nor machine is written, so the same calibration writes the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..files.strict_json import config_hash, strict_json, strict_object
from ..files.whole_file import check_input, given_path, write_whole
from ..option_groups import Keep, LayerRule, Linears, Scaling, Skip
from ..options import SageAttnProcessor
from ..version import __version__


FORMAT_VERSION = 8  # of the options with a preset; earlier files are refused
MAX_FILE_BYTES = 2**20
_REMEDY = "write it again with sage_processors.calibrate"
_FIELDS: dict[str, type] = {
    "format_version": int, "package_version": str, "models": list, "options": dict, "budget": dict, "result": dict,
    "curve": list,
}  # fmt: skip
_GROUPS: dict[str, Any] = {"scaling": Scaling, "linears": Linears, "keep": Keep, "skip": Skip, "layers": LayerRule}
_MODEL_FIELDS = {"name": str, "model_class": str, "config_hash": str, "layers": list}


def describe_models(handle: Any) -> list[dict[str, Any]]:
    """Return a policy's description of the denoisers of a handle: name, class, config hash, layers."""
    return [
        {
            "name": denoiser.name,
            "model_class": type(denoiser.model).__name__,
            "config_hash": config_hash(denoiser.model),
            "layers": denoiser.layer_names(),
        }
        for denoiser in handle._denoisers
    ]


def write_policy(
    path: str | Path, config: SageAttnProcessor, models: list[dict[str, Any]], *, budget: dict[str, Any],
    result: dict[str, Any], curve: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Write a policy to a .json file in one step. Raises: TypeError, ValueError, OSError."""
    path = given_path(path, ".json")
    content = {"format_version": FORMAT_VERSION, "package_version": __version__, "options": dataclasses.asdict(config)}
    write_json(path, content | {"models": models, "budget": budget, "result": result, "curve": curve})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write sorted, indented JSON in one step: a reader sees the old file or the new one. Refuses NaN."""
    text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_whole(path, text)


def read_policy(path: str | Path, target: Any = None) -> tuple[object, dict[str, Any]]:
    """Return the SageAttnProcessor in a policy file, and the file's whole content.

    Args:
        path: of the file. target: the pipeline or model that it is used for: its classes, configs and layers must be
            the policy's. None: not compared (a layer pattern that matches no layer still raises in `apply`).
    Raises: TypeError, ValueError (a file that is damaged, too large, of another version or of another model, or that
        holds unknown or invalid options); FileNotFoundError and other OSErrors.
    """
    path = given_path(path, ".json")
    content = strict_json(read_small(path, MAX_FILE_BYTES), "the policy", _REMEDY)
    version: Any = content.get("format_version")  # checked before the keys, as another version has other keys
    if type(version) is int and version != FORMAT_VERSION:
        raise ValueError(f"path: got format_version {version}, expected {FORMAT_VERSION}; {_REMEDY} of this version")
    strict_object(content, _FIELDS, "the policy", _REMEDY)
    for model in content["models"]:
        strict_object(model, _MODEL_FIELDS, "an entry of models", _REMEDY)
    known = {field.name for field in dataclasses.fields(SageAttnProcessor)}
    if set(content["options"]) != known:
        odd = sorted(set(content["options"]) ^ known)
        raise ValueError(f"path: got options that differ in {odd[:5]}, expected exactly {sorted(known)}; {_REMEDY}")
    for name, given in content["options"].items():
        _check_group(name, given)
    config = SageAttnProcessor(**content["options"])
    if target is not None:
        _check_target(content["models"], target)
    return config, content


def _check_group(name: str, given: Any) -> None:
    """Raise ValueError if an option group of a policy lacks options or has unknown ones."""
    if name not in _GROUPS:
        return
    known = {field.name for field in dataclasses.fields(_GROUPS[name])}
    for entry in given if name == "layers" and isinstance(given, list) else [given]:
        if isinstance(entry, dict) and set(entry) != known:
            odd = sorted(set(entry) ^ known)[:5]
            raise ValueError(f"path: got options of {name} that differ in {odd}, expected {sorted(known)}; {_REMEDY}")


def read_small(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises: ValueError, OSError."""
    check_input(path, f"a JSON file; {_REMEDY}")
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"path: got a file of more than {limit} bytes, expected less; {_REMEDY}")
    return content


def _check_target(models: list[dict[str, Any]], target: Any) -> None:
    from ..entry import apply, handle_of

    handle = handle_of(target)
    if handle is not None:
        own = describe_models(handle)
    else:
        with apply(target, SageAttnProcessor(scaling="dynamic")) as handle:
            own = describe_models(handle)
    for wanted, got in zip(models, own, strict=False):
        for field in _MODEL_FIELDS:
            if wanted[field] != got[field]:
                raise ValueError(
                    f"target: got {field} {str(got[field])[:200]} of {got['name'] or 'the model'}, expected "
                    f"{str(wanted[field])[:200]}; the policy is of another model: {_REMEDY}"
                )
    if len(models) != len(own):
        raise ValueError(f"target: got {len(own)} denoisers, expected {len(models)}; {_REMEDY}")
