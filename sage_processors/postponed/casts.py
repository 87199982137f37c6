"""Postponed casts to a wider dtype: kernels that read the narrower numbers compute the same.

Some models, such as Wan, keep 16 bit between their layers, and cast to fp32 for each norm and each sum.
"""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels.compat import are_ordinary

from ..patching.nested import UnknownValueError, tensors_of
from .patterns import FLOATS
from .region import in_thread
from .tensor import ChangedInputError, Contiguous, Postponed, can_wait, ordinary_in


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

    @property
    def writes(self) -> int:
        """How often somebody else has written to the numbers; 0 where nobody can."""
        return 0

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
        self._writes = source.writes
        if in_thread.region is not None:
            in_thread.region.has_casts = True

    def _compute(self) -> torch.Tensor:
        self._refuse_stale()
        return self._source.value().to(self._dtype)

    def _refuse_stale(self) -> None:
        if self._source.writes != self._writes:
            raise ChangedInputError(
                f"input {tuple(self._shape)} of a block: got a tensor that was written to in place between a cast and "
                'its use, expected it unchanged; keep linear layers in 16 bit: linears="none"'
            )

    def _reads(self, other: Postponed) -> bool:
        return other is self._source

    def stored(self) -> torch.Tensor | None:
        if self._is_out:
            return None
        self._refuse_stale()
        return self._source.stored()


class BlockInput(Castable):
    """The tensor a block was called with. Its casts to a wider dtype may be postponed."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, x: torch.Tensor):
        self._x = x

    @property
    def writes(self) -> int:
        return self._x._version

    def _compute(self) -> torch.Tensor:
        return self._x


def may_share_memory(x: torch.Tensor, values: Any, known: tuple[torch.Tensor, ...] = ()) -> bool:
    """Return True if a tensor in nested values, other than those in `known`, may have the memory of x."""
    try:
        others = [other for other in tensors_of(values) if not any(other is y for y in known)]
    except UnknownValueError:
        return True
    if not are_ordinary((x, *others)):  # batched or fake tensors can't be asked
        return True
    memory = x.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == memory for other in others)


def with_castable_input(args: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a block's positional arguments with the first one as a BlockInput, if it can be one.

    others: its other arguments. If one of them has the same memory, the block may write to it under another name.
    """
    x: Any = args[0] if args else None
    if not can_wait(x) or x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous():
        return args
    if may_share_memory(x, (args[1:], others)):
        return args
    return (BlockInput(x.shape, x.dtype, x.device, x), *args[1:])
