"""Hooks before and after the forward of a model with 8-bit linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sage_kernels.compat import keep_out_of_dynamo

from ..patching.patched import is_left
from .weights.linear_state import Shared


class PrepareHook:
    """Forward pre-hook of a model that makes or updates 8-bit weights before compiled code runs.

    In a copy of the model it makes none. The copy's layers make their own in eager calls; compiled code of a copy runs
    in 16 bit until the copy was called once or is given to `quantize_linears`.
    """

    def __init__(self, shared: Shared, swap: Any = None) -> None:
        self.shared, self.swap = shared, swap

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            _prepare(self, module)
        else:  # the model is compiled as a part of code around it
            self.shared.is_taken_in = True

    @property
    def is_leftover(self) -> bool:
        """True in a copy of the model."""
        return is_left(self.shared.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return PrepareHook, (self.shared,)


@torch.compiler.disable
def _prepare(hook: PrepareHook, module: nn.Module) -> None:
    with hook.shared.lock:
        if hook.swap is None:
            hook.shared.begin_forward(module)
        else:
            hook.swap._before_forward()


keep_out_of_dynamo(PrepareHook.__call__)


class EndHook:
    """Forward hook of a model that notes the end of its forward, after an error too."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    @property
    def is_leftover(self) -> bool:
        """True in a copy of the model."""
        return is_left(self.shared.owner)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.shared.replays.end()
