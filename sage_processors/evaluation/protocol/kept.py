"""Keep a rating in its folder: its settings, and rows that are checked before a later call goes on."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sage_kernels.results import kernel_sources

from ... import pipelines
from ...files.strict_json import plain_data
from ...files.whole_file import write_whole
from ...options import SageAttnProcessor
from ...version import __version__
from ..held_out_text import EMBEDDED_NAME
from .timing import Calls


OURS, FLOOR, STOCK, REFERENCE = "int8", "another exact kernel", "stock", "reference"
WEIGHTS = (".safetensors", ".bin", ".gguf")
OURS_ALONE = {"lead", "kv_bytes"}  # metrics that no other way needs to have


def own_settings(target: Any, name: str, config: SageAttnProcessor) -> dict[str, Any]:
    """Return settings of every rating: model, options, and where it runs."""
    device = target.device
    is_embedded = name in (*pipelines.PIPELINES, *pipelines.VIDEOS, EMBEDDED_NAME)
    folder = pipelines.folder(name) if is_embedded else Path(name)
    return {
        "model": name, "weights": weights_of(folder), "options": repr(config), "dtype": str(target.dtype),
        "device": device.type, "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "version": __version__, "torch": torch.__version__, "kernels": _kernels(),
    }  # fmt: skip


def weights_of(folder: Path) -> str:
    """Return a hash of names, sizes and times of a folder's weights and configs.

    Of a name on the Hub it is the commit in the local cache; "" without one.
    """
    if not folder.is_dir():
        return _commit_of(str(folder))
    files = (path for path in folder.rglob("*") if path.suffix in WEIGHTS or path.name == "config.json")
    found = []
    for path in sorted(files):
        now = path.stat()
        found.append((path.relative_to(folder).as_posix(), now.st_size, now.st_mtime_ns))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _commit_of(name: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    for file in ("model_index.json", "config.json"):
        try:
            found = try_to_load_from_cache(name, file)
        except ValueError:  # no name that the Hub could have
            return ""
        if isinstance(found, str):
            return Path(found).parent.name
    return ""


@functools.cache
def _kernels() -> str:
    return kernel_sources()[:16]


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Write rating.json."""
    write_whole(folder / "rating.json", json.dumps(plain_data(state), indent=1, allow_nan=False).encode())


def started(
    folder: Path,
    settings: dict[str, Any],
    asked: Sequence[dict[str, Any]],
    required: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return the rating that a folder holds, or a new one without rows.

    Rows whose pictures are gone are left out, to be drawn again.

    Args: asked: what each row says of itself, and by its place its number. required: {way: metrics of every row}.
    Raises: ValueError if the folder's rating has other settings, or is damaged.
    """
    file = folder / "rating.json"
    settings = json.loads(json.dumps(plain_data(settings)))
    state: dict[str, Any]
    if not file.is_file():
        folder.mkdir(exist_ok=True)
        state = {"settings": settings, "rows": []}
        write_state(state, folder)  # before any picture, so that the folder is a rating's however it is left
        return state
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        before, rows = dict(state["settings"]), list(state["rows"])
        other = [key for key in settings if key not in before or before[key] != settings[key]]
        if not other:
            check_rows(rows, asked, required, folder)
            _expect(all(isinstance(path, str) for path in state.get("csv", [])), "csv")
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{file}: got a file that is damaged or no rating, expected one that `rate` wrote: remove it to begin "
            "anew, or choose another --output"
        ) from error
    if other:
        raise ValueError(
            f"{folder} holds a rating with other settings than those asked for ({', '.join(other)}): choose another "
            "--output or remove it"
        )
    rows = [row for row in rows if all((folder / path).is_file() for path in row.get("pictures", {}).values())]
    return state | {"rows": rows}


def check_rows(
    rows: Sequence[dict[str, Any]],
    asked: Sequence[dict[str, Any]],
    required: Mapping[str, Sequence[str]],
    folder: Path,
) -> None:
    """Check rows of a rating.json.

    Args: asked, required, folder: of `started`.
    Raises: ValueError, TypeError, KeyError or AttributeError unless a rating wrote them so.
    """
    seen = set()
    for row in rows:
        number = row["number"]
        _expect(type(number) is int and 0 <= number < len(asked) and number not in seen, "number")
        seen.add(number)
        _expect(all(row[key] == value for key, value in asked[number].items()), "what was asked")
        for found in row["metrics"].values():
            _expect(all(type(value) in (int, float) and math.isfinite(value) for value in found.values()), "metrics")
        _expect(all(key in row["metrics"][way] for way, keys in required.items() for key in keys), "a metric")
        ours, floor = row["metrics"][OURS].keys(), row["metrics"][FLOOR].keys()
        _expect(floor <= ours <= floor | OURS_ALONE, "metrics to compare")
        *numbers, why = Calls(*row["calls"])
        _expect(all(type(n) is int and n >= 0 for n in numbers) and isinstance(why, str), "calls")
        for path in row.get("pictures", {}).values():
            inside = (folder / path).resolve().is_relative_to(folder.resolve())
            _expect(not Path(path).is_absolute() and ".." not in Path(path).parts and inside, "a picture's path")


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(what)
