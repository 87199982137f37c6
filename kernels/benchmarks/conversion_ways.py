"""Attention's loop with five ways from INT32 scores to the exponent of its softmax, and two that halve its tiles.

64 rows by 64 keys of INT8, one scale a tile, a running max, P·V in bf16: what tests/kernels/codegen/conversions.py
counts for every GPU, and bench_conversions.py times on the one at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl


WAYS = ("native", "added", "folded", "integer_max", "folded_integer_max", "dual", "halves")
MAGIC, MAGIC_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)


@triton.jit
def _step(q, k, scale, WAY: tl.constexpr):
    """Scores as this way has them, and the largest of each row in base 2.

    Bits are added once, to the sums themselves: the compiler then begins the matrix unit's sums with them, which costs
    nothing where these are in registers.
    """
    ADDS: tl.constexpr = WAY == "added" or WAY == "folded" or WAY == "folded_integer_max"
    scores = tl.dot(q, k, out_dtype=tl.int32)
    if ADDS:
        scores += MAGIC_BITS
        values = scores.to(tl.float32, bitcast=True)
    else:
        values = scores.to(tl.float32)
    if WAY == "added":
        values -= MAGIC
    if WAY == "integer_max":
        top = tl.max(scores, 1).to(tl.float32)
    elif WAY == "folded_integer_max":
        top = (tl.max(scores, 1) - MAGIC_BITS).to(tl.float32)
    elif WAY == "folded":
        top = tl.max(values, 1) - MAGIC
    else:
        top = tl.max(values, 1)
    return values, top * scale


@triton.jit
def _powers(values, scale, reference, WAY: tl.constexpr):
    against = reference
    if WAY == "folded" or WAY == "folded_integer_max":
        against = tl.fma(scale, MAGIC, reference)
    return tl.exp2(tl.fma(values, scale[:, None], -against[:, None]))


@triton.jit
def conversion_kernel(q_ptr, k_ptr, v_ptr, k_scale_ptr, out_ptr, q_scale, tiles, WAY: tl.constexpr, D: tl.constexpr,
                      M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    rows, channels = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    HALF: tl.constexpr = N // 2
    q = tl.load(q_ptr + rows[:, None] * D + channels[None, :])
    reference = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for tile in tl.range(0, tiles, num_stages=2):
        scale = tl.zeros([M], tl.float32) + tl.load(k_scale_ptr + tile) * q_scale
        if WAY == "dual" or WAY == "halves":
            # one half by floats, the other by integers; or both by floats
            OTHER: tl.constexpr = "folded_integer_max" if WAY == "dual" else "native"
            keys = tile * N + tl.arange(0, HALF)
            k = tl.load(k_ptr + keys[None, :] * D + channels[:, None])
            a, top = _step(q, k, scale, "native")
            k = tl.load(k_ptr + (keys + HALF)[None, :] * D + channels[:, None])
            b, top_b = _step(q, k, scale, OTHER)
            new = tl.maximum(reference, tl.maximum(top, top_b))
            p = _powers(a, scale, new, "native")
            p_b = _powers(b, scale, new, OTHER)
            rescale = tl.exp2(reference - new)
            total = tl.fma(total, rescale, tl.sum(p, 1) + tl.sum(p_b, 1))
            acc = acc * rescale[:, None]
            v = tl.load(v_ptr + keys[:, None] * D + channels[None, :])
            acc = tl.dot(p.to(tl.bfloat16), v, acc)
            v = tl.load(v_ptr + (keys + HALF)[:, None] * D + channels[None, :])
            acc = tl.dot(p_b.to(tl.bfloat16), v, acc)
        else:
            keys = tile * N + tl.arange(0, N)
            k = tl.load(k_ptr + keys[None, :] * D + channels[:, None])
            values, top = _step(q, k, scale, WAY)
            new = tl.maximum(reference, top)
            p = _powers(values, scale, new, WAY)
            rescale = tl.exp2(reference - new)
            total = tl.fma(total, rescale, tl.sum(p, 1))
            acc = acc * rescale[:, None]
            v = tl.load(v_ptr + keys[:, None] * D + channels[None, :])
            acc = tl.dot(p.to(tl.bfloat16), v, acc)
        reference = new
    tl.store(out_ptr + rows[:, None] * D + channels[None, :], acc / total[:, None])
