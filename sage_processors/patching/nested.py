"""Walk nested arguments and results of a model: tuples, lists, dicts and diffusers' outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


PLAIN = (str, int, float, complex, type(None), torch.dtype, torch.device)  # a bool is an int


class UnknownValueError(Exception):
    """Raised for a value that is neither a tensor, nor a plain value, nor a known container."""


def kind_of(value: Any) -> tuple[Any, ...]:
    """Return a hashable description: shape, dtype and device of tensors, plain values, and the nesting.

    Raises: UnknownValueError.
    """
    if type(value) is torch.Tensor:
        return value.shape, value.dtype, value.device
    if isinstance(value, PLAIN):
        return type(value), value
    return type(value), *((name, kind_of(x)) for name, x in _items(value))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors, in the order of `kind_of`. Raises: UnknownValueError."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, PLAIN):
        for _, x in _items(value):
            yield from tensors_of(x)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of the nested value with `change` applied to each tensor.

    Raises: UnknownValueError.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PLAIN):
        return value
    found = {name: mapped(x, change) for name, x in _items(value)}
    if isinstance(value, dict):
        return found if type(value) is dict else type(value)(**found)
    return type(value)(found.values())


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Return the (key, value) items of a container.

    Raises: UnknownValueError for anything that `mapped` could not rebuild.
    """
    if type(value) in (tuple, list):
        return list(enumerate(value))
    if type(value) is dict or (isinstance(value, dict) and dataclasses.is_dataclass(value)):
        return list(value.items())
    raise UnknownValueError
