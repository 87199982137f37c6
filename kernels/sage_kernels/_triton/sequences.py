"""Packed sequences: where each lies among the rows of q, k and v, read by the kernels from cu_seqlens on the device.

What the kernels make of a sequence (codes, scales, programs) lies in tiles of its own. Sequence b, whose tokens are
`cu[b]` to `cu[b + 1]`, has the slots from `cu[b] // BLOCK + b` on, one a tile. So its tiles fit before those of the
next one, whatever the lengths are, and all together are at most `total // BLOCK + sequences`: grids and buffers
follow from shapes alone. Numbers in cu_seqlens that no lengths give make wrong results, but no address outside of the
tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Packed(NamedTuple):
    """The sequences of a packed call. cu_q, cu_k: int32 [sequences + 1], contiguous."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor

    @property
    def sequences(self) -> int:
        return self.cu_q.numel() - 1

    def slots(self, total: int, block: int) -> int:
        """Tiles of so many tokens that all sequences have at most, and one for what lies behind the last of them."""
        return total // block + self.sequences + 1


def packed_arguments(packed: Packed | None, none: torch.Tensor) -> tuple:
    """cu_q_ptr, cu_k_ptr and sequences of a kernel; none: any tensor, where there are no sequences."""
    if packed is None:
        none = none.view(torch.int32)  # one type with and without: a kernel is compiled for types
        return none, none, 0
    return packed.cu_q, packed.cu_k, packed.sequences


_AT_ONCE = tl.constexpr(128)


@triton.jit
def rows_of(b, cu_ptr, sequences, total):
    """First row of sequence b and how many it has; behind the last sequence: all rows that are left. int32 scalars."""
    first = tl.minimum(tl.maximum(tl.load(cu_ptr + b), 0), total)
    end = tl.load(cu_ptr + tl.minimum(b + 1, sequences))
    end = tl.where(b < sequences, tl.minimum(tl.maximum(end, first), total), total)
    return first, end - first


@triton.jit
def keys_of(b, cu_k_ptr, sequences, total, seq_q, left, HAS_LEFT: tl.constexpr):
    """First key of sequence b that any of its seq_q rows sees, how many there are from it on, its slots' first token,
    and the position of row 0 among the keys that are seen. No keys behind the last sequence. int32 scalars."""
    start, seq_kv = rows_of(b, cu_k_ptr, sequences, total)
    seq_kv = tl.where(b < sequences, seq_kv, 0)
    offset = seq_kv - seq_q
    hidden = 0
    if HAS_LEFT:
        hidden = tl.minimum(tl.maximum(offset - left, 0), seq_kv)
    return start + hidden, seq_kv - hidden, start, offset - hidden


@triton.jit
def slot_of(b, start, BLOCK):
    """The first slot of sequence b, whose first token is `start`."""
    return start // BLOCK + b


@triton.jit
def sequence_of(slot, cu_ptr, sequences, total, BLOCK):
    """The sequence that a slot belongs to; `sequences` for those behind the last one."""
    before = tl.zeros([_AT_ONCE], tl.int32)
    for first in range(0, sequences, _AT_ONCE):
        i = first + tl.arange(0, _AT_ONCE)
        end = tl.load(cu_ptr + 1 + i, mask=i < sequences, other=0)
        end = tl.minimum(tl.maximum(end, 0), total)
        before += ((i < sequences) & (end // BLOCK + i + 1 <= slot)).to(tl.int32)
    return tl.sum(before, 0)
