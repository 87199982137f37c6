"""The prologue of V for recipes with P·V in FP8: scale per channel, cast to e4m3, transpose, permute.

The tensor cores take both 8-bit operands with the summed dimension contiguous, so V is stored as [channels, keys]; and
keys are permuted inside each 16, so that P is in the operand's registers as the softmax left it
(`primitives.in_operand_order`). Zero beyond the sequence and the head, and where the mask hides a key from every row.

Two launches: the channels' amax, which a head with a plan skips, and the cast.
"""

import torch
import triton
import triton.language as tl

from .. import recipe
from ..masking import FAINT
from ..state import (
    COUNT_CLIPPED,
    COUNT_FIELDS,
    COUNT_PLAN_KEY_A,
    COUNT_PLAN_KEY_B,
    PLAN_FIELDS,
    PLAN_V_SCALE,
    STAT_FIELDS,
    STAT_V_AMAX,
    HeadState,
    shape_key,
)
from .launch import buffer, launch
from .mask_tiles import MaskTiles
from .prepare_keys import LONG
from .primitives import E4M3_MAX, RELAXED, record_amax, to_e4m3


_CLIPPED = tl.constexpr(COUNT_CLIPPED)
_PLAN_KEY_A = tl.constexpr(COUNT_PLAN_KEY_A)
_PLAN_KEY_B = tl.constexpr(COUNT_PLAN_KEY_B)
_COUNTS = tl.constexpr(COUNT_FIELDS)
_V_SCALE = tl.constexpr(PLAN_V_SCALE)
_PLANS = tl.constexpr(PLAN_FIELDS)
_STATS = tl.constexpr(STAT_FIELDS)
_STAT_V_AMAX = tl.constexpr(STAT_V_AMAX)
_FAINT = tl.constexpr(FAINT)
_V_CODE = tl.constexpr(recipe.V_CODE)
_V_AMAX_FLOOR = tl.constexpr(recipe.V_AMAX_FLOOR)

# Keys of one step, a whole number of every tile. The codes of a step lie together, [WIDTH, KEYS]: a tile of the
# attention kernel is then one piece of memory, not WIDTH of them as far apart as a head is long.
KEYS = tl.constexpr(128)
CHANNELS = tl.constexpr(64)  # of one program: with 128 keys, both sides of the transposition move whole sectors
STEPS, LONG_STEPS = 4, 8  # of one program, of many or few tokens: amortise the scale and the atomics
AMAX_ROWS = tl.constexpr(32)
AMAX_CHUNKS = 64  # programs a head at most: each cast program reads what all of them found
MIN_CHUNK = 256


@triton.jit
def _load(v_base, tokens, channels, stride_vs, end, HEAD_DIM: tl.constexpr):
    """V [tokens, channels] in its own dtype, zero from token `end` on and beyond the head."""
    inside = (tokens < end)[:, None] & (channels < HEAD_DIM)[None, :]
    return tl.load(v_base + tokens.to(tl.int64)[:, None] * stride_vs + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _seen(v, tokens, end, reach_ptr, HAS_MASK: tl.constexpr):
    """Loaded values in fp32, zero where nothing is seen, and which tokens count for scales."""
    x = v.to(tl.float32)
    counted = tokens < end
    if HAS_MASK:
        reach = tl.load(reach_ptr + tokens, mask=counted, other=float("-inf"))
        x = tl.where((reach > float("-inf"))[:, None], x, 0.0)
        counted = reach > _FAINT
    return x, counted


@triton.jit
def _finite_size(x):
    """|x|; 0 for NaN and inf, which have codes of their own and no part in a scale."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _plan_of(plan_ptr, plan_scale_ptr, counts_ptr, row, shape_key, state_width, channels, HEAD_DIM: tl.constexpr):
    """Planned scale of V's channels, 0 in all of them for a head without a plan."""
    count = counts_ptr + row * _COUNTS
    fits = (tl.load(count + _PLAN_KEY_A) == shape_key) | (tl.load(count + _PLAN_KEY_B) == shape_key)
    fits = fits & (tl.load(plan_scale_ptr + row) > 0)
    plan = plan_ptr + row * (_PLANS * state_width) + _V_SCALE * state_width + channels
    return tl.load(plan, mask=(channels < HEAD_DIM) & fits, other=0.0)


@triton.jit(do_not_specialize=["shape_key", "seq_kv", "kv_heads", "state_width", "chunks", "chunk_keys", "stride_rb",
                               "stride_rh"])  # fmt: skip
def _value_amax_kernel(
    v_ptr, amax_ptr, plan_ptr, plan_scale_ptr, counts_ptr, row_ptr, shape_key, state_width,
    stride_vb, stride_vs, stride_vh, reach_ptr, stride_rb, stride_rh, seq_kv, kv_heads, chunks, chunk_keys,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PLANNED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Largest |v| of each channel in one chunk of keys: of those that count, and of all that are seen."""
    chunk = tl.program_id(0) % chunks
    head_of_batch = tl.program_id(0) // chunks  # b * H_kv + h
    b = (head_of_batch // kv_heads).to(tl.int64)
    h = head_of_batch % kv_heads
    channels = tl.arange(0, WIDTH)
    v_base = v_ptr + b * stride_vb + h.to(tl.int64) * stride_vh
    if HAS_MASK:
        reach_ptr += b * stride_rb + h * stride_rh
    end = tl.minimum(chunk * chunk_keys + chunk_keys, seq_kv)
    if PLANNED:
        row = tl.load(row_ptr) + h
        planned = _plan_of(plan_ptr, plan_scale_ptr, counts_ptr, row, shape_key, state_width, channels, HEAD_DIM)
        end = tl.where(tl.max(planned, 0) > 0, 0, end)
    counting = tl.zeros([AMAX_ROWS, WIDTH], tl.float32)
    seen = tl.zeros([AMAX_ROWS, WIDTH], tl.float32)
    for first in range(chunk * chunk_keys, end, AMAX_ROWS):
        tokens = first + tl.arange(0, AMAX_ROWS)
        v = _load(v_base, tokens, channels, stride_vs, end, HEAD_DIM)
        x, counted = _seen(v, tokens, end, reach_ptr, HAS_MASK)
        x = _finite_size(x)
        seen = tl.maximum(seen, x)
        if HAS_MASK:
            counting = tl.maximum(counting, tl.where(counted[:, None], x, 0.0))
    if not HAS_MASK:
        counting = seen
    found = amax_ptr + tl.program_id(0).to(tl.int64) * 2 * WIDTH + channels
    tl.store(found, tl.max(counting, 0))
    tl.store(found + WIDTH, tl.max(seen, 0))


@triton.jit
def _found_amax(amax_ptr, channels, chunks, WIDTH: tl.constexpr):
    """Amax of a head's channels over all chunks; where every key that counts is 0, of all keys that are seen."""
    counting = tl.zeros([channels.shape[0]], tl.float32)
    seen = tl.zeros([channels.shape[0]], tl.float32)
    for first in range(0, chunks, AMAX_ROWS):
        chunk = first + tl.arange(0, AMAX_ROWS)
        found = amax_ptr + chunk[:, None] * (2 * WIDTH) + channels[None, :]
        counting = tl.maximum(counting, tl.max(tl.load(found, mask=(chunk < chunks)[:, None], other=0.0), 0))
        seen = tl.maximum(seen, tl.max(tl.load(found + WIDTH, mask=(chunk < chunks)[:, None], other=0.0), 0))
    return tl.where(counting > 0, counting, seen)


@triton.jit(do_not_specialize=["shape_key", "seq_kv", "kv_heads", "state_width", "chunks", "spans", "steps",
                               "stride_rb", "stride_rh"])  # fmt: skip
def _prepare_values_kernel(
    v_ptr, codes_ptr, v_scale_ptr, amax_ptr, plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr, shape_key,
    state_width, stride_vb, stride_vs, stride_vh, reach_ptr, stride_rb, stride_rh, seq_kv, kv_heads, chunks, spans,
    steps,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PLANNED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0) % spans
    part = tl.program_id(0) // spans % (WIDTH // CHANNELS)
    head_of_batch = tl.program_id(0) // spans // (WIDTH // CHANNELS)  # b * H_kv + h
    b = (head_of_batch // kv_heads).to(tl.int64)
    h = head_of_batch % kv_heads
    channels = part * CHANNELS + tl.arange(0, CHANNELS)
    v_base = v_ptr + b * stride_vb + h.to(tl.int64) * stride_vh
    if HAS_MASK:
        reach_ptr += b * stride_rb + h * stride_rh
    n_steps = tl.cdiv(seq_kv, KEYS)
    amax_ptr += head_of_batch.to(tl.int64) * chunks * 2 * WIDTH

    # place 4·b + 2·a + c of each 16 holds key 8·a + 2·b + c
    place = tl.arange(0, KEYS)
    key = place // 16 * 16 + place // 2 % 2 * 8 + place % 16 // 4 * 2 + place % 2
    # before all that takes long: the first values are on their way
    end = tl.minimum((span + 1) * steps * KEYS, seq_kv)
    ahead = _load(v_base, key + span * steps * KEYS, channels, stride_vs, end, HEAD_DIM)

    scale = tl.zeros([CHANNELS], tl.float32)
    has_plan = 0
    row = 0
    if PLANNED:
        row = tl.load(row_ptr) + h
        whole = _plan_of(
            plan_ptr, plan_scale_ptr, counts_ptr, row, shape_key, state_width, tl.arange(0, WIDTH), HEAD_DIM
        )
        has_plan = (tl.max(whole, 0) > 0).to(tl.int32)
        scale = _plan_of(plan_ptr, plan_scale_ptr, counts_ptr, row, shape_key, state_width, channels, HEAD_DIM)
    if has_plan == 0:
        scale = _found_amax(amax_ptr, channels, chunks, WIDTH) * (1.0 / _V_CODE)  # a power of two: exact
    scale = tl.maximum(scale, _V_AMAX_FLOOR / _V_CODE)
    scale = tl.where(channels < HEAD_DIM, scale, 1.0)
    if span == 0:
        tl.store(v_scale_ptr + head_of_batch * WIDTH + channels, scale)
    inverse = tl.div_rn(tl.full([CHANNELS], 1.0, tl.float32), scale)

    codes = (
        codes_ptr + head_of_batch.to(tl.int64) * n_steps * (WIDTH * KEYS) + channels[:, None] * KEYS + place[None, :]
    )
    reached = tl.zeros([CHANNELS], tl.float32)
    clipped = tl.zeros([CHANNELS], tl.int32)
    for step in range(span * steps, tl.minimum(span * steps + steps, n_steps)):
        now = ahead  # loaded a step ahead, or each load would wait behind the stores of the step before
        ahead = _load(v_base, key + (step + 1) * KEYS, channels, stride_vs, end, HEAD_DIM)
        x, counted = _seen(now, key + step * KEYS, seq_kv, reach_ptr, HAS_MASK)
        y = x * inverse[None, :] + x * 0.0  # e4m3 has no inf: NaN, in its row and channel
        tl.store(codes + step * (WIDTH * KEYS), tl.trans(to_e4m3(y)))
        if PLANNED:
            size = _finite_size(x)
            reached = tl.maximum(reached, tl.max(tl.where(counted[:, None], size, 0.0), 0))
            clipped += tl.sum((size * inverse[None, :] > E4M3_MAX).to(tl.int32), 0)
    if PLANNED:
        stat = stats_ptr + row * (_STATS * state_width) + _STAT_V_AMAX * state_width
        record_amax(stat, reached, channels, HEAD_DIM)
        lost = tl.sum(clipped, 0)
        if lost > 0:
            tl.atomic_add(counts_ptr + row * _COUNTS + _CLIPPED, lost, sem=RELAXED)


def launch_prepare_values(v, *, seq_q, state: HeadState | None, mask: MaskTiles, width, rotation="none"):
    """Cast V [B, S_kv, H_kv, D] to e4m3, transposed and permuted for the attention kernel.

    Args:
        state: planned scales, and where this call's amax goes; None: scales of this call.
        mask: keys that no row sees get codes of zero and touch no scale. A key that no row sees well (a bias of -1e30
            or less) has no part in a channel's amax unless all are so, and is clipped at 7 times of it.
        width: channels of the buffer, a power of two >= D.
        rotation: of q and k, for which the plan must be.
    Returns: codes float8_e4m3fn [B·H_kv·steps·width, 128], a step being 128 keys, scale fp32 [B, H_kv, width].
    """
    batch, seq_kv, kv_heads, head_dim = v.shape
    heads = batch * kv_heads
    n_steps = triton.cdiv(seq_kv, KEYS.value)
    codes = buffer(heads * n_steps * width, KEYS.value, dtype=torch.float8_e4m3fn, device=v.device)
    scale = buffer(batch, kv_heads, width, device=v.device)
    chunk_keys = max(MIN_CHUNK, triton.cdiv(triton.cdiv(seq_kv, AMAX_CHUNKS), AMAX_ROWS.value) * AMAX_ROWS.value)
    chunks = triton.cdiv(seq_kv, chunk_keys)
    amax = buffer(heads, chunks, 2, width, device=v.device)
    planned, has_mask = state is not None, mask.reach is not None
    plan, plan_scale, stats, counts, row = (scale,) * 5 if state is None else state[:5]
    key, state_width = (shape_key(batch, seq_q, seq_kv, rotation), plan.shape[-1]) if planned else (0, 0)
    reach = mask.reach if has_mask else scale  # never read without a mask
    constants = {"HEAD_DIM": head_dim, "WIDTH": width, "PLANNED": planned, "HAS_MASK": has_mask}
    constants |= {"num_warps": 8, "enable_fp_fusion": False}
    strides = v.stride()[:3]
    launch(
        _value_amax_kernel, chunks * heads,
        v, amax, plan, plan_scale, counts, row, key, state_width, *strides, reach, *mask.reach_strides,
        seq_kv, kv_heads, chunks, chunk_keys, **constants,
    )  # fmt: skip
    # two programs an SM; 151 registers without
    constants["maxnreg"] = 128 if v.is_cuda else None
    steps = LONG_STEPS if heads * seq_kv >= LONG else STEPS
    spans = triton.cdiv(n_steps, steps)
    launch(
        _prepare_values_kernel, spans * (width // CHANNELS.value) * heads,
        v, codes, scale, amax, plan, plan_scale, stats, counts, row, key, state_width, *strides, reach,
        *mask.reach_strides, seq_kv, kv_heads, chunks, spans, steps, **constants,
    )  # fmt: skip
    return codes, scale
