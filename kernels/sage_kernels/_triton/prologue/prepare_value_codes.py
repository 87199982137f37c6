"""Quantise V in the prologue for P·V in INT8: centre, scale, round, transpose and permute.

Codes are stored as in prepare_values.py. Softmax weights sum to 1. So a vector common to all values of a head may be
subtracted, and added to the output: here the centre, the mean of a sample. A channel's scale is its largest distance
to the centre over 127. A launch of its own finds how far values reach, even if K's scales are planned: INT8 has no
room for values that grew, and clipping cost more than that launch (kernels/NOTES.md).

Rounding errors have a mean: 16-bit values lie on a grid, and the centre is in general not a point of it. Softmax
averages many values and would keep that mean, so it is added to the centre ("lost" below). Not with a mask, under
which keys have very different weights.

INT8 has no code for NaN and inf. So each program writes its part of that mean, or NaN if it met one of these, for the
attention kernel to add to the output.
"""

import triton
import triton.language as tl

from ...facts import recipe
from ...facts.masking import FAINT
from ..launch import buffer, launch
from ..primitives import AMAX_FLOOR, CENTER_SAMPLES, CENTER_STEPS, INT8_MAX, ROUND_MAGIC, round_to_int
from .mask_tiles import MaskTiles
from .prepare_values import (
    AMAX_ROWS,
    KEYS,
    QUADS,
    _load,
    _load_step,
    _seen_step,
    _step_tokens,
    _store_step,
    chunk_of,
)


_V_AMAX_FLOOR = tl.constexpr(recipe.V_AMAX_FLOOR)
_FAINT = tl.constexpr(FAINT)
_ROWS = tl.constexpr(32)  # rows of numbers loaded at once
_FOUND = tl.constexpr(4)  # numbers of a channel in a chunk: see `_reach_of`

_OFFSET = tl.constexpr(float(recipe.P_CODE_OFFSET))

# A head's numbers, fp32 [rows, WIDTH]: one row for the scale, one for the centre, one for each LOST_STEPS steps (part
# of the mean rounding error, or NaN), and one for each tile of BLOCK_N keys (`sums_of`).
LOST_STEPS = tl.constexpr(4)
FIRST_LOST = tl.constexpr(2)


def value_rows(n_steps: int, block_n: int) -> int:
    """Return the number of rows of a head's numbers."""
    return FIRST_LOST.value + -(-n_steps // LOST_STEPS.value) + n_steps * (KEYS.value // block_n)


@triton.jit
def rows_before_sums(seq_kv):
    """Return how many rows of a head's numbers precede those of its tiles, and how many steps it has."""
    n_steps = tl.cdiv(seq_kv, KEYS)
    return tl.cdiv(n_steps, LOST_STEPS) + FIRST_LOST, n_steps


@triton.jit
def numbers_of(numbers_ptr, kv_head_of_batch, seq_kv, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Return the address of a head's numbers."""
    before, n_steps = rows_before_sums(seq_kv)
    return numbers_ptr + kv_head_of_batch.to(tl.int64) * (before + n_steps * (KEYS // BLOCK_N)) * WIDTH


@triton.jit
def sums_of(numbers_ptr, kv_head_of_batch, seq_kv, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Return the address of the numbers of a head's tiles, [tiles, WIDTH].

    Each is 128 times the sum of a channel's codes in a tile, since P's codes are stored less 128, minus ROUND_MAGIC,
    which the attention kernel adds when it makes floats of integers. Exact.
    """
    before, _ = rows_before_sums(seq_kv)
    return numbers_of(numbers_ptr, kv_head_of_batch, seq_kv, BLOCK_N, WIDTH) + before * WIDTH


@triton.jit
def _seen_and_counted(tokens, end, reach_ptr, HAS_MASK: tl.constexpr):
    """Return masks of the tokens visible to some row, and of those that count for centre and scales."""
    is_seen = tokens < end
    is_counted = is_seen
    if HAS_MASK:
        reach = tl.load(reach_ptr + tokens, mask=is_seen, other=float("-inf"))
        is_seen = reach > float("-inf")
        is_counted = reach > _FAINT
    return is_seen, is_counted


@triton.jit
def _seen_step_of(first, end, reach_ptr, HAS_MASK: tl.constexpr):
    """Return a mask of the visible values of one step, [QUADS, 1, 4]."""
    t0, t1, t2, t3 = _step_tokens(first)
    x0, _ = _seen_and_counted(t0, end, reach_ptr, HAS_MASK)
    x1, _ = _seen_and_counted(t1, end, reach_ptr, HAS_MASK)
    x2, _ = _seen_and_counted(t2, end, reach_ptr, HAS_MASK)
    x3, _ = _seen_and_counted(t3, end, reach_ptr, HAS_MASK)
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (QUADS, 4))[:, None, :]


@triton.jit
def _sampled(v_base, channels, stride_vs, extent, reach_ptr, i, HEAD_DIM: tl.constexpr, HAS_MASK: tl.constexpr):
    """Load sampled values for the centre, 0 for uncounted tokens; also 1 for each counted token."""
    whole = extent // CENTER_SAMPLES
    tokens = i * whole + i * (extent % CENTER_SAMPLES) // CENTER_SAMPLES + i % tl.maximum(whole, 1)
    v = _load(v_base, tokens, channels, stride_vs, tl.maximum(extent, 1), HEAD_DIM).to(tl.float32)
    counted = tokens * 0 + 1
    if HAS_MASK:
        _, is_counted = _seen_and_counted(tokens, extent, reach_ptr, True)
        v = tl.where(is_counted[:, None], v, 0.0)
        counted = is_counted.to(tl.int32)
    return tl.where(v * 0.0 == 0.0, v, 0.0), counted


@triton.jit
def _value_center(v_base, channels, stride_vs, extent, reach_ptr, HEAD_DIM: tl.constexpr, HAS_MASK: tl.constexpr,
                  PV: tl.constexpr):  # fmt: skip
    """Return the centre of V per channel, as `numerics.value_center`; 0 for PV "int8_tensor".

    Summed as integers, so the order of the sum does not matter.
    """
    if PV == "int8_tensor":
        return tl.zeros([channels.shape[0]], tl.float32)
    i = tl.arange(0, CENTER_SAMPLES)
    v, counted = _sampled(v_base, channels, stride_vs, extent, reach_ptr, i, HEAD_DIM, HAS_MASK)
    amax = tl.maximum(tl.max(tl.abs(v), 0), AMAX_FLOOR)
    inverse = tl.div_rn(amax * 0.0 + CENTER_STEPS, amax)
    total = tl.sum(round_to_int(v * inverse[None, :]), 0)
    steps = CENTER_STEPS * tl.maximum(tl.sum(counted, 0), 1).to(tl.float32)
    return total.to(tl.float32) * tl.div_rn(amax, amax * 0.0 + steps)


@triton.jit
def _reach_of(v_base, first, end, channels, stride_vs, reach_ptr, HEAD_DIM: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the largest v and -v per channel in tokens first to end; -inf if there is none.

    Four results: v and -v of the tokens that count for scales, then of all visible ones. NaN and inf are ignored.
    """
    nothing = tl.full([AMAX_ROWS, channels.shape[0]], float("-inf"), tl.float32)
    counting_high = nothing
    counting_low = nothing
    high = nothing
    low = nothing
    for token in range(first, end, AMAX_ROWS):
        tokens = token + tl.arange(0, AMAX_ROWS)
        v = _load(v_base, tokens, channels, stride_vs, end, HEAD_DIM).to(tl.float32)
        is_seen, is_counted = _seen_and_counted(tokens, end, reach_ptr, HAS_MASK)
        is_finite = tl.abs(v) < float("inf")
        is_seen = is_seen[:, None] & is_finite
        high = tl.maximum(high, tl.where(is_seen, v, nothing))
        low = tl.maximum(low, tl.where(is_seen, -v, nothing))
        if HAS_MASK:
            is_counted = is_counted[:, None] & is_finite
            counting_high = tl.maximum(counting_high, tl.where(is_counted, v, nothing))
            counting_low = tl.maximum(counting_low, tl.where(is_counted, -v, nothing))
    high = tl.max(high, 0)
    low = tl.max(low, 0)
    if HAS_MASK:
        counting_high = tl.max(counting_high, 0)
        counting_low = tl.max(counting_low, 0)
    else:
        counting_high = high
        counting_low = low
    return counting_high, counting_low, high, low


@triton.jit(do_not_specialize=["seq_kv", "kv_heads", "chunks", "chunk_keys", "stride_rb", "stride_rh"])
def _value_reach_kernel(
    v_ptr, found_ptr, stride_vb, stride_vs, stride_vh, reach_ptr, stride_rb, stride_rh, seq_kv, kv_heads, chunks,
    chunk_keys,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Write `_reach_of` of one chunk of keys. Grid: chunks of all heads."""
    chunk = tl.program_id(0) % chunks
    head_of_batch = tl.program_id(0) // chunks  # b * H_kv + h
    b = (head_of_batch // kv_heads).to(tl.int64)
    h = head_of_batch % kv_heads
    channels = tl.arange(0, WIDTH)
    v_base = v_ptr + b * stride_vb + h.to(tl.int64) * stride_vh
    if HAS_MASK:
        reach_ptr += b * stride_rb + h * stride_rh
    end = tl.minimum(chunk * chunk_keys + chunk_keys, seq_kv)
    counting_high, counting_low, high, low = _reach_of(
        v_base, chunk * chunk_keys, end, channels, stride_vs, reach_ptr, HEAD_DIM, HAS_MASK
    )
    found = found_ptr + tl.program_id(0).to(tl.int64) * _FOUND * WIDTH + channels
    tl.store(found, counting_high)
    tl.store(found + WIDTH, counting_low)
    tl.store(found + 2 * WIDTH, high)
    tl.store(found + 3 * WIDTH, low)


@triton.jit
def _distance(found, center, chunk, chunks, WIDTH: tl.constexpr):
    """Return the largest |v - centre| in some chunks, from results of `_value_reach_kernel`; 0 if none."""
    is_one = (chunk < chunks)[:, None]
    high = tl.max(tl.load(found, mask=is_one, other=float("-inf")), 0)
    low = tl.max(tl.load(found + WIDTH, mask=is_one, other=float("-inf")), 0)
    return tl.maximum(tl.maximum(high - center, low + center), 0.0)


@triton.jit
def _found_distance(found_ptr, center, channels, chunks, WIDTH: tl.constexpr):
    """Return `_distance` over all chunks: of the keys that count for scales, and of all visible ones."""
    counting = tl.zeros([channels.shape[0]], tl.float32)
    seen = tl.zeros([channels.shape[0]], tl.float32)
    for first in range(0, chunks, AMAX_ROWS):
        chunk = first + tl.arange(0, AMAX_ROWS)
        found = found_ptr + chunk[:, None] * (_FOUND * WIDTH) + channels[None, :]
        counting = tl.maximum(counting, _distance(found, center, chunk, chunks, WIDTH))
        seen = tl.maximum(seen, _distance(found + 2 * WIDTH, center, chunk, chunks, WIDTH))
    return counting, seen


@triton.jit
def prepare_value_codes(
    program, v_ptr, codes_ptr, numbers_ptr, found_ptr, stride_vb, stride_vs, stride_vh, reach_ptr, extent_ptr,
    stride_rb, stride_rh, padded, seq_kv, kv_heads, chunks, spans, steps, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, CHANNELS: tl.constexpr, HAS_MASK: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    """Quantise `steps` steps of CHANNELS channels of one head to INT8. steps: a multiple of LOST_STEPS."""
    span = program % spans
    part = program // spans % (WIDTH // CHANNELS)
    head_of_batch = program // spans // (WIDTH // CHANNELS)  # b * H_kv + h
    b = (head_of_batch // kv_heads).to(tl.int64)
    h = head_of_batch % kv_heads
    channels = part * CHANNELS + tl.arange(0, CHANNELS)
    v_base = v_ptr + b * stride_vb + h.to(tl.int64) * stride_vh
    extent = seq_kv
    if HAS_MASK:
        at = b * stride_rb + h * stride_rh
        extent = tl.load(extent_ptr + at // padded)
        reach_ptr += at
    n_steps = tl.cdiv(seq_kv, KEYS)
    first_step = span * steps
    end_step = tl.minimum(first_step + steps, n_steps)
    end = tl.minimum(end_step * KEYS, seq_kv)

    center = _value_center(v_base, channels, stride_vs, extent, reach_ptr, HEAD_DIM, HAS_MASK, PV)
    found_ptr += head_of_batch.to(tl.int64) * chunks * _FOUND * WIDTH
    OFFSET: tl.constexpr = _OFFSET if PV == "int8" else 0.0
    if PV == "int8":
        counting, seen = _found_distance(found_ptr, center, channels, chunks, WIDTH)
    else:  # one scale for the whole head; its centre is 0
        counting, seen = _found_distance(found_ptr, 0.0, tl.arange(0, WIDTH), chunks, WIDTH)
        counting = tl.zeros([CHANNELS], tl.float32) + tl.max(counting, 0)
        seen = tl.zeros([CHANNELS], tl.float32) + tl.max(seen, 0)
    # of the counting keys, or if they are all at the centre, of all visible ones
    amax = tl.where(counting > 0, counting, seen)
    amax = tl.maximum(amax, _V_AMAX_FLOOR)
    inverse = tl.div_rn(amax * 0.0 + INT8_MAX, amax)
    scale = tl.div_rn(amax, amax * 0.0 + INT8_MAX)
    share = 0.0
    if PV == "int8" and not HAS_MASK:
        share = 1.0 / seq_kv.to(tl.float32)
    sums = sums_of(numbers_ptr, head_of_batch, seq_kv, BLOCK_N, WIDTH) + channels[None, :]
    numbers_ptr = numbers_of(numbers_ptr, head_of_batch, seq_kv, BLOCK_N, WIDTH) + channels
    TILES: tl.constexpr = KEYS // BLOCK_N
    tiles = tl.arange(0, TILES)[:, None] * WIDTH
    if span == 0:
        tl.store(numbers_ptr, tl.where(channels < HEAD_DIM, scale, 1.0))
        tl.store(numbers_ptr + WIDTH, center)

    codes = codes_ptr + head_of_batch.to(tl.int64) * n_steps * (WIDTH * KEYS)
    codes += channels[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    lost = tl.zeros([QUADS, CHANNELS], tl.float32)
    for step in range(first_step, end_step):
        loaded = _load_step(v_base, step * KEYS, channels, stride_vs, end, HEAD_DIM)
        x, _ = _seen_step(loaded, step * KEYS, end, reach_ptr, False)
        is_seen = _seen_step_of(step * KEYS, end, reach_ptr, HAS_MASK)
        bad = tl.where(is_seen, x * 0.0, 0.0)
        x = tl.where(is_seen, x - center[None, :, None], 0.0)
        y = x * inverse[None, :, None]
        y = tl.where(y == y, tl.minimum(tl.maximum(y, -INT8_MAX), INT8_MAX), 0.0)
        y = round_to_int(y)
        lost += tl.sum(bad + (x - y.to(tl.float32) * scale[None, :, None]) * share, 2)
        _store_step(codes + step * (WIDTH * KEYS), y.to(tl.int8))
        total = tl.sum(tl.reshape(tl.sum(y, 2), (TILES, QUADS // TILES, CHANNELS)), 1).to(tl.float32)
        tl.store(sums + step * (TILES * WIDTH) + tiles, total * OFFSET - ROUND_MAGIC)
    total_lost = tl.sum(lost, 0)
    for step in range(first_step, end_step, LOST_STEPS):
        tl.store(numbers_ptr + (step // LOST_STEPS + FIRST_LOST) * WIDTH, total_lost)
        total_lost = tl.zeros([CHANNELS], tl.float32)  # the first of this program's rows holds the sum, the others 0


@triton.jit
def value_numbers(numbers_ptr, kv_head_of_batch, seq_kv, channels, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Load scale and centre of V's channels; the centre is NaN if a value of the channel is not finite."""
    rows = tl.cdiv(tl.cdiv(seq_kv, KEYS), LOST_STEPS)
    numbers_ptr = numbers_of(numbers_ptr, kv_head_of_batch, seq_kv, BLOCK_N, WIDTH) + channels
    scale = tl.load(numbers_ptr)
    lost = tl.zeros([_ROWS, WIDTH], tl.float32)
    for first in range(0, rows, _ROWS):
        row = first + tl.arange(0, _ROWS)
        at = numbers_ptr[None, :] + (row + FIRST_LOST)[:, None] * WIDTH
        lost += tl.load(at, mask=(row < rows)[:, None], other=0.0)
    return scale, tl.load(numbers_ptr + WIDTH) + tl.sum(lost, 0)


def launch_value_reach(v, *, mask: MaskTiles, width: int):
    """Find V's largest v and -v per channel and chunk of keys, for `prepare_value_codes`.

    Returns: fp32 [B·H_kv, chunks, 4, width], see `_reach_of`.
    """
    batch, seq_kv, kv_heads, head_dim = v.shape
    chunk_keys = chunk_of(seq_kv)
    chunks = -(-seq_kv // chunk_keys)
    found = buffer(batch * kv_heads, chunks, _FOUND.value, width, device=v.device)
    has_mask = mask.reach is not None
    launch(
        _value_reach_kernel, chunks * batch * kv_heads,
        v, found, v.stride(0), v.stride(1), v.stride(2), mask.reach if has_mask else found, *mask.reach_strides,
        seq_kv, kv_heads, chunks, chunk_keys,
        HEAD_DIM=head_dim, WIDTH=width, HAS_MASK=has_mask, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return found
