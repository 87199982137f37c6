"""Which model a file was written for, whatever its weights are."""

from __future__ import annotations

import hashlib
import json
from typing import Any


# What transformers adds to a config that is no property of the model.
_PASSING = ("transformers_version", "dtype", "torch_dtype", "architectures")


def config_hash(model) -> str:
    """sha256 of a model's public config, hex; of its class name for a model without one."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        config = {k: v for k, v in config.to_dict().items() if k not in _PASSING}
    public = {k: v for k, v in dict(config).items() if not k.startswith("_")} if config is not None else {}
    text = json.dumps([model.__class__.__name__, public], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
