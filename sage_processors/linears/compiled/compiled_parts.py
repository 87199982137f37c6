"""Parts of a model that torch.compile runs by themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn


def compiled_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield compiled modules of a model, the outermost ones alone."""
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            parts = module._modules
            if module._compiled_call_impl is not None or "_orig_mod" in parts:
                yield module
            elif parts:
                left.extend(parts.values())


def has_compiled_parts(model: nn.Module) -> bool:
    """True if something inside of the model, but not the model as a whole, is compiled."""
    return "torch._dynamo" in sys.modules and any(
        True for part in model._modules.values() if part is not None for _ in compiled_parts(part)
    )


def modules_in_compiled_parts(model: nn.Module) -> set[int]:
    """The ids of the model's modules that are compiled, by themselves or in another one."""
    return {id(module) for part in compiled_parts(model) for module in part.modules()}
