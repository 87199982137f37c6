"""What leaves a model is computed: who called it gets ordinary tensors, whatever becomes of its layers next."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from .lazy import Lazy
from .weights import Shared


class LeavingHook:
    """Forward hook of a model: returns the output without lazy tensors, None where there were none.

    shared: weights.Shared, which is told that the forward is over.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    def install(self, model: nn.Module) -> Any:
        """Register it; an error ends a forward, too."""
        return model.register_forward_hook(self, prepend=True, always_call=True)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():  # nothing waits there
            return None
        self.shared.forget_activations()
        found = _ordinary(output)
        return None if found is output else found


def _ordinary(value: Any) -> Any:
    """`value` with ordinary tensors in place of lazy ones; the same object where it can be written to, or had none.

    `lazy.real_of` is for arguments: it copies plain containers, and leaves all others as they are.
    """
    if isinstance(value, Lazy):
        return value.real()
    if isinstance(value, (tuple, list)):
        found = [_ordinary(x) for x in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        if isinstance(value, list):
            value[:] = found
            return value
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if isinstance(value, dict):
        for name, old in list(value.items()):
            new = _ordinary(old)
            if new is not old:
                value[name] = new
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            new = _ordinary(old)
            if new is not old:
                object.__setattr__(value, field.name, new)  # frozen or not: the same numbers
    return value
