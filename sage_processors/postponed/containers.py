"""Replaces postponed tensors by ordinary ones in a block's result, in containers too."""

from __future__ import annotations

import dataclasses
from typing import Any

from .tensor import Postponed


def ordinary(value: Any) -> Any:
    """`value` with ordinary tensors in place of postponed ones.

    The same object where it has none, and where it can be written to; `tensor.ordinary_in` is for arguments: it copies
    plain containers, and leaves all others as they are.
    """
    if isinstance(value, Postponed):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        found = [ordinary(x) for x in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        if isinstance(value, list):
            value[:] = found
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        for name, old in list(value.items()):
            new = ordinary(old)
            if new is not old:
                value[name] = new
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            new = ordinary(old)
            if new is not old:
                object.__setattr__(value, field.name, new)  # frozen or not: the same numbers
    return value
