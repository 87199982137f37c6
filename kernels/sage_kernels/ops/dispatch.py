"""Shared by the attention ops: calls through PyTorch's dispatcher, and results that need no launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..checks.tensors import without_tangents
from ..compat import differentiates_forward


def call_op(op: Any, arguments: Iterable[Any]) -> Any:
    """Call an op of `torch.ops` with arguments that are checked and have no tangents."""
    if differentiates_forward():
        with without_tangents():
            return op(*arguments)
    return op(*arguments)


def attention_of_nothing(q: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of queries [..., H, D] without any key: zeros, and -inf or the sinks [H]."""
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    return q.new_zeros(q.shape), lse if sinks is None else torch.maximum(lse, sinks)


def fake_out(q: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return an output of q's shape, for PyTorch's tracing with fake tensors."""
    return q.new_empty(q.shape)


def fake_out_lse(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output of q's shape and a log-sum-exp without its last dimension, for fake tensors."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
