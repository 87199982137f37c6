"""Where tests of combinations put their models: on the CPU, or with --on-gpu on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map


_device = torch.device("cpu")


def use_gpu(config: pytest.Config) -> None:
    """Put models on the GPU from now on, if --on-gpu was given."""
    global _device
    if config.getoption("--on-gpu"):
        _device = torch.device("cuda")


def device() -> torch.device:
    """The device of this run's models."""
    return _device


def placed(tree):
    """A tensor, a module, or dicts, lists and tuples of them, on that device."""
    return tree_map(lambda leaf: leaf.to(_device) if isinstance(leaf, (torch.Tensor, torch.nn.Module)) else leaf, tree)
