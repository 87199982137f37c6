"""The two small trained pipelines that come with the package, as diffusers `save_pretrained` folders.

They draw coloured shapes at 128x128 pixels ("a red circle on a blue background");
`examples/train_tiny.py` trained them.
"""

from __future__ import annotations

from pathlib import Path


_ROOT = Path(__file__).resolve().parent
# tiny_flux was trained with one prompt in ten left empty, and draws clean shapes only with guidance.
_CALL_ARGUMENTS = {"tiny_flux": {"negative_prompt": "", "true_cfg_scale": 3.0}}


def names() -> list[str]:
    """Names of the embedded pipelines, sorted."""
    return sorted(folder.parent.name for folder in _ROOT.glob("*/model_index.json"))


def path(name: str) -> Path:
    """Folder of an embedded pipeline, for `DiffusionPipeline.from_pretrained`.

    Raises TypeError if `name` is no string and ValueError if no embedded pipeline has that name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected one of {names()} as str, got {type(name).__name__}")
    if name not in names():
        raise ValueError(f"name: expected one of {names()}, got {name!r}")
    return _ROOT / name


def call_arguments(name: str) -> dict:
    """Arguments with which an embedded pipeline draws best; empty for any other name."""
    return dict(_CALL_ARGUMENTS.get(name, {}))
