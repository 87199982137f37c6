"""The softmax of one key tile in base 2: P, its sum, and the factor that rescales earlier sums.

The softmax reference of a row is the value (log2) subtracted from its scores before the exponential.
"""

import triton
import triton.language as tl

from ...facts import recipe
from ..primitives import ROUND_MAGIC, ROUND_MAGIC_BITS, load_bias


# With ADDS_BITS the softmax reference is off by half an ulp of 1.5·2^23 times a scale, which is 2^-5 at this scale.
# e4m3 has room for 2^0.8 above the largest P. Programs with larger scales take the loop that converts integers.
ADDED_BITS_LIMIT = tl.constexpr(1 / 16)
P_EXPONENT_LIMIT = tl.constexpr(recipe.P_EXPONENT_LIMIT)
# The same for P in INT8: the largest P is 254.5 and must stay below 255, so its exponent may be off by 2^-9.
CODES_ADDED_BITS_LIMIT = tl.constexpr(1 / 512)
P_CODE_EXPONENT = tl.constexpr(recipe.P_CODE_EXPONENT)
P_SIGNED_EXPONENT = tl.constexpr(recipe.P_SIGNED_EXPONENT)
_P_CODE_LIMIT = tl.constexpr(recipe.P_CODE_LIMIT)
_P_CODE_FALL = tl.constexpr(recipe.P_CODE_FALL)
# From this score on, its rounding alone may push P out of e4m3 where the scale is folded into the exponent.
_SCORE_LIMIT = tl.constexpr(2.0**27)


@triton.jit
def reference_below(top, EXPONENT: tl.constexpr):
    """Return the softmax reference of rows with largest score `top`: their largest P is 2^EXPONENT.

    Scores beyond a limit, where fp32 would round EXPONENT away, are their own reference: their largest P is 1.
    """
    IS_CODE: tl.constexpr = EXPONENT == P_CODE_EXPONENT or EXPONENT == P_SIGNED_EXPONENT
    LIMIT: tl.constexpr = _P_CODE_LIMIT if IS_CODE else P_EXPONENT_LIMIT
    if EXPONENT != 0:
        top = tl.where(tl.abs(top) < LIMIT, top - EXPONENT, top)
    return top


@triton.jit
def least_reference(reference, top, TILE: tl.constexpr):
    """Return the lowest softmax reference that the next key tile may take.

    It is the reference so far. With a reference for each tile (TILE), it is P_CODE_FALL below `top`, the highest so
    far, which keeps the sums finite.
    """
    if TILE:
        reference = top - _P_CODE_FALL
    return reference


@triton.jit
def online_softmax_step(scores, row_scale, key_scale, reference, least, running_sum, SCALE_PER_KEY: tl.constexpr,
                        EXPONENT: tl.constexpr, ADDS_BITS: tl.constexpr, SUMS_CODES: tl.constexpr):  # fmt: skip
    """Online softmax over one key tile that all rows see completely.

    scores: [BLOCK_M, BLOCK_N], int32, or fp32 of e4m3; row_scale: [BLOCK_M], Q's quantisation scale · softmax
    scale · log2(e); key_scale: a scalar, or [BLOCK_N] with SCALE_PER_KEY; reference: [BLOCK_M], `reference_below` the
    largest score so far (TILE: of the tile before); least: of `least_reference`. ADDS_BITS: scores become floats by an
    addition, see `Tile`; not with SCALE_PER_KEY. SUMS_CODES: P is rounded to integers before it is summed.

    Returns P fp32, the new reference, the new sum, and the factor for earlier sums.
    """
    if SCALE_PER_KEY:
        values = scores.to(tl.float32) * key_scale[None, :]
        tile_scale = row_scale
        top = tl.max(values, 1) * tile_scale
    else:
        tile_scale = row_scale * key_scale
        if ADDS_BITS:
            # |scores| < 2^22, so these bits are the floats scores + 1.5·2^23, in the same order. The compiler moves
            # the addition into the start value of the product's accumulator.
            scores += ROUND_MAGIC_BITS
            values = scores.to(tl.float32, bitcast=True)
            largest = tl.max(scores, 1) - ROUND_MAGIC_BITS
        else:
            # the tile has one positive scale, so its max may be taken on integers: Hopper compares three at a time
            values = scores.to(tl.float32)
            largest = tl.max(scores, 1)
        top = largest.to(tl.float32) * tile_scale
    if EXPONENT != 0:  # NaN in the output, rather than a P that saturates beside a sum that does not
        top = tl.where(tl.abs(top) < _SCORE_LIMIT, top, float("inf"))
    new_reference = tl.maximum(least, reference_below(top, EXPONENT))
    against = new_reference
    if ADDS_BITS:
        # subtract what was added together with the reference; the reference is then what that sum rounds to
        against = tl.fma(tile_scale, ROUND_MAGIC, new_reference)
        new_reference = tl.fma(tile_scale, -ROUND_MAGIC, against)
    # dequantisation is part of the exponent's FMA
    p = tl.exp2(tl.fma(values, tile_scale[:, None], -against[:, None]))
    if SUMS_CODES:
        p = (p + ROUND_MAGIC) - ROUND_MAGIC
    rescale = tl.exp2(reference - new_reference)
    return p, new_reference, tl.fma(running_sum, rescale, tl.sum(p, 1)), rescale


@triton.jit
def fixed_softmax_step(scores, row_scale, key_scale, reference, running_sum, SCALE_PER_KEY: tl.constexpr):
    """Softmax over one completely visible key tile with a fixed reference: no max, nothing to rescale.

    Neither the softmax nor the relative precision of P depends on the reference. Only the range of P does: in 16 bit,
    a score too far above the reference gives inf, which stays in the sums (see `outgrown`). Returns P and the new sum.
    """
    values = scores.to(tl.float32)
    tile_scale = row_scale
    if SCALE_PER_KEY:
        values = values * key_scale[None, :]
    else:
        tile_scale = row_scale * key_scale
    p = tl.exp2(tl.fma(values, tile_scale[:, None], -reference[:, None]))
    return p, running_sum + tl.sum(p, 1)


@triton.jit
def outgrown(acc, running_sum):
    """Return True if any row's sums are inf or NaN: P, P·V or the sum of P left its format's range."""
    lost = (tl.sum(acc * 0.0, 1) + running_sum * 0.0) != 0.0
    return tl.max(lost.to(tl.int32), 0) != 0


@triton.jit
def masked_scores(scores, row_scale, key_scale, shift, bias, softcap,
                  SCALE_PER_KEY: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Return scores in base 2, fp32 [BLOCK_M, BLOCK_N], with soft cap and bias; hidden keys included.

    shift: [BLOCK_M], what centring K took from the scores (read for the soft cap); bias: base 2, broadcast to
    [BLOCK_M, BLOCK_N].
    """
    values = scores.to(tl.float32)
    tile_scale = row_scale
    if SCALE_PER_KEY:
        values = values * key_scale[None, :]
    else:
        tile_scale = row_scale * key_scale
    if SOFTCAP:
        x = tl.fma(values, tile_scale[:, None], shift[:, None]) * tl.div_rn(softcap * 0.0 + 1.0, softcap)
        # cap · tanh, by exp2; base 2 throughout
        values = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))
        tile_scale = row_scale * 0.0 + 1.0
    if HAS_BIAS:
        values = tl.fma(values, tile_scale[:, None], bias)
        tile_scale = row_scale * 0.0 + 1.0
    return values * tile_scale[:, None]  # scaled before it is masked: -inf times a scale of 0 is NaN


@triton.jit
def masked_softmax_step(values, visible, reference, least, running_sum, EXPONENT: tl.constexpr,
                        SUMS_CODES: tl.constexpr = False):  # fmt: skip
    """Online softmax over the scores of `masked_scores`; keys that are not `visible` do not count.

    visible: broadcast to the scores' shape. Other arguments and results as in `online_softmax_step`.
    """
    top = tl.max(tl.where(visible, values, float("-inf")), 1)
    new_reference = tl.maximum(least, reference_below(top, EXPONENT))
    # the reference of a row that has seen no key yet is -inf, and -inf minus -inf would be NaN
    finite = tl.where(new_reference == float("-inf"), 0.0, new_reference)
    # no FMA: the exponent of the largest score is exactly EXPONENT (0 beyond the limit), however large the score
    p = tl.where(visible, tl.exp2(values - finite[:, None]), 0.0)
    if SUMS_CODES:
        p = (p + ROUND_MAGIC) - ROUND_MAGIC
    rescale = tl.exp2(reference - finite)
    return p, new_reference, tl.fma(running_sum, rescale, tl.sum(p, 1)), rescale


@triton.jit
def _load_mask(mask_rows, reach, offs_m, offs_n, stride_mq, stride_mk, left, right, offset, seq_q, seq_kv,
               MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Return one tile's bias (base 2) and visibility, each broadcastable to [BLOCK_M, BLOCK_N]."""
    if MASK == "rows":
        inside = (offs_m < seq_q)[:, None] & (offs_n < seq_kv)[None, :]
        rows = offs_m.to(tl.int64)[:, None] * stride_mq
        bias = load_bias(mask_rows + rows + offs_n.to(tl.int64)[None, :] * stride_mk, inside)
        visible = bias > float("-inf")
    elif MASK == "keys":
        bias = tl.load(reach + offs_n)[None, :]
        visible = bias > float("-inf")
    else:
        visible = (offs_n < seq_kv)[None, :]
        bias = tl.zeros([1, 1], tl.float32)
        if HAS_LEFT:
            visible = visible & (offs_n[None, :] >= offs_m[:, None] + (offset - left))
        if HAS_RIGHT:
            visible = visible & (offs_n[None, :] <= offs_m[:, None] + (offset + right))
    return bias, visible


@triton.jit
def masked_step(
    scores, row_scale, key_scale, shift, softcap, mask_rows, reach, offs_m, offs_n, stride_mq, stride_mk,
    left, right, offset, seq_q, seq_kv, reference, running_sum, top,
    MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SCALE_PER_KEY: tl.constexpr, SOFTCAP: tl.constexpr, EXPONENT: tl.constexpr, LAGGED: tl.constexpr,
    TILE: tl.constexpr, SUMS_CODES: tl.constexpr,
):  # fmt: skip
    """Softmax over one key tile that may hide keys.

    top: with LAGGED the largest score so far, with TILE the highest reference so far. Returns P, the reference, the
    sum, `top`, and the factor for earlier sums.
    """
    bias, visible = _load_mask(
        mask_rows, reach, offs_m, offs_n, stride_mq, stride_mk, left, right, offset, seq_q, seq_kv,
        MASK, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    values = masked_scores(scores, row_scale, key_scale, shift, bias, softcap, SCALE_PER_KEY, SOFTCAP, HAS_BIAS)
    if LAGGED:
        top = tl.maximum(top, tl.max(tl.where(visible, values, float("-inf")), 1))
        p = tl.where(visible, tl.exp2(values - reference[:, None]), 0.0)
        running_sum += tl.sum(p, 1)
        rescale = running_sum
    else:
        p, reference, running_sum, rescale = masked_softmax_step(
            values, visible, reference, least_reference(reference, top, TILE), running_sum, EXPONENT, SUMS_CODES
        )
        if TILE:
            top = tl.maximum(top, reference)
    return p, reference, running_sum, top, rescale
