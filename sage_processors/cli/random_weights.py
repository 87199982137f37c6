"""Build pipelines with random weights from their configs, to time what is not on the disk."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checks import refusing
from .loading import locate, quiet_diffusers


if TYPE_CHECKING:
    import torch

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # what a tokenizer and a config are made of


def random_pipeline(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a pipeline with random weights of the true shapes.

    name: a folder or a Hub name, of which no weights are read.

    Raises: typer.BadParameter for a name without such configs.
    """
    diffusers = quiet_diffusers()
    source = locate(name)
    with refusing(name):
        if not Path(source).is_dir():
            from huggingface_hub import snapshot_download

            source = snapshot_download(source, allow_patterns=SMALL_FILES)
        index = json.loads((Path(source) / "model_index.json").read_text(encoding="utf-8"))
        parts = {
            part: _component(Path(source) / part, pair[0], pair[1], device, dtype)
            for part, pair in index.items()
            if isinstance(pair, list) and len(pair) == 2 and all(pair)
        }
        options = {key: value for key, value in index.items() if key[0] != "_" and not isinstance(value, list)}
        empty = {part: None for part, pair in index.items() if isinstance(pair, list) and not all(pair)}
        pipe = getattr(diffusers, index["_class_name"])(**empty | parts, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _component(folder: Path, library: str, class_name: str, device: torch.device, dtype: torch.dtype) -> Any:
    import torch

    of_transformers = importlib.import_module("transformers")
    kind: Any = getattr(importlib.import_module(library), class_name)
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        if hasattr(kind, "load_config"):  # a scheduler
            return kind.from_config(kind.load_config(folder))
        if "Tokenizer" in class_name:
            return of_transformers.AutoTokenizer.from_pretrained(folder)
        return of_transformers.AutoProcessor.from_pretrained(folder)
    build: Any = kind
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            if hasattr(kind, "load_config"):
                made = build.from_config(build.load_config(folder))
            else:
                made = build(of_transformers.AutoConfig.from_pretrained(folder))
    finally:
        torch.set_default_dtype(before)
    return made.to(device, dtype).eval()
