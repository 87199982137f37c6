"""Postponed casts to a wider dtype: kernels that read the narrower numbers compute the same.

Some models, such as Wan, keep 16 bit between their layers, and cast to fp32 for each norm and each sum.
"""

from __future__ import annotations

from typing import Any

import torch

from .patterns import FLOATS
from .region import in_thread
from .tensor import ChangedInputError, Contiguous, Operand, Postponed, can_wait, ordinary_in


class Addend(Contiguous):
    """A postponed result to which an 8-bit linear layer's output may be added in the matmul's kernel."""

    def stored(self) -> torch.Tensor | None:
        """Return the numbers as they are stored, maybe in a narrower dtype, for reading only.

        None if somebody may write to them, or may have done so.
        """
        raise NotImplementedError

    def __add__(self, other: Any) -> torch.Tensor:
        if isinstance(other, Postponed) and not isinstance(other, Addend):
            added: torch.Tensor = other + self
            return added
        return self.tensor() + ordinary_in(other)

    __radd__ = __add__


class Castable(Addend):
    """A result in 16 bit whose casts to a wider dtype may be postponed."""

    def stored(self) -> torch.Tensor | None:
        return None if self._is_out else self.value()

    def _cast(self, dtype: torch.dtype) -> torch.Tensor:
        if self._is_out or dtype not in FLOATS or torch.promote_types(dtype, self._dtype) != dtype:
            return self.tensor().to(dtype)
        made: torch.Tensor = PostponedCast(self._shape, dtype, self._device, self)
        return made


class PostponedCast(Addend):
    """A Castable in a wider dtype, which holds the same numbers."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, source: Castable):
        self._source = source
        if in_thread.region is not None:
            in_thread.region.has_casts = True

    def _compute(self) -> torch.Tensor:
        return self._source.value().to(self._dtype)

    def _reads(self, other: Postponed) -> bool:
        return other is self._source

    def stored(self) -> torch.Tensor | None:
        return None if self._is_out else self._source.stored()


class BlockInput(Castable):
    """The tensor a block was called with. Its casts to a wider dtype may be postponed."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, x: torch.Tensor):
        self._x = Operand(x)

    def value(self) -> torch.Tensor:
        if self._x.is_changed and not self._is_out:
            raise ChangedInputError(
                f"input {tuple(self._shape)} of a block: got a tensor that was written to in place between a cast and "
                'its use, expected it unchanged; keep linear layers in 16 bit: linears="none"'
            )
        return super().value()

    def _compute(self) -> torch.Tensor:
        return self._x.tensor


def with_castable_input(args: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a block's positional arguments with the first one as a BlockInput, if it can be one.

    others: its other arguments, which must not hold the same tensor.
    """
    x: Any = args[0] if args else None
    if not can_wait(x) or x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous():
        return args
    if any(x is other for other in (*args[1:], *others)):
        return args
    return (BlockInput(x.shape, x.dtype, x.device, x), *args[1:])
