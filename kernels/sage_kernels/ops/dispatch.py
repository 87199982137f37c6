"""Registration of the ops, calls through PyTorch's dispatcher, and results that need no launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..checks.tensors import without_tangents
from ..compat import differentiates_forward


_library = torch.library.Library("sage_kernels", "FRAGMENT")


def register(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], devices: Iterable[str] = ("CPU", "CUDA")
) -> None:
    """Register an op: its schema, what runs it on these devices, and its results for fake tensors."""
    _library.define(schema)
    name = schema.partition("(")[0]
    for device in devices:
        _library.impl(name, run, device)
    torch.library.register_fake(f"sage_kernels::{name}", fake, lib=_library)


def register_backward(name: str, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
    """Register the backward of an op; `save` keeps what it needs of a call."""
    torch.library.register_autograd(f"sage_kernels::{name}", backward, setup_context=save, lib=_library)


def call_op(name: str, arguments: Iterable[Any]) -> Any:
    """Call an op of `torch.ops.sage_kernels` with arguments that are checked and have no tangents."""
    op = getattr(torch.ops.sage_kernels, name)
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
