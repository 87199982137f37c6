"""Notices that torch.nn.Linear.forward or F.linear was replaced, which an 8-bit layer stands for."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _torchs(forward: Any) -> bool:
    return getattr(forward, "__globals__", None) is vars(torch.nn.modules.linear)


def _linear() -> Any:
    return F.linear if isinstance(F.linear, types.BuiltinFunctionType) else None


# None where another one is there already; a patch that is undone later is no patch then
FORWARD = nn.Linear.forward if _torchs(nn.Linear.forward) else None
LINEAR = _linear()


def is_replaced(base: Any) -> bool:
    """True if a linear layer of this class no longer runs torch's own functions."""
    return not _torchs(base.forward) or _linear() is None


def call_replaced(base: Any, module: nn.Module, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Call the replaced forward of a layer, with another weight."""
    twin = object.__new__(base)
    parameters = module._parameters | {"weight": nn.Parameter(weight, requires_grad=False)}
    twin.__dict__.update(module.__dict__, _parameters=parameters)
    made: torch.Tensor = base.forward(twin, x)
    return made
