"""Shared parts of the kernels: INT8 rounding, scales, the online softmax. Shapes are in comments above each tile."""

import triton
import triton.language as tl

from .. import recipe


# The kernels are launched with enable_fp_fusion=False and write tl.fma where they mean it: a product that the compiler
# fused into the sum behind it would round codes near a tie differently from the reference.

# fp32 numbers in [1.5·2^23, 2^24) have a spacing of 1: adding this constant rounds to nearest even, and the integer
# then sits in the low mantissa bits. Exact for |x| <= 2^22, and the same on every back end and in the interpreter.
ROUND_MAGIC = tl.constexpr(12582912.0)
ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
INT8_MAX = tl.constexpr(127.0)
AMAX_FLOOR = tl.constexpr(recipe.AMAX_FLOOR)
CHANNEL_FLOOR = tl.constexpr(recipe.CHANNEL_FLOOR)
SHRINK_LIMIT = tl.constexpr(recipe.SHRINK_LIMIT)
BALANCE_NEAR_BELOW = tl.constexpr(recipe.BALANCE_NEAR_BELOW)
BALANCE_NEAR_ABOVE = tl.constexpr(recipe.BALANCE_NEAR_ABOVE)
FIT_SAMPLES = tl.constexpr(recipe.FIT_SAMPLES)
FIT_LIMIT = tl.constexpr(recipe.FIT_LIMIT)
CENTER_SAMPLES = tl.constexpr(128)
CENTER_STEPS = tl.constexpr(2.0**22)
# Statistics and counts are read by later launches only. The default order, acq_rel, fences each atomic: it waits for
# all of the program's stores and drops the SM's L1 cache.
RELAXED = tl.constexpr("relaxed")
E4M3_MAX = tl.constexpr(recipe.E4M3_MAX)
P_EXPONENT_LIMIT = tl.constexpr(recipe.P_EXPONENT_LIMIT)
# Taking off 1.5·2^23 times a scale leaves the softmax's reference half an ulp of that product off: 2^-5 at this scale,
# where e4m3 has 2^0.8 above the largest P. Programs with larger scales take the loop that converts.
ADDED_BITS_LIMIT = tl.constexpr(1 / 16)
# From here on the rounding of a score alone may push P out of e4m3 in a step that folds the scale into the exponent.
_SCORE_LIMIT = tl.constexpr(2.0**27)


def head_width(head_dim: int) -> int:
    """Channels a tile holds: a power of two, at least 64 (at 32, Triton 3.7 reads out of bounds on sm_90)."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


@triton.jit
def record_amax(stat, amax, channels, HEAD_DIM: tl.constexpr):
    """Raise the fp32 numbers from `stat` on to amax >= 0; its NaNs do not count.

    As integers, which the bits of such numbers are ordered by: an atomic max of floats is two of integers, one a sign.
    """
    bits = tl.where(amax == amax, amax, 0.0).to(tl.int32, bitcast=True)
    at = stat.to(tl.pointer_type(tl.int32), bitcast=True) + channels
    tl.atomic_max(at, bits, mask=channels < HEAD_DIM, sem=RELAXED)


@triton.jit
def round_to_int(x):
    """Round to nearest even, int32; |x| <= 2^22 is the caller's duty."""
    return (x + ROUND_MAGIC).to(tl.int32, bitcast=True) - ROUND_MAGIC_BITS


@triton.jit
def round_to_int8(x):
    """Round to nearest even; |x| <= 127 is the caller's duty."""
    return round_to_int(x).to(tl.int8)


@triton.jit
def nan_unless_finite(x, axis: tl.constexpr):
    """0 where all of x along `axis` is finite, else NaN: max() drops NaN, and a lost NaN becomes a plausible code."""
    return tl.sum(x * 0.0, axis)


@triton.jit
def dynamic_scale(amax):
    """Dequantisation scale of a group and its inverse, from the group's amax."""
    amax = tl.maximum(amax, AMAX_FLOOR)
    return tl.div_rn(amax, amax * 0.0 + INT8_MAX), tl.div_rn(amax * 0.0 + INT8_MAX, amax)


@triton.jit
def planned_scale(amax, planned):
    """As `dynamic_scale`, for a group whose scale `planned` is folded into its values already (0: no plan).

    A group keeps that scale while its largest code is between SHRINK_LIMIT · 127 and 127, and any other takes its own:
    nothing is clipped, and nothing loses its resolution.
    """
    scale, inverse = dynamic_scale(amax)
    as_planned = (planned > 0) & (amax <= INT8_MAX) & (amax >= SHRINK_LIMIT * INT8_MAX)
    scale = tl.where(planned > 0, planned * tl.where(as_planned, 1.0, scale), scale)
    inverse = tl.where(as_planned, 1.0, inverse)
    return scale, inverse


@triton.jit
def load_tokens(base, tokens, stride_token, seq, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Rows `tokens` of one head in their own dtype, zero beyond the sequence and the head: [len(tokens), WIDTH]."""
    channels = tl.arange(0, WIDTH)[None, :]
    pointers = base + tokens.to(tl.int64)[:, None] * stride_token + channels
    if MASKED:
        x = tl.load(pointers, mask=(tokens < seq)[:, None] & (channels < HEAD_DIM), other=0.0)
    elif HEAD_DIM == WIDTH:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=channels < HEAD_DIM, other=0.0)
    return x


@triton.jit
def to_e4m3(x):
    """Round to e4m3, saturating: beyond ±448 it has nothing but NaN. NaN stays."""
    return tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def in_operand_order(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """P [BLOCK_M, BLOCK_N] with its keys permuted inside each 16, as V is stored (prepare_values.py).

    A thread holds other columns of an accumulator than of an 8-bit operand. In this order they are the same ones, so
    nothing moves between threads; a sum over keys does not care.
    """
    p = tl.permute(tl.reshape(p, (BLOCK_M, BLOCK_N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(p, (BLOCK_M, BLOCK_N))


@triton.jit
def reference_below(top, EXPONENT: tl.constexpr):
    """What exponents are taken against in a row whose largest score is `top`: its P is 2^EXPONENT."""
    if EXPONENT != 0:
        top = tl.where(tl.abs(top) < P_EXPONENT_LIMIT, top - EXPONENT, top)
    return top


@triton.jit
def online_softmax_step(scores, row_scale, key_scale, reference, running_sum, SCALE_PER_KEY: tl.constexpr,
                        EXPONENT: tl.constexpr, ADDS_BITS: tl.constexpr):  # fmt: skip
    """One wholly visible key tile of the base-2 online softmax.

    scores int32 [BLOCK_M, BLOCK_N]; row_scale [BLOCK_M] holds the Q scale, softmax scale and log2(e);
    key_scale is a scalar, or [BLOCK_N] with SCALE_PER_KEY; reference [BLOCK_M] is `reference_below` the largest score
    so far. ADDS_BITS: scores become floats by an addition, see `Tile`; not with SCALE_PER_KEY. Returns P fp32, the new
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
    new_reference = tl.maximum(reference, reference_below(top, EXPONENT))
    against = new_reference
    if ADDS_BITS:
        # what was added is taken off with the reference, and what that sum rounds to is the reference
        against = tl.fma(tile_scale, ROUND_MAGIC, new_reference)
        new_reference = tl.fma(tile_scale, -ROUND_MAGIC, against)
    # dequantisation folds into the exponent's FMA
    p = tl.exp2(tl.fma(values, tile_scale[:, None], -against[:, None]))
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
def masked_softmax_step(values, visible, reference, running_sum, EXPONENT: tl.constexpr):
    """As `online_softmax_step` on `masked_scores`, of which those not `visible` (broadcast) do not count."""
    top = tl.max(tl.where(visible, values, float("-inf")), 1)
    new_reference = tl.maximum(reference, reference_below(top, EXPONENT))
    # a row that has seen nothing yet has a reference of -inf: no difference may be taken from that
    finite = tl.where(new_reference == float("-inf"), 0.0, new_reference)
    # not fused: the largest score's exponent is exactly EXPONENT (0 beyond P_EXPONENT_LIMIT), however large the score
    p = tl.where(visible, tl.exp2(values - finite[:, None]), 0.0)
    rescale = tl.exp2(reference - finite)
    return p, new_reference, tl.fma(running_sum, rescale, tl.sum(p, 1)), rescale
