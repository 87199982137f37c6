"""Sample a head's tokens, to find its centre and balance or to check that its plan fits.

The check takes a smaller sample. Only maxima and sums of integers are formed for centre and balance, so that every
program of a head, and the reference, get the same bits in any order.
"""

import triton
import triton.language as tl

from ...facts import numerics
from ...facts.masking import FAINT
from ..primitives import (
    AMAX_FLOOR,
    BALANCE_NEAR_ABOVE,
    BALANCE_NEAR_BELOW,
    CENTER_SAMPLES,
    CENTER_STEPS,
    CHANNEL_FLOOR,
    FIT_LIMIT,
    FIT_SAMPLES,
    STEADY_FIT_LIMIT,
    load_tokens,
    round_to_int,
)


_FAINT = tl.constexpr(FAINT)
LOG_SHIFT = tl.constexpr(numerics.LOG_SHIFT)
LOG_ONE = tl.constexpr(1 << numerics.LOG_BITS)
ROW_CLIP, ROW_STEPS = tl.constexpr(numerics.ROW_CLIP), tl.constexpr(numerics.ROW_STEPS)
BALANCE_STEP = tl.constexpr(numerics.BALANCE_STEP)
LARGEST_QUERY = tl.constexpr(numerics.LARGEST_QUERY)


@triton.jit
def _sample_steps(extent, ROWS: tl.constexpr):
    """Return CENTER_SAMPLES // ROWS, hidden from the compiler so that it does not unroll the loops.

    Unrolled, the rarely taken branch would need registers that other programs on the SM could use.
    """
    return tl.minimum(CENTER_SAMPLES // ROWS, tl.maximum(extent, 0) + CENTER_SAMPLES)


@triton.jit
def _load_sample(base, stride_token, seq, i, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load the i-th tokens [ROWS] of `numerics.sample_tokens`, in fp32; return them and their positions."""
    whole = seq // CENTER_SAMPLES  # i · seq could overflow
    tokens = i * whole + i * (seq % CENTER_SAMPLES) // CENTER_SAMPLES + i % tl.maximum(whole, 1)
    return load_tokens(base, tokens, stride_token, seq, HEAD_DIM, WIDTH, False).to(tl.float32), tokens


@triton.jit
def _load_key_sample(k_base, stride_ks, extent, reach_ptr, i, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
                     HAS_MASK: tl.constexpr):  # fmt: skip
    """Load sampled keys, 0 for uncounted tokens; also return 1 for each token that counts for scales."""
    k, tokens = _load_sample(k_base, stride_ks, extent, i, HEAD_DIM, WIDTH)
    counted = tokens * 0 + 1
    if HAS_MASK:
        counted = (tl.load(reach_ptr + tokens) > _FAINT).to(tl.int32)
        k = tl.where(counted[:, None] != 0, k, 0.0)
    return k, counted


@triton.jit
def sampled_center(k_base, stride_ks, extent, reach_ptr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
                    ROWS: tl.constexpr, HAS_MASK: tl.constexpr):  # fmt: skip
    """Return the centre of one head, [WIDTH]: the mean of sampled keys (`numerics.sampled_center`)."""
    top = tl.zeros([ROWS, WIDTH], tl.float32)
    number = tl.zeros([ROWS], tl.int32)
    for step in range(_sample_steps(extent, ROWS)):
        i = step * ROWS + tl.arange(0, ROWS)
        k, counted = _load_key_sample(k_base, stride_ks, extent, reach_ptr, i, HEAD_DIM, WIDTH, HAS_MASK)
        top = tl.maximum(top, tl.abs(k))
        number += counted
    amax = tl.maximum(tl.max(tl.max(top, 1), 0), AMAX_FLOOR)
    inverse = tl.div_rn(amax * 0.0 + CENTER_STEPS, amax)
    total = tl.zeros([ROWS, WIDTH], tl.int32)
    for step in range(_sample_steps(extent, ROWS)):
        i = step * ROWS + tl.arange(0, ROWS)
        k, _ = _load_key_sample(k_base, stride_ks, extent, reach_ptr, i, HEAD_DIM, WIDTH, HAS_MASK)
        total += round_to_int(k * inverse)
    steps = CENTER_STEPS * tl.maximum(tl.sum(number, 0), 1).to(tl.float32)
    return tl.sum(total, 0).to(tl.float32) * tl.div_rn(amax, steps)


@triton.jit
def _bounded_amax(amax):
    """Reduce amax [ROWS, WIDTH] to [WIDTH], bounded from below relative to the largest channel."""
    amax = tl.max(amax, 0)
    return tl.maximum(tl.maximum(amax, tl.max(amax, 0) * CHANNEL_FLOOR), AMAX_FLOOR)


@triton.jit
def _row_sizes(x, counted):
    """Return |x| of rows [ROWS, WIDTH] as shares of their sums, as `numerics._row_sizes`."""
    size = tl.where((x * 0.0 == 0.0) & (counted != 0)[:, None], tl.abs(x), 0.0)
    known = size > 0
    logarithm = tl.sum(tl.where(known, size.to(tl.int32, bitcast=True) >> LOG_SHIFT, 0), 1)
    mean = logarithm // tl.maximum(tl.sum(known.to(tl.int32), 1), 1)
    factor = tl.minimum(tl.maximum(-mean + 254 * LOG_ONE, LOG_ONE), 254 * LOG_ONE) << LOG_SHIFT
    size = tl.minimum(size * factor.to(tl.float32, bitcast=True)[:, None], CENTER_STEPS)
    total = tl.sum(round_to_int(tl.minimum(size, ROW_CLIP) * ROW_STEPS), 1).to(tl.float32)
    return tl.div_rn(size, tl.zeros_like(size) + tl.maximum(total, 1.0)[:, None])


@triton.jit
def sampled_balance(q_base, stride_qs, stride_qh, seq_q, group, k_base, stride_ks, seq_kv, extent, reach_ptr,
                     center, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                     HAS_MASK: tl.constexpr):  # fmt: skip
    """Return the balance of one head, [WIDTH], from a sample of Q and K, as `numerics.sampled_balance`."""
    q_amax = tl.zeros([ROWS, WIDTH], tl.float32)
    k_amax = tl.zeros([ROWS, WIDTH], tl.float32)
    is_channel = tl.arange(0, WIDTH) < HEAD_DIM
    is_self = HAS_MASK and seq_q == seq_kv
    q_extent = tl.where(is_self, extent, seq_q)
    for step in range(_sample_steps(extent, ROWS)):
        i = step * ROWS + tl.arange(0, ROWS)
        k, counted = _load_key_sample(k_base, stride_ks, extent, reach_ptr, i, HEAD_DIM, WIDTH, HAS_MASK)
        k_amax = tl.maximum(k_amax, _row_sizes(tl.where(is_channel[None, :], k - center[None, :], 0.0), counted))
        heads = i * group // CENTER_SAMPLES
        q_rows = q_base + heads.to(tl.int64)[:, None] * stride_qh
        q, _ = _load_sample(q_rows, stride_qs, q_extent, i, HEAD_DIM, WIDTH)
        if HAS_MASK:
            counted = tl.where(is_self, counted, 1)
        else:
            counted = i * 0 + 1
        q_amax = tl.maximum(q_amax, _row_sizes(q, counted))
    balance = tl.sqrt_rn(tl.div_rn(_bounded_amax(q_amax), _bounded_amax(k_amax)))
    bits = balance.to(tl.int32, bitcast=True)
    fraction, power = bits & 0x7FFFFF, bits & 0x7F800000
    between = (bits + (BALANCE_STEP >> 1)) & -BALANCE_STEP
    bits = tl.where(fraction > BALANCE_NEAR_ABOVE, power + 8388608, between)
    bits = tl.where(fraction < BALANCE_NEAR_BELOW, power, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fit_tokens(i, seq):
    """Return the i-th tokens [ROWS] of `numerics.fit_tokens`."""
    return tl.minimum(i * (seq // FIT_SAMPLES + 1), tl.maximum(seq, 1) - 1)


@triton.jit
def _load_by_channel(base, tokens, stride_token, seq, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load tokens in fp32 with one channel a thread.

    So maxima over tokens need few exchanges between threads.
    The compiler would give a thread eight channels if it knew that they are contiguous; `step` hides that.
    """
    step = tl.minimum(tl.maximum(seq, 1), 1)  # 1
    channels = tl.arange(0, WIDTH)[None, :]
    rows = base + tokens.to(tl.int64)[:, None] * stride_token
    return tl.load(rows + channels * step, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)


@triton.jit
def _fit_steps(seq, ROWS: tl.constexpr):
    """Return FIT_SAMPLES // ROWS, hidden from the compiler so that it does not unroll the loop.

    The loop runs once a program, so more code would mean more time to fetch instructions.
    """
    return tl.minimum(FIT_SAMPLES // ROWS, tl.maximum(seq, 0) + FIT_SAMPLES)


@triton.jit
def plan_fits(q_base, stride_qs, stride_qh, seq_q, group, k_base, stride_ks, extent, reach_ptr, center, k_weight,
              q_weight, steady, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
              HAS_MASK: tl.constexpr):  # fmt: skip
    """Check on a sample if the plan fits one head, as `plan_fits` of reference/plan.py.

    Every program of the head takes the same sample, so all decide alike. All programs run this first, so each
    instruction counts. K is read once: squares about the middle of its range follow from those about the centre.
    Reductions are joined, because each one makes all warps wait for each other. NaN in K is not handled: it makes the
    head's output NaN anyway.
    """
    high = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    low = tl.full([ROWS, WIDTH], float("inf"), tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    squares, q_squares = total, total
    number = tl.zeros([ROWS], tl.float32)
    for step in range(_fit_steps(extent, ROWS)):
        i = step * ROWS + tl.arange(0, ROWS)
        tokens = _fit_tokens(i, extent)
        k = _load_by_channel(k_base, tokens, stride_ks, extent, HEAD_DIM, WIDTH)
        # sampled from the group's heads in turn
        q_rows = q_base + (i * group // FIT_SAMPLES).to(tl.int64)[:, None] * stride_qh
        q = _load_by_channel(q_rows, _fit_tokens(i, seq_q), stride_qs, seq_q, HEAD_DIM, WIDTH)
        q = tl.minimum(tl.abs(q), LARGEST_QUERY) * q_weight[None, :]
        # each row of Q gets its own scale, so all rows weigh the same here, whatever their size
        q = q * (1.0 / tl.maximum(tl.sum(q, 1), AMAX_FLOOR))[:, None]
        q_squares += q * q
        x = (k - center[None, :]) * k_weight[None, :]
        if HAS_MASK:
            counted = tl.load(reach_ptr + tokens) > _FAINT
            number += counted.to(tl.float32)
            high = tl.maximum(high, tl.where(counted[:, None], k, float("-inf")))
            low = tl.minimum(low, tl.where(counted[:, None], k, float("inf")))
            x = tl.where(counted[:, None], x, 0.0)
        else:
            high, low = tl.maximum(high, k), tl.minimum(low, k)
        total += x
        squares += x * x
    count = tl.sum(number, 0) if HAS_MASK else FIT_SAMPLES * 1.0
    high, low = tl.split(tl.max(tl.join(high, -low), 0))
    sums, q_sums = tl.split(tl.sum(tl.join(tl.join(total, squares), tl.join(q_squares, q_squares)), 0))
    total, k_size = tl.split(sums)
    q_size, _ = tl.split(q_sums)
    off = tl.where(high >= -low, (high * 0.5 - low * 0.5 - center) * k_weight, 0.0)  # the middle of K's range
    best = tl.maximum(k_size + off * (off * count - total * 2.0), 0.0)
    best = tl.sqrt(best * q_size)
    tops, best_top = tl.split(tl.max(tl.join(tl.join(k_size, q_size), tl.join(best, best)), 0))
    k_top, q_top = tl.split(tops)
    best_top, _ = tl.split(best_top)
    twice = tl.where(steady != 0, 2.0 * STEADY_FIT_LIMIT, 2.0 * FIT_LIMIT)
    excess = tl.sum(q_size * k_top + k_size * q_top - best * (best_top * twice), 0)
    return (excess > 0) == 0
