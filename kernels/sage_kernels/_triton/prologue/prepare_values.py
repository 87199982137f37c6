"""Quantise V in the prologue for P·V in FP8: scale, cast to e4m3, transpose and permute.

Tensor cores need both 8-bit operands with the summed dimension contiguous, so V is stored as [channels, keys]. Keys
are permuted inside each group of 16: then P can stay in the registers where the softmax left it (`in_operand_order`
of attention/operands.py). Codes are zero beyond the sequence and head_dim, and for keys hidden from every row.

Scales come from the plan; without a plan, from the amax of the channels. A call without a state finds the amax in a
launch of its own. In a call with a state only the device knows whether a head has a plan, so there each program of a
head without one reads all of the head's V.
"""

import triton
import triton.language as tl

from ...facts import recipe
from ...facts.masking import FAINT, UNLIMITED
from ...facts.state import (
    COUNT_CLIPPED,
    COUNT_FIELDS,
    COUNT_PLAN_KEY_A,
    COUNT_PLAN_KEY_B,
    PLAN_FIELDS,
    PLAN_V_SCALE,
    STAT_FIELDS,
    STAT_V_AMAX,
)
from ..launch import buffer, launch
from ..primitives import E4M3_MAX, RELAXED, record_amax, to_e4m3
from ..sequences import Packed, keys_of, packed_arguments, rows_of, sequence_of, slot_of
from .mask_tiles import MaskTiles


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

# Keys of one step, a multiple of every tile. The codes of a step are contiguous, [WIDTH, KEYS], and so is a tile of
# the attention kernel: otherwise its WIDTH rows would be as far apart as a head is long.
KEYS = tl.constexpr(128)
QUADS = tl.constexpr(KEYS.value // 4)
AMAX_ROWS = tl.constexpr(32)
AMAX_CHUNKS = 64  # programs a head at most: each casting program reads the results of all of them
MIN_CHUNK = 256  # keys


@triton.jit
def _load(v_base, tokens, channels, stride_vs, end, HEAD_DIM: tl.constexpr):
    """Load V [tokens, channels] in its own dtype; zero from token `end` on and beyond head_dim."""
    inside = (tokens < end)[:, None] & (channels < HEAD_DIM)[None, :]
    return tl.load(v_base + tokens.to(tl.int64)[:, None] * stride_vs + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _seen(v, tokens, end, reach_ptr, HAS_MASK: tl.constexpr):
    """Return loaded values in fp32, zero for hidden tokens; and a mask of those that count for scales."""
    x = v.to(tl.float32)
    counted = tokens < end
    if HAS_MASK:
        reach = tl.load(reach_ptr + tokens, mask=counted, other=float("-inf"))
        x = tl.where((reach > float("-inf"))[:, None], x, 0.0)
        counted = reach > _FAINT
    return x, counted


@triton.jit
def _finite_size(x):
    """Return |x|, but 0 for NaN and inf, which must not affect a scale."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _plan_of(plan_ptr, plan_scale_ptr, counts_ptr, row, shape_key, state_width, channels, HEAD_DIM: tl.constexpr):
    """Load the planned scales of V's channels; all 0 if the head has no plan for this call's shapes."""
    count = counts_ptr + row * _COUNTS
    fits = (tl.load(count + _PLAN_KEY_A) == shape_key) | (tl.load(count + _PLAN_KEY_B) == shape_key)
    fits = fits & (tl.load(plan_scale_ptr + row) > 0)
    plan = plan_ptr + row * (_PLANS * state_width) + _V_SCALE * state_width + channels
    return tl.load(plan, mask=(channels < HEAD_DIM) & fits, other=0.0)


@triton.jit
def _values_of(b, cu_q_ptr, cu_k_ptr, sequences, total_q, total, left, HAS_LEFT: tl.constexpr):
    """Return sequence b's first visible value, first token (for `slot_of`), and number of visible values."""
    _, rows = rows_of(b, cu_q_ptr, sequences, total_q)
    first_k, seq_kv, start, _ = keys_of(b, cu_k_ptr, sequences, total, rows, left, HAS_LEFT)
    return first_k, start, tl.where(rows > 0, seq_kv, 0)


@triton.jit
def _amax_of(v_base, first, end, channels, stride_vs, reach_ptr, HEAD_DIM: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the largest |v| per channel in tokens first to end: of those that count, and of all visible."""
    counting = tl.zeros([AMAX_ROWS, channels.shape[0]], tl.float32)
    seen = tl.zeros([AMAX_ROWS, channels.shape[0]], tl.float32)
    for token in range(first, end, AMAX_ROWS):
        tokens = token + tl.arange(0, AMAX_ROWS)
        v = _load(v_base, tokens, channels, stride_vs, end, HEAD_DIM)
        x, counted = _seen(v, tokens, end, reach_ptr, HAS_MASK)
        x = _finite_size(x)
        seen = tl.maximum(seen, x)
        if HAS_MASK:
            counting = tl.maximum(counting, tl.where(counted[:, None], x, 0.0))
    seen = tl.max(seen, 0)
    if HAS_MASK:
        counting = tl.max(counting, 0)
    else:
        counting = seen
    return counting, seen


@triton.jit(do_not_specialize=[
    "seq_q", "seq_kv", "kv_heads", "chunks", "chunk_keys", "stride_rb", "stride_rh", "sequences", "left",
])  # fmt: skip
def _value_amax_kernel(
    v_ptr, amax_ptr, stride_vb, stride_vs, stride_vh, reach_ptr, stride_rb, stride_rh,
    cu_q_ptr, cu_k_ptr, sequences, left, seq_q, seq_kv, kv_heads, chunks, chunk_keys,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Write `_amax_of` of one chunk of keys (if PACKED, of one sequence). Grid: chunks of all heads."""
    chunk = tl.program_id(0) % chunks
    head_of_batch = tl.program_id(0) // chunks  # b * H_kv + h
    b = (head_of_batch // kv_heads).to(tl.int64)
    h = head_of_batch % kv_heads
    channels = tl.arange(0, WIDTH)
    v_base = v_ptr + b * stride_vb + h.to(tl.int64) * stride_vh
    if HAS_MASK:
        reach_ptr += b * stride_rb + h * stride_rh
    first = chunk * chunk_keys
    if PACKED:
        i = sequence_of(chunk, cu_k_ptr, sequences, seq_kv, chunk_keys)
        first_k, start, seq_kv = _values_of(i, cu_q_ptr, cu_k_ptr, sequences, seq_q, seq_kv, left, HAS_LEFT)
        first = (chunk - slot_of(i, start, chunk_keys)) * chunk_keys
        if first < 0:
            return
        v_base += first_k.to(tl.int64) * stride_vs
    end = tl.minimum(first + chunk_keys, seq_kv)
    counting, seen = _amax_of(v_base, first, end, channels, stride_vs, reach_ptr, HEAD_DIM, HAS_MASK)
    found = amax_ptr + tl.program_id(0).to(tl.int64) * 2 * WIDTH + channels
    tl.store(found, counting)
    tl.store(found + WIDTH, seen)


@triton.jit
def _found_amax(amax_ptr, channels, chunks, WIDTH: tl.constexpr):
    """Combine the results of `_value_amax_kernel` over all chunks of a head."""
    counting = tl.zeros([channels.shape[0]], tl.float32)
    seen = tl.zeros([channels.shape[0]], tl.float32)
    for first in range(0, chunks, AMAX_ROWS):
        chunk = first + tl.arange(0, AMAX_ROWS)
        found = amax_ptr + chunk[:, None] * (2 * WIDTH) + channels[None, :]
        counting = tl.maximum(counting, tl.max(tl.load(found, mask=(chunk < chunks)[:, None], other=0.0), 0))
        seen = tl.maximum(seen, tl.max(tl.load(found + WIDTH, mask=(chunk < chunks)[:, None], other=0.0), 0))
    return counting, seen


@triton.jit
def _step_tokens(first):
    """Return the tokens of one step in permuted order: four tensors [QUADS], for places 4·i to 4·i + 3."""
    # place 4·b + 2·a + c of each 16 holds key 8·a + 2·b + c
    quad = tl.arange(0, QUADS)
    tokens = first + quad // 4 * 16 + quad % 4 * 2
    return tokens, tokens + 1, tokens + 8, tokens + 9


@triton.jit
def _load_step(v_base, first, channels, stride_vs, end, HEAD_DIM: tl.constexpr):
    """Load the values of `_step_tokens`: four tensors [QUADS, channels]."""
    t0, t1, t2, t3 = _step_tokens(first)
    return (
        _load(v_base, t0, channels, stride_vs, end, HEAD_DIM),
        _load(v_base, t1, channels, stride_vs, end, HEAD_DIM),
        _load(v_base, t2, channels, stride_vs, end, HEAD_DIM),
        _load(v_base, t3, channels, stride_vs, end, HEAD_DIM),
    )


@triton.jit
def _seen_step(loaded, first, seq_kv, reach_ptr, HAS_MASK: tl.constexpr):
    """Join the values of `_load_step` to fp32 [QUADS, channels, 4].

    Returns: the values, 0 for hidden tokens; and again with 0 for tokens that do not count for scales.

    The last dimension lies in one thread:
    so four codes of a channel are one word before they are transposed.
    """
    v0, v1, v2, v3 = loaded
    if HAS_MASK:
        t0, t1, t2, t3 = _step_tokens(first)
        v0, is_0 = _seen(v0, t0, seq_kv, reach_ptr, True)
        v1, is_1 = _seen(v1, t1, seq_kv, reach_ptr, True)
        v2, is_2 = _seen(v2, t2, seq_kv, reach_ptr, True)
        v3, is_3 = _seen(v3, t3, seq_kv, reach_ptr, True)
    x = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    x = tl.reshape(x, (x.shape[0], x.shape[1], 4)).to(tl.float32)
    counting = x
    if HAS_MASK:
        counted = tl.reshape(tl.join(tl.join(is_0, is_2), tl.join(is_1, is_3)), (x.shape[0], 4))
        counting = tl.where(counted[:, None, :], x, 0.0)
    return x, counting


@triton.jit
def _store_step(codes, y):
    """Store codes [QUADS, channels, 4] as [channels, KEYS]."""
    y = tl.permute(y, (1, 0, 2))
    tl.store(codes, tl.reshape(y, (y.shape[0], KEYS)))


@triton.jit
def _prepare_value_span(
    v_base, codes_ptr, v_scale_ptr, amax_ptr, plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr,
    shape_key, state_width, stride_vs, reach_ptr, h, head_of_batch, channels, first_step, end_step, seq_kv, chunks,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PLANNED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Cast steps `first_step` to `end_step` (exclusive) of some channels of one head.

    codes_ptr: the head's first code. head_of_batch: row of its scales in the buffer. amax_ptr: results of
    `_value_amax_kernel` for the head, if there is no state.
    """
    end = tl.minimum(end_step * KEYS, seq_kv)
    # start loading the first values before the scales are found
    ahead = _load_step(v_base, first_step * KEYS, channels, stride_vs, end, HEAD_DIM)

    row = 0
    scale = tl.zeros([CHANNELS], tl.float32)
    counting = scale
    seen = scale
    if PLANNED:
        row = tl.load(row_ptr) + h
        whole = _plan_of(
            plan_ptr, plan_scale_ptr, counts_ptr, row, shape_key, state_width, tl.arange(0, WIDTH), HEAD_DIM
        )
        scale = _plan_of(plan_ptr, plan_scale_ptr, counts_ptr, row, shape_key, state_width, channels, HEAD_DIM)
        if tl.max(whole, 0) == 0:
            counting, seen = _amax_of(v_base, 0, seq_kv, channels, stride_vs, reach_ptr, HEAD_DIM, HAS_MASK)
    else:
        counting, seen = _found_amax(amax_ptr, channels, chunks, WIDTH)
    # Without a plan the amax is that of the counting keys, or if they are all 0, of all visible ones. _V_CODE is a
    # power of two, so this is exact.
    scale = tl.where(scale > 0, scale, tl.where(counting > 0, counting, seen) * (1.0 / _V_CODE))
    scale = tl.maximum(scale, _V_AMAX_FLOOR / _V_CODE)
    scale = tl.where(channels < HEAD_DIM, scale, 1.0)
    if first_step == 0:
        tl.store(v_scale_ptr + head_of_batch * WIDTH + channels, scale)
    inverse = tl.div_rn(tl.full([CHANNELS], 1.0, tl.float32), scale)

    codes = codes_ptr + channels[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    top = tl.zeros([QUADS, CHANNELS], tl.float32)
    reached = tl.zeros([QUADS, CHANNELS], tl.float32)
    for step in range(first_step, end_step):
        now = ahead  # loaded one step ahead: otherwise each load would wait for the stores of the step before
        ahead = _load_step(v_base, (step + 1) * KEYS, channels, stride_vs, end, HEAD_DIM)
        x, counting_x = _seen_step(now, step * KEYS, seq_kv, reach_ptr, HAS_MASK)
        # right unless a value exceeds its scale; that is checked below
        _store_step(codes + step * (WIDTH * KEYS), (x * inverse[None, :, None]).to(tl.float8e4nv))
        top = tl.maximum(top, tl.max(tl.abs(x), 2))  # max() drops NaN; its code is already right
        if PLANNED and HAS_MASK:
            reached = tl.maximum(reached, tl.max(tl.abs(counting_x), 2))
    largest = tl.max(top, 0)
    amax = largest
    if HAS_MASK:
        amax = tl.max(reached, 0)
    lost = 0
    if tl.max(largest * inverse, 0) > E4M3_MAX:  # store again, clipped; inf, which e4m3 does not have, becomes NaN
        tl.debug_barrier()  # these stores must come after those above
        reached = tl.zeros([QUADS, CHANNELS], tl.float32)
        clipped = tl.zeros([QUADS, CHANNELS], tl.int32)
        for step in range(first_step, end_step):
            again = _load_step(v_base, step * KEYS, channels, stride_vs, end, HEAD_DIM)
            x, counting_x = _seen_step(again, step * KEYS, seq_kv, reach_ptr, HAS_MASK)
            y = x * inverse[None, :, None]
            _store_step(codes + step * (WIDTH * KEYS), to_e4m3(y + x * 0.0))
            reached = tl.maximum(reached, tl.max(_finite_size(counting_x), 2))
            clipped += tl.sum((_finite_size(x) * inverse[None, :, None] > E4M3_MAX).to(tl.int32), 2)
        amax = tl.max(reached, 0)
        lost = tl.sum(tl.sum(clipped, 1), 0)
    if PLANNED:
        stat = stats_ptr + row * (_STATS * state_width) + _STAT_V_AMAX * state_width
        record_amax(stat, amax, channels, HEAD_DIM)
        if lost > 0:
            tl.atomic_add(counts_ptr + row * _COUNTS + _CLIPPED, lost, sem=RELAXED)


@triton.jit
def prepare_values(
    program, v_ptr, codes_ptr, v_scale_ptr, amax_ptr, plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr,
    shape_key, state_width, stride_vb, stride_vs, stride_vh, reach_ptr, stride_rb, stride_rh,
    cu_q_ptr, cu_k_ptr, sequences, left, seq_q, seq_kv, kv_heads, chunks, chunk_keys, spans, steps,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PLANNED: tl.constexpr, HAS_MASK: tl.constexpr,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Cast `steps` steps of CHANNELS channels of one head (if PACKED, of one sequence) to e4m3.

    Codes are stored as [B·H_kv, n_steps, WIDTH, KEYS]. chunks, chunk_keys: of a head, as in `_value_amax_kernel`.
    """
    span = program % spans
    part = program // spans % (WIDTH // CHANNELS)
    head_of_batch = program // spans // (WIDTH // CHANNELS)  # b * H_kv + h
    b = (head_of_batch // kv_heads).to(tl.int64)
    h = head_of_batch % kv_heads
    channels = part * CHANNELS + tl.arange(0, CHANNELS)
    v_base = v_ptr + b * stride_vb + h.to(tl.int64) * stride_vh
    if HAS_MASK:
        reach_ptr += b * stride_rb + h * stride_rh
    amax_ptr += head_of_batch.to(tl.int64) * chunks * 2 * WIDTH
    if PACKED:
        i = sequence_of(span, cu_k_ptr, sequences, seq_kv, steps * KEYS)
        first_k, start, keys = _values_of(i, cu_q_ptr, cu_k_ptr, sequences, seq_q, seq_kv, left, HAS_LEFT)
        first = (span - slot_of(i, start, steps * KEYS)) * steps
        end = tl.minimum(first + steps, tl.cdiv(keys, KEYS))
        if (first >= 0) & (first < end):
            slots = seq_kv // KEYS + sequences + 1
            _prepare_value_span(
                v_base + first_k.to(tl.int64) * stride_vs,
                codes_ptr + (h.to(tl.int64) * slots + slot_of(i, start, KEYS)) * (WIDTH * KEYS), v_scale_ptr,
                amax_ptr + slot_of(i, start, chunk_keys).to(tl.int64) * 2 * WIDTH, plan_ptr, plan_scale_ptr,
                stats_ptr, counts_ptr, row_ptr, shape_key, state_width, stride_vs, reach_ptr, h,
                i * kv_heads + h, channels, first, end, keys, tl.cdiv(keys, chunk_keys),
                HEAD_DIM, WIDTH, CHANNELS, PLANNED, HAS_MASK,
            )  # fmt: skip
    else:
        n_steps = tl.cdiv(seq_kv, KEYS)
        _prepare_value_span(
            v_base, codes_ptr + head_of_batch.to(tl.int64) * n_steps * (WIDTH * KEYS), v_scale_ptr, amax_ptr,
            plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr, shape_key, state_width, stride_vs, reach_ptr,
            h, head_of_batch, channels, span * steps, tl.minimum(span * steps + steps, n_steps), seq_kv, chunks,
            HEAD_DIM, WIDTH, CHANNELS, PLANNED, HAS_MASK,
        )  # fmt: skip


def chunk_of(seq_kv: int) -> int:
    """Return how many keys one program of `_value_amax_kernel` reads."""
    per_head = -(-seq_kv // AMAX_CHUNKS)
    return max(MIN_CHUNK, -(-per_head // AMAX_ROWS.value) * AMAX_ROWS.value)


def launch_value_amax(v, *, mask: MaskTiles, width: int, packed: Packed | None, seq_q: int, left: int):
    """Find V's amax per channel and chunk of keys, for calls without a state.

    Returns: fp32 [B·H_kv, chunks, 2, width], of the keys that count for scales and of all visible ones; and the number
        of keys of a chunk.
    """
    batch, seq_kv, kv_heads, head_dim = v.shape
    chunk_keys = chunk_of(seq_kv)
    chunks = -(-seq_kv // chunk_keys) if packed is None else packed.slots(seq_kv, chunk_keys)
    amax = buffer(batch * kv_heads, chunks, 2, width, device=v.device)
    has_mask = mask.reach is not None
    launch(
        _value_amax_kernel, chunks * batch * kv_heads,
        v, amax, v.stride(0), v.stride(1), v.stride(2), mask.reach if has_mask else amax, *mask.reach_strides,
        *packed_arguments(packed, amax), left, seq_q, seq_kv, kv_heads, chunks, chunk_keys,
        HEAD_DIM=head_dim, WIDTH=width, HAS_MASK=has_mask, PACKED=packed is not None,
        HAS_LEFT=packed is not None and left != UNLIMITED, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return amax, chunk_keys
