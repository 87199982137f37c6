"""One key tile of the softmax, base 2: P, the sum of P, and what the sums so far are multiplied by."""

import triton
import triton.language as tl

from ...facts import recipe
from ..primitives import ROUND_MAGIC, ROUND_MAGIC_BITS, load_bias


# Taking off 1.5·2^23 times a scale leaves the softmax's reference half an ulp of that product off: 2^-5 at this scale,
# where e4m3 has 2^0.8 above the largest P. Programs with larger scales take the loop that converts.
ADDED_BITS_LIMIT = tl.constexpr(1 / 16)
P_EXPONENT_LIMIT = tl.constexpr(recipe.P_EXPONENT_LIMIT)
# With P in INT8 the largest is 254.5 and must stay below 255: its exponent may be 2^-9 off.
CODES_ADDED_BITS_LIMIT = tl.constexpr(1 / 512)
P_CODE_EXPONENT = tl.constexpr(recipe.P_CODE_EXPONENT)
P_SIGNED_EXPONENT = tl.constexpr(recipe.P_SIGNED_EXPONENT)
_P_CODE_LIMIT = tl.constexpr(recipe.P_CODE_LIMIT)
_P_CODE_FALL = tl.constexpr(recipe.P_CODE_FALL)
# From here on the rounding of a score alone may push P out of e4m3 in a step that folds the scale into the exponent.
_SCORE_LIMIT = tl.constexpr(2.0**27)


@triton.jit
def reference_below(top, EXPONENT: tl.constexpr):
    """What exponents are taken against in a row whose largest score is `top`: its P is 2^EXPONENT."""
    IS_CODE: tl.constexpr = EXPONENT == P_CODE_EXPONENT or EXPONENT == P_SIGNED_EXPONENT
    LIMIT: tl.constexpr = _P_CODE_LIMIT if IS_CODE else P_EXPONENT_LIMIT
    if EXPONENT != 0:
        top = tl.where(tl.abs(top) < LIMIT, top - EXPONENT, top)
    return top


@triton.jit
def least_reference(reference, top, TILE: tl.constexpr):
    """What the next tile's reference may not fall below: the one so far, or, where each tile has its own (TILE), a
    number that keeps the sums finite, `top` being the highest one so far."""
    if TILE:
        reference = top - _P_CODE_FALL
    return reference


@triton.jit
def online_softmax_step(scores, row_scale, key_scale, reference, least, running_sum, SCALE_PER_KEY: tl.constexpr,
                        EXPONENT: tl.constexpr, ADDS_BITS: tl.constexpr, SUMS_CODES: tl.constexpr):  # fmt: skip
    """One wholly visible key tile of the base-2 online softmax.

    scores int32 [BLOCK_M, BLOCK_N]; row_scale [BLOCK_M] holds the Q scale, softmax scale and log2(e);
    key_scale is a scalar, or [BLOCK_N] with SCALE_PER_KEY; reference [BLOCK_M] is `reference_below` the largest score
    so far (TILE: of the tile before), `least` of `least_reference`. ADDS_BITS: scores become floats by an addition,
    see `Tile`; not with SCALE_PER_KEY. SUMS_CODES: P is rounded before it is summed. Returns P fp32, the new
    reference, the new sum and the rescale factor.
    """
    if SCALE_PER_KEY:
        values = scores.to(tl.float32) * key_scale[None, :]
        tile_scale = row_scale
        top = tl.max(values, 1) * tile_scale
    else:
        tile_scale = row_scale * key_scale
        if ADDS_BITS:
            # |scores| < 2^22, so these are the floats scores + 1.5·2^23, in the same order. The compiler adds the bits
            # to what the product's accumulator starts with.
            scores += ROUND_MAGIC_BITS
            values = scores.to(tl.float32, bitcast=True)
            largest = tl.max(scores, 1) - ROUND_MAGIC_BITS
        else:
            # one positive scale for the tile: the max may be taken on the integers, of which Hopper compares three
            # at a time
            values = scores.to(tl.float32)
            largest = tl.max(scores, 1)
        top = largest.to(tl.float32) * tile_scale
    if EXPONENT != 0:  # no number, rather than a P that saturates beside a sum that does not
        top = tl.where(tl.abs(top) < _SCORE_LIMIT, top, float("inf"))
    new_reference = tl.maximum(least, reference_below(top, EXPONENT))
    against = new_reference
    if ADDS_BITS:
        # what was added is taken off with the reference, and what that sum rounds to is the reference
        against = tl.fma(tile_scale, ROUND_MAGIC, new_reference)
        new_reference = tl.fma(tile_scale, -ROUND_MAGIC, against)
    # dequantisation folds into the exponent's FMA
    p = tl.exp2(tl.fma(values, tile_scale[:, None], -against[:, None]))
    if SUMS_CODES:
        p = (p + ROUND_MAGIC) - ROUND_MAGIC
    rescale = tl.exp2(reference - new_reference)
    return p, new_reference, tl.fma(running_sum, rescale, tl.sum(p, 1)), rescale


@triton.jit
def fixed_softmax_step(scores, row_scale, key_scale, reference, running_sum, SCALE_PER_KEY: tl.constexpr):
    """As `online_softmax_step` with the reference that there is: no max, nothing to rescale.

    Softmax does not depend on its reference, and the relative precision of P does not either. Only its range ends:
    in 16 bit, a score that is too far above gives inf, which stays in the sums (see `outgrown`). Returns P and the new
    sum.
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
    """Whether any row of the program has sums that are no numbers: P, P·V or the sum of P left its format."""
    lost = (tl.sum(acc * 0.0, 1) + running_sum * 0.0) != 0.0
    return tl.max(lost.to(tl.int32), 0) != 0


@triton.jit
def masked_scores(scores, row_scale, key_scale, shift, bias, softcap,
                  SCALE_PER_KEY: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Scores in base 2, fp32 [BLOCK_M, BLOCK_N], where they are more than a product; the hidden ones too.

    shift [BLOCK_M]: what smoothing took from the scores (softcap); bias: added, base 2, broadcast to
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
        # cap · tanh, from the one exponential that there is; base 2 throughout
        values = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))
        tile_scale = row_scale * 0.0 + 1.0
    if HAS_BIAS:
        values = tl.fma(values, tile_scale[:, None], bias)
        tile_scale = row_scale * 0.0 + 1.0
    return values * tile_scale[:, None]  # before it is masked: -inf times a scale of 0 is no number


@triton.jit
def masked_softmax_step(values, visible, reference, least, running_sum, EXPONENT: tl.constexpr,
                        SUMS_CODES: tl.constexpr = False):  # fmt: skip
    """As `online_softmax_step` on `masked_scores`, of which those not `visible` (broadcast) do not count."""
    top = tl.max(tl.where(visible, values, float("-inf")), 1)
    new_reference = tl.maximum(least, reference_below(top, EXPONENT))
    # a row that has seen nothing yet has a reference of -inf: no difference may be taken from that
    finite = tl.where(new_reference == float("-inf"), 0.0, new_reference)
    # not fused: the largest score's exponent is exactly EXPONENT (0 beyond P_EXPONENT_LIMIT), however large the score
    p = tl.where(visible, tl.exp2(values - finite[:, None]), 0.0)
    if SUMS_CODES:
        p = (p + ROUND_MAGIC) - ROUND_MAGIC
    rescale = tl.exp2(reference - finite)
    return p, new_reference, tl.fma(running_sum, rescale, tl.sum(p, 1)), rescale


@triton.jit
def _load_mask(mask_rows, reach, offs_m, offs_n, stride_mq, stride_mk, left, right, offset, seq_q, seq_kv,
               MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Bias (base 2) and visibility of one tile, each broadcastable to [BLOCK_M, BLOCK_N]."""
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
    """Softmax of one tile that may hide keys. Returns P, reference, sum, largest score (LAGGED; TILE: highest
    reference) and rescale factor."""
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
