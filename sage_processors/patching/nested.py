"""Arguments and results of a model: tensors and plain values in tuples, lists, dicts and diffusers' outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch


PLAIN = (str, int, float, complex, type(None), torch.dtype, torch.device)  # a bool is an int


class UnknownValueError(Exception):
    """Somewhere in there is something else."""


def kind_of(value: Any) -> tuple[Any, ...]:
    """Shapes and types of tensors, values of everything else, and how these are put together. Hashable."""
    if type(value) is torch.Tensor:
        return value.shape, value.dtype, value.device
    if isinstance(value, PLAIN):
        return type(value), value
    return type(value), *((name, kind_of(x)) for name, x in _items(value))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors, in the order of `kind_of`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, PLAIN):
        for _, x in _items(value):
            yield from tensors_of(x)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PLAIN):
        return value
    found = {name: mapped(x, change) for name, x in _items(value)}
    if isinstance(value, dict):
        return found if type(value) is dict else type(value)(**found)
    return type(value)(found.values())


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Raises: UnknownValueError for what is no container that could be made again."""
    if type(value) in (tuple, list):
        return list(enumerate(value))
    if type(value) is dict or (isinstance(value, dict) and dataclasses.is_dataclass(value)):
        return list(value.items())
    raise UnknownValueError
