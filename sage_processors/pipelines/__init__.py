"""Small trained models, in the package sage-processors-demo. A checkout has it in demo/.

The pipelines are diffusers `save_pretrained` folders. Two draw coloured shapes at 128x128 pixels ("a red circle on a
blue background"); `examples/train_tiny.py` trained them. `tiny_wan` draws clips ("a red square moving left on a white
background"); `examples/train_tiny_wan.py` trained it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


PIPELINES = ("tiny_flux", "tiny_sd")  # draw pictures
VIDEOS = ("tiny_wan",)  # draw clips
_CHECKOUT = Path(__file__).resolve().parents[2]
_PACKAGE = "sage_processors_demo"
# tiny_flux needs guidance to draw clean shapes. It was trained for it, with one prompt in ten left empty.
_CALL_ARGUMENTS: dict[str, dict[str, Any]] = {
    "tiny_flux": {"negative_prompt": "", "true_cfg_scale": 3.0},
    "tiny_wan": {"height": 64, "width": 64, "num_frames": 17, "max_sequence_length": 32, "guidance_scale": 3.0},
}


def folder(name: str) -> Path:
    """Return the folder of an embedded model. It may not exist, if sage-processors-demo is not installed."""
    checkout = _CHECKOUT / "demo" / _PACKAGE
    installed = None if checkout.is_dir() else importlib.util.find_spec(_PACKAGE)
    if installed is not None and installed.origin is not None:
        return Path(installed.origin).resolve().parent / name
    return checkout / name


def installed_folder(name: str) -> Path:
    """Return the folder of an embedded model.

    Raises: ImportError with the pip command, if it is not installed.
    """
    found = folder(name)
    if not found.is_dir():
        remedy = "pip install ./demo in a checkout, or pip install its wheel file"
        raise ImportError(f"{name} is in another package, sage-processors-demo: {remedy}", name=_PACKAGE)
    return found


def names() -> list[str]:
    """Return the names of the installed embedded pipelines that draw pictures, sorted."""
    return [name for name in PIPELINES if (folder(name) / "model_index.json").is_file()]


def video_names() -> list[str]:
    """Return the names of the embedded pipelines that draw clips and have weights, sorted."""
    return [name for name in VIDEOS if (folder(name) / "model_index.json").is_file()]


def path(name: str) -> Path:
    """Return the folder of an embedded pipeline, for `DiffusionPipeline.from_pretrained`.

    Raises: TypeError if `name` is no string. ValueError if no embedded pipeline has that name. ImportError if it is
        not installed. FileNotFoundError if it is one of VIDEOS without trained weights.
    """
    known = [*PIPELINES, *VIDEOS]
    if not isinstance(name, str):
        raise TypeError(f"name: got {type(name).__name__}, expected one of {known} as str")
    if name not in known:
        raise ValueError(f"name: got {name!r}, expected one of {known}")
    if name in VIDEOS and folder(PIPELINES[0]).is_dir() and not folder(name).is_dir():
        raise FileNotFoundError(f"{name} has no weights here: examples/train_tiny_wan.py trains it")
    return installed_folder(name)


def call_arguments(name: str) -> dict[str, Any]:
    """Return the call arguments with which an embedded pipeline draws best; {} for any other name."""
    return dict(_CALL_ARGUMENTS.get(name, {}))
