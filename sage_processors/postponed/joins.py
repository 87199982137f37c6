"""Postponed torch.cat of two inputs of a block that lie next to each other in memory.

Single-stream blocks, such as FLUX's, concatenate text and image, and return slices of their result. The next block
concatenates these slices again: kernels read them where they are.
"""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels.compat import are_ordinary

from .casts import Castable, may_share_memory
from .patterns import CATS, bound
from .region import in_thread
from .tensor import ChangedInputError, Postponed, can_wait


class SequencePart(Postponed):
    """One of two inputs of a block, x [B, S_i, C], next to each other in memory. Anybody gets x itself.

    Attributes: pair: Pair, the same object for both. place: 0 for the first part, 1 for the second.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, pair: Pair, place: int):
        self.pair, self.place = pair, place

    def _compute(self) -> torch.Tensor:
        return self.pair.tensors[self.place]

    @classmethod
    def _knows(cls, func: Any) -> Any:
        return _cat if func in CATS else None


class Pair:
    """Two neighbouring tensors [B, S_1, C] and [B, S_2, C], and `whole`, a view [B, S_1 + S_2, C] of both."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor):
        batch, rows, channels = first.shape[0], first.shape[1] + second.shape[1], first.shape[2]
        self.tensors = (first, second)
        self.whole = first.as_strided((batch, rows, channels), (rows * channels, channels, 1))

    @property
    def writes(self) -> int:
        """How often somebody wrote to either of them, which may count apart."""
        return sum(x._version for x in self.tensors)

    def part(self, place: int) -> SequencePart:
        """Return the first or the second one as a part."""
        x = self.tensors[place]
        made: SequencePart = SequencePart(x.shape, x.dtype, x.device, self, place)
        return made


class JoinedParts(Castable):
    """The postponed result of torch.cat of both parts along the sequence.

    Kernels read both parts where they are; code that might write to the result gets a copy.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, pair: Pair):
        self._pair, self._writes = pair, pair.writes

    @property
    def writes(self) -> int:
        return self._pair.writes

    def _refuse_stale(self) -> None:
        if self.writes != self._writes:
            raise ChangedInputError(
                f"input {tuple(self._shape)} of a block: got a tensor that was written to in place between torch.cat "
                'and the use of its result, expected it unchanged; keep linear layers in 16 bit: linears="none"'
            )

    def _compute(self) -> torch.Tensor:
        self._refuse_stale()
        return torch.cat(self._pair.tensors, 1)

    def stored(self) -> torch.Tensor | None:
        if self._is_out:
            return None
        self._refuse_stale()
        return self._pair.whole


def _cat(args: Any, kwargs: Any) -> JoinedParts | None:
    """Postpone torch.cat of both parts; None for any other call."""
    given = bound({"tensors": None, "dim": 0}, args, kwargs)
    tensors = None if given is None else given["tensors"]
    if given is None or not isinstance(tensors, (list, tuple)) or given["dim"] not in (1, -2):
        return None
    if len(tensors) != 2 or any(type(x) is not SequencePart or x._is_out for x in tensors):
        return None
    first, second = tensors
    if first.pair is not second.pair or (first.place, second.place) != (0, 1) or in_thread.region is None:
        return None
    in_thread.region.has_joins = True
    whole = first.pair.whole
    made: JoinedParts = JoinedParts(whole.shape, whole.dtype, whole.device, first.pair)
    return made


def _are_neighbours(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if the second tensor [B, S_2, C] lies right behind the first one [B, S_1, C] in memory.

    Together they are one contiguous tensor [B, S_1 + S_2, C].
    """
    shape, strides = first.shape, first.stride()
    if second.stride() != strides or second.shape[::2] != shape[::2] or first.dtype != second.dtype:
        return False
    row = shape[2]
    if strides[1:] != (row, 1) or (shape[0] > 1 and strides[0] != (shape[1] + second.shape[1]) * row):
        return False
    return second.data_ptr() - first.data_ptr() == shape[1] * row * first.element_size()


def with_parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return a block's arguments with two neighbours as SequenceParts; None if there are no such tensors.

    No third tensor may have their memory, as the block could write to it under another name. In eager calls on a GPU
    the host would spend more time on this than the GPU saves: there it is for calls that a CUDA graph captures.
    """
    given: Any = next((x for x in (*args, *kwargs.values()) if type(x) is torch.Tensor), None)
    if given is None or (given.is_cuda and not torch.cuda.is_current_stream_capturing()):
        return None
    found = [x for x in (*args, *kwargs.values()) if type(x) is torch.Tensor and x.dim() == 3]
    if len(found) < 2 or not are_ordinary(found) or not all(map(can_wait, found)):
        return None
    memory = [x.untyped_storage().data_ptr() for x in found]
    pair = [x for x, place in zip(found, memory, strict=True) if memory.count(place) == 2]
    if len(pair) != 2 or pair[0] is pair[1]:
        return None
    first, second = sorted(pair, key=torch.Tensor.data_ptr)
    if not _are_neighbours(first, second):
        return None
    if may_share_memory(first, (args, kwargs), (first, second)):
        return None
    made = Pair(first, second)
    parts = {id(x): made.part(place) for place, x in enumerate(made.tensors)}
    return (
        tuple(parts.get(id(x), x) for x in args),
        {name: parts.get(id(x), x) for name, x in kwargs.items()},
    )
