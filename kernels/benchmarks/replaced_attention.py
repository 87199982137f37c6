"""Models whose attention is something else for a while: every scaled_dot_product_attention of the process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.nn.functional


@contextmanager
def attention_as(function: Callable[..., torch.Tensor]):
    """`function` is called in its place, with its arguments."""
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = function
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def attention_removed():
    """It returns its queries."""
    return attention_as(_removed)


@torch.library.custom_op("sage_benchmarks::need", mutates_args=("query",))
def _need(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Nothing, but a compiler takes it that all three are read: else it leaves out what makes K and V."""


def _removed(query, key, value, *_, **__):
    if torch.compiler.is_compiling():
        _need(query, key, value)
    return query
