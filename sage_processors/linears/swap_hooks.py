"""Hooks of a model with layers in 8 bit: before its forward and after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sage_kernels.compat import keep_out_of_dynamo

from ..patching.patched import is_left
from .weights.linear_state import Shared


class PrepareHook:
    """Forward pre-hook of a model: 8-bit weights are made, and made anew, before code that may be compiled.

    In a copy of the model it makes none: its layers look after themselves, and a compiled copy runs in 16 bit until
    it was called once or is given to `quantize_linears`.
    """

    def __init__(self, shared: Shared, swap: Any = None) -> None:
        self.shared, self.swap = shared, swap

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            _prepare(self, module, args, kwargs)
        else:  # taken in by compiled code around the model
            self.shared.is_taken_in = True

    @property
    def is_leftover(self) -> bool:
        """True in a copy of the model."""
        return is_left(self.shared.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return PrepareHook, (self.shared,)


@torch.compiler.disable
def _prepare(hook: PrepareHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with hook.shared.lock:
        if hook.swap is None:
            hook.shared.look_anew(module)
        else:
            hook.swap._before_forward(args, kwargs)


keep_out_of_dynamo(PrepareHook.__call__)


class EndHook:
    """Forward hook of a model: its forward is over, after an error too."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    @property
    def is_leftover(self) -> bool:
        """True in a copy of the model."""
        return is_left(self.shared.owner)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.shared.replays.end()
