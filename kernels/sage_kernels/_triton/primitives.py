"""What kernels of all rooms share: rounding to INT8 and e4m3, scales, loads of tokens and masks, statistics."""

import torch
import triton
import triton.language as tl

from ..facts import recipe


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
E4M3_OF_INT8 = tl.constexpr(recipe.E4M3_OF_INT8)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


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
def round_to_codes(x, FP8: tl.constexpr):
    """Codes of Q or K in the score matmul: INT8, which loses NaN, or e4m3 in steps of 1/E4M3_OF_INT8; |x| <= 127 is
    the caller's duty."""
    if FP8:
        codes = (x * E4M3_OF_INT8).to(tl.float8e4nv)
    else:
        codes = round_to_int8(x)
    return codes


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
def load_bias(pointers, inside):
    """Mask elements as biases on base-2 scores: bool (as uint8) gives 0 and -inf; -inf outside. No overflow."""
    if pointers.dtype.element_ty == tl.uint8:
        bias = tl.where(tl.load(pointers, mask=inside, other=0) != 0, 0.0, float("-inf"))
    else:
        given = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
        bias = tl.where(given == float("-inf"), given, tl.maximum(given * _LOG2_E, _LOWEST))
    return bias


def as_loadable(mask: torch.Tensor) -> torch.Tensor:
    """The mask itself in a type that kernels load: bool as the bytes that it is."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def broadcast_strides(mask: torch.Tensor) -> list[int]:
    """Strides of the mask, 0 where one element serves the whole dimension."""
    return [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
