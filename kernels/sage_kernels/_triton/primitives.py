"""Functions shared by all kernels: rounding to INT8 and e4m3, scales, loads of tokens and masks."""

import torch
import triton
import triton.language as tl

from ..facts import recipe


# The kernels are launched with enable_fp_fusion=False and write tl.fma where one is wanted. If the compiler fused a
# product with a following sum, codes near a tie would round differently from the reference.

# fp32 numbers in [1.5·2^23, 2^24) have a spacing of 1. So adding this constant rounds to nearest even, and the integer
# is then in the low mantissa bits. Exact for |x| <= 2^22, and the same on every GPU and in Triton's interpreter.
ROUND_MAGIC = tl.constexpr(12582912.0)
ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
INT8_MAX = tl.constexpr(127.0)
AMAX_FLOOR = tl.constexpr(recipe.AMAX_FLOOR)
CHANNEL_FLOOR = tl.constexpr(recipe.CHANNEL_FLOOR)
SHRINK_LIMIT = tl.constexpr(recipe.SHRINK_LIMIT)
BALANCE_NEAR_BELOW = tl.constexpr(recipe.BALANCE_NEAR_BELOW)
BALANCE_NEAR_ABOVE = tl.constexpr(recipe.BALANCE_NEAR_ABOVE)
FIT_SAMPLES = tl.constexpr(recipe.FIT_SAMPLES)
FIT_LIMIT, STEADY_FIT_LIMIT = tl.constexpr(recipe.FIT_LIMIT), tl.constexpr(recipe.STEADY_FIT_LIMIT)
CENTER_SAMPLES = tl.constexpr(128)
CENTER_STEPS = tl.constexpr(2.0**22)
# Memory order of atomics on statistics and counts, which only later launches read. The default, acq_rel, is slow: it
# waits for all stores of the program and drops the SM's L1 cache.
RELAXED = tl.constexpr("relaxed")
E4M3_MAX = tl.constexpr(recipe.E4M3_MAX)
E4M3_OF_INT8 = tl.constexpr(recipe.E4M3_OF_INT8)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


def head_width(head_dim: int) -> int:
    """Return how many channels a tile holds for this head_dim: 64, 128 or 256.

    64 at least: with 32, Triton 3.7 reads out of bounds on sm_90.
    """
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


@triton.jit
def record_amax(stat, amax, channels, HEAD_DIM: tl.constexpr):
    """Raise the recorded maxima at `stat` to amax, one fp32 number a channel; NaN is ignored.

    amax must be >= 0: the bits of such floats are ordered as integers are, and one atomic max of integers is enough.
    """
    bits = tl.where(amax == amax, amax, 0.0).to(tl.int32, bitcast=True)
    at = stat.to(tl.pointer_type(tl.int32), bitcast=True) + channels
    tl.atomic_max(at, bits, mask=channels < HEAD_DIM, sem=RELAXED)


@triton.jit
def round_to_int(x):
    """Round to nearest even, as int32. The caller guarantees |x| <= 2^22."""
    return (x + ROUND_MAGIC).to(tl.int32, bitcast=True) - ROUND_MAGIC_BITS


@triton.jit
def round_to_int8(x):
    """Round to nearest even, as int8. The caller guarantees |x| <= 127."""
    return round_to_int(x).to(tl.int8)


@triton.jit
def round_to_codes(x, FP8: tl.constexpr):
    """Round Q or K to codes for the score matmul: INT8, or e4m3 after multiplying by E4M3_OF_INT8.

    The caller guarantees |x| <= 127. INT8 has no NaN: a NaN must be kept in the scale (`nan_unless_finite`).
    """
    if FP8:
        codes = (x * E4M3_OF_INT8).to(tl.float8e4nv)
    else:
        codes = round_to_int8(x)
    return codes


@triton.jit
def nan_unless_finite(x, axis: tl.constexpr):
    """Return 0 where all of x along `axis` is finite, else NaN.

    Added to a scale it keeps NaN and inf visible: max() drops NaN, and INT8 would make a plausible code of it.
    """
    return tl.sum(x * 0.0, axis)


@triton.jit
def dynamic_scale(amax):
    """Return the dequantisation scale of a group, amax / 127, and its inverse."""
    amax = tl.maximum(amax, AMAX_FLOOR)
    return tl.div_rn(amax, amax * 0.0 + INT8_MAX), tl.div_rn(amax * 0.0 + INT8_MAX, amax)


@triton.jit
def planned_scale(amax, planned):
    """Return scale and inverse of a group with values already divided by the planned scale (the guard).

    The planned scale is kept while the largest code is between SHRINK_LIMIT · 127 and 127. Any other group takes its
    own scale: so nothing is clipped, and no group loses resolution.

    Args:
        amax: of the divided values. planned: the planned scale; 0: no plan, values are undivided.
    """
    scale, inverse = dynamic_scale(amax)
    as_planned = (planned > 0) & (amax <= INT8_MAX) & (amax >= SHRINK_LIMIT * INT8_MAX)
    scale = tl.where(planned > 0, planned * tl.where(as_planned, 1.0, scale), scale)
    inverse = tl.where(as_planned, 1.0, inverse)
    return scale, inverse


@triton.jit
def load_tokens(base, tokens, stride_token, seq, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Load rows `tokens` of one head, [len(tokens), WIDTH], in their own dtype.

    Zero beyond head_dim; if MASKED, also beyond the sequence.
    """
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
    """Round to e4m3, clamped to ±448, as e4m3 has no infinity. NaN stays NaN."""
    return tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def load_bias(pointers, inside):
    """Load mask elements as biases to add to base-2 scores; -inf where `inside` is false.

    A bool mask (as uint8) gives 0 and -inf. A float mask is multiplied by log2(e), without overflow to -inf.
    """
    if pointers.dtype.element_ty == tl.uint8:
        bias = tl.where(tl.load(pointers, mask=inside, other=0) != 0, 0.0, float("-inf"))
    else:
        given = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
        bias = tl.where(given == float("-inf"), given, tl.maximum(given * _LOG2_E, _LOWEST))
    return bias


def as_loadable(mask: torch.Tensor) -> torch.Tensor:
    """Return a view of the mask for kernels to load: bool as uint8, other dtypes unchanged."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def broadcast_strides(mask: torch.Tensor) -> list[int]:
    """Return the strides of the mask, 0 for dimensions of size 1, so that they broadcast."""
    return [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
