"""What a program tells the state of its queries, and what it takes from it for the maxima of their rows."""

import triton
import triton.language as tl

from ...facts.state import STAT_FIELDS, STAT_K_MAX, STAT_K_MIN, STAT_Q_AMAX
from ..primitives import record_amax


_STATS = tl.constexpr(STAT_FIELDS)
_STAT_Q_AMAX = tl.constexpr(STAT_Q_AMAX)
_STAT_K_MAX = tl.constexpr(STAT_K_MAX)
_STAT_K_MIN = tl.constexpr(STAT_K_MIN)


@triton.jit
def record_queries(q, stats_ptr, row_ptr, h_kv, state_width, channels, HEAD_DIM: tl.constexpr):
    """Per-channel amax of this tile's queries, into the state."""
    row = tl.load(row_ptr) + h_kv
    stat = stats_ptr + row * (_STATS * state_width) + _STAT_Q_AMAX * state_width
    record_amax(stat, tl.max(tl.abs(q), 0), channels, HEAD_DIM)


@triton.jit
def to_midrange(center, stats_ptr, row_ptr, h_kv, state_width, channels, HEAD_DIM: tl.constexpr):
    """The smoothing vector less the midrange of each channel of K in this call, [WIDTH].

    Row maxima are kept as max scores (log2) with K centred on the midrange. The smoothing vector would not do: it is
    the midrange of an earlier call, and moves from step to step with the outliers that it was made of, and with it
    every score of a row by q · the move. The midrange of this call is known as soon as K is quantised.
    """
    is_channel = channels < HEAD_DIM
    stat = stats_ptr + (tl.load(row_ptr) + h_kv) * (_STATS * state_width) + channels
    high = tl.load(stat + _STAT_K_MAX * state_width, mask=is_channel, other=0.0)
    low = tl.load(stat + _STAT_K_MIN * state_width, mask=is_channel, other=0.0)
    return center - (high * 0.5 + low * 0.5)  # no overflow
