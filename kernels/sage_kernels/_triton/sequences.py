"""Packed (variable-length) sequences: kernels read from cu_seqlens where each sequence lies.

cu_seqlens stays on the device, so the host does not know the lengths. Results of a sequence (codes, scales, programs)
lie in tiles of its own. A tile of BLOCK tokens takes one slot of the buffer. Sequence b has the tokens `cu[b]` to
`cu[b + 1]`, and its slots begin at `cu[b] // BLOCK + b`: then its tiles always fit before those of the next sequence.
All sequences together need at most `total // BLOCK + sequences` slots, so grids and buffers follow from shapes alone.
Invalid numbers in cu_seqlens give wrong results, but never an address outside of the tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Packed(NamedTuple):
    """The sequences of a packed call: where queries and keys of each begin.

    Attributes: cu_q, cu_k: int32 [sequences + 1], contiguous.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor

    @property
    def sequences(self) -> int:
        """How many sequences there are."""
        return self.cu_q.numel() - 1

    def slots(self, total: int, block: int) -> int:
        """Return an upper bound of the number of tiles of `block` tokens.

        One more tile is counted for rows behind the last sequence.
        """
        return total // block + self.sequences + 1


def packed_arguments(packed: Packed | None, none: torch.Tensor) -> tuple:
    """Return a kernel's arguments cu_q_ptr, cu_k_ptr and sequences.

    none: any tensor, passed in their place (and never read) if packed is None.
    """
    if packed is None:
        none = none.view(torch.int32)  # the same dtype as cu_q: no second kernel
        return none, none, 0
    return packed.cu_q, packed.cu_k, packed.sequences


_AT_ONCE = tl.constexpr(128)  # sequences looked at together


@triton.jit
def rows_of(b, cu_ptr, sequences, total):
    """Return the first row of sequence b and its number of rows, int32 scalars.

    b = sequences stands for the rows behind the last sequence.
    """
    first = tl.minimum(tl.maximum(tl.load(cu_ptr + b), 0), total)
    end = tl.load(cu_ptr + tl.minimum(b + 1, sequences))
    end = tl.where(b < sequences, tl.minimum(tl.maximum(end, first), total), total)
    return first, end - first


@triton.jit
def keys_of(b, cu_k_ptr, sequences, total, seq_q, left, HAS_LEFT: tl.constexpr):
    """Return the range of keys visible to sequence b, as int32 scalars.

    left: keys before its own position that a row sees (sliding window). seq_q: rows of the sequence.
    Returns: the first visible key; how many follow from there; the sequence's first token (`start` of `slot_of`); the
        position of row 0, counted from the first visible key. No keys belong to the rows behind the last sequence.
    """
    start, seq_kv = rows_of(b, cu_k_ptr, sequences, total)
    seq_kv = tl.where(b < sequences, seq_kv, 0)
    offset = seq_kv - seq_q
    hidden = 0
    if HAS_LEFT:
        hidden = tl.minimum(tl.maximum(offset - left, 0), seq_kv)
    return start + hidden, seq_kv - hidden, start, offset - hidden


@triton.jit
def slot_of(b, start, BLOCK):
    """Return the first slot of sequence b. start: the sequence's first token."""
    return start // BLOCK + b


@triton.jit
def sequence_of(slot, cu_ptr, sequences, total, BLOCK):
    """Return the sequence of a slot, or `sequences` for slots behind the last sequence."""
    before = tl.zeros([_AT_ONCE], tl.int32)
    for first in range(0, sequences, _AT_ONCE):
        i = first + tl.arange(0, _AT_ONCE)
        end = tl.load(cu_ptr + 1 + i, mask=i < sequences, other=0)
        end = tl.minimum(tl.maximum(end, 0), total)
        before += ((i < sequences) & (end // BLOCK + i + 1 <= slot)).to(tl.int32)
    return tl.sum(before, 0)
