"""Repeated blocks of a denoiser, and the object that takes over their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..host.innermost import own_forward, put_forward, take_out_forward


LEAST_MODULES = 4  # of a block; shorter ones, such as the zero convolutions of a ControlNet, gain nothing


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks in a model's lists of modules, and a U-Net's middle block."""
    found: list[nn.Module] = []
    for name, child in model.named_children():
        found += child if isinstance(child, nn.ModuleList) else [child] * (name == "mid_block")
    return [block for block in found if sum(1 for _ in block.modules()) >= LEAST_MODULES]


class BlockCall:
    """The forward of a block in the place of its own, so that its calls may come from CUDA graphs.

    It lies inside the hooks of diffusers' caches, which decide on the host if a block runs at all. A copy of the
    block runs its own forward.

    Attributes: answer: called with (args, kwargs) of each call; None runs the block's own forward.
    """

    def __init__(self, block: nn.Module, answer: Callable[..., Any] | None = None):
        self._block, self.answer = block, answer
        functools.update_wrapper(self, own_forward(block))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.answer is None or torch.compiler.is_compiling():
            return own_forward(self._block)(*args, **kwargs)
        return self.answer(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockCall, (self._block,)

    def put(self) -> bool:
        """Take over the block's forward. Returns False if it is compiled or the user's."""
        return self._block._compiled_call_impl is None and put_forward(self._block, self, replaced=BlockCall)

    def leave_if_compiled(self) -> None:
        """Take this out of a block that was compiled meanwhile, before the compiler sees it."""
        if self.answer is not None and self._block._compiled_call_impl is not None:
            self.take_out()

    def take_out(self) -> None:
        """Give the block's forward back. Whoever still has this object calls the block's own forward."""
        self.answer = None
        take_out_forward(self._block, self)
