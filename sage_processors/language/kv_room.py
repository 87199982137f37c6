"""Sizes of the buffers of a cache that makes room in few steps."""

from __future__ import annotations


LEAST_ROOM = 256  # a growing cache borrows buffers for at least so many tokens
STEPS_PER_OCTAVE = 4  # sizes of buffers between a number of tokens and twice as many


def bucket(tokens: int) -> int:
    """Return the capacity of the buffers for a growing cache of this many tokens, the next one included."""
    step = max(LEAST_ROOM, (1 << max(tokens.bit_length() - 1, 0)) // STEPS_PER_OCTAVE)
    return -(-tokens // step) * step
