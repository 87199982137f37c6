"""Round Q and K to the formats of ordinary blocks: INT8, INT4, and FP4 as 16-bit numbers or packed.

The two kinds of FP4 are MXFP4 and NVFP4. Rounds where sage_kernels/facts/base_formats.py does.
"""

import triton
import triton.language as tl

from ...facts import recipe
from ..primitives import AMAX_FLOOR, E4M3_MAX, nan_unless_finite, round_to_int


E2M1_MAX = tl.constexpr(recipe.E2M1_MAX)
MXFP4_LOWEST = tl.constexpr(recipe.MXFP4_LOWEST)
INT8_MAX, INT4_MAX = tl.constexpr(recipe.INT8_MAX), tl.constexpr(recipe.INT4_MAX)


@triton.jit
def _ratio(number, x):
    """Return number / x, rounded once; number is a constant."""
    return tl.div_rn(x * 0.0 + number, x)


@triton.jit
def _power_above(x):
    """Return the smallest power of two that is not below x > 0."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _round_to_e4m3(x):
    """Round x >= 0 to the nearest e4m3 number, saturating, in fp32.

    Written out because a GPU without FP8 has no cast.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    below = round_to_int(tl.minimum(x, 1.0) * 512.0).to(tl.float32) * (1.0 / 512.0)
    return tl.minimum(tl.where(x >= 1.0 / 64.0, normal, below), E4M3_MAX)


@triton.jit
def round_to_e2m1(x):
    """Round x to the nearest e2m1 number, ties to even mantissas, saturating.

    A NaN becomes some number.
    """
    x = tl.minimum(tl.maximum(x, -E2M1_MAX), E2M1_MAX)
    size = tl.abs(x)
    inverse = tl.where(size >= 4, 0.5, tl.where(size >= 2, 1.0, 2.0))
    return tl.div_rn(round_to_int(x * inverse).to(tl.float32), inverse)


@triton.jit
def token_scale(x, BASE: tl.constexpr):
    """Return the amax of each token of x [ROWS, WIDTH], bounded from below, and its quantisation scale."""
    amax = tl.maximum(tl.max(tl.abs(x), 1), AMAX_FLOOR)
    if BASE == "int8":
        scale = tl.div_rn(amax, amax * 0.0 + INT8_MAX)
    elif BASE == "int4":
        scale = tl.div_rn(amax, amax * 0.0 + INT4_MAX)
    elif BASE == "nvfp4":
        scale = tl.div_rn(amax, amax * 0.0 + E2M1_MAX * E4M3_MAX)
    else:
        scale = _power_above(tl.div_rn(amax, amax * 0.0 + E2M1_MAX))
    return amax, scale


@triton.jit
def fp4_groups(x, amax, scale, BASE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Round x [ROWS, WIDTH] to e2m1 with a scale for each group of 16 (NVFP4) or 32 (MXFP4) channels.

    Returns e2m1 numbers as fp32 [ROWS, GROUPS, GROUP], and the groups' scales relative to the token's [ROWS, GROUPS,
    1].
    """
    GROUP: tl.constexpr = 16 if BASE == "nvfp4" else 32
    grouped = tl.reshape(x, (ROWS, WIDTH // GROUP, GROUP))
    largest = tl.max(tl.abs(grouped), 2)
    if BASE == "nvfp4":
        groups = _round_to_e4m3(largest * _ratio(E4M3_MAX, amax)[:, None])
    else:
        above = _power_above(tl.maximum(tl.div_rn(largest, largest * 0.0 + E2M1_MAX), AMAX_FLOOR))
        groups = tl.maximum(tl.div_rn(above, above * 0.0 + scale[:, None]), MXFP4_LOWEST)
    step = groups * scale[:, None]
    inverse = tl.where(step > 0, _ratio(1.0, tl.where(step > 0, step, 1.0)), 0.0)
    return round_to_e2m1(grouped * inverse[:, :, None]), groups[:, :, None]


@triton.jit
def base_codes(x, BASE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Quantise x, fp32 [ROWS, WIDTH], with a scale for each token.

    Returns codes, int8 or (FP4) fp16, and the tokens' scales [ROWS], NaN for a token that is not finite.
    """
    amax, scale = token_scale(x, BASE)
    if BASE == "int8":
        codes = round_to_int(x * _ratio(INT8_MAX, amax)[:, None]).to(tl.int8)
    elif BASE == "int4":
        codes = round_to_int(x * _ratio(INT4_MAX, amax)[:, None]).to(tl.int8)
    else:
        values, groups = fp4_groups(x, amax, scale, BASE, ROWS, WIDTH)
        codes = tl.reshape(values * groups, (ROWS, WIDTH)).to(tl.float16)
    return codes, scale + nan_unless_finite(x, 1)


@triton.jit
def packed_codes(x, BASE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Quantise x, fp32 [ROWS, WIDTH], to packed FP4 for `tl.dot_scaled`.

    Returns e2m1 codes [ROWS, WIDTH // 2], two in a byte with the even channel in the low half; the groups' scales as
    `dot_scaled` takes them [ROWS, GROUPS]; and the tokens' scales [ROWS].
    """
    GROUP: tl.constexpr = 16 if BASE == "nvfp4" else 32
    amax, scale = token_scale(x, BASE)
    values, groups = fp4_groups(x, amax, scale, BASE, ROWS, WIDTH)
    size = tl.abs(values)
    # 0, 0.5, 1, 1.5, 2, 3, 4, 6 → 0 … 7
    code = tl.where(size >= 4, size * 0.5 + 4, tl.where(size >= 2, size + 2, size * 2)).to(tl.int32)
    code = tl.reshape(tl.where(values < 0, code + 8, code), (ROWS, WIDTH // 2, 2))
    low, high = tl.split(code)
    packed = (low | (high << 4)).to(tl.uint8)
    groups = tl.reshape(groups, (ROWS, WIDTH // GROUP))
    if BASE == "nvfp4":
        scales = groups.to(tl.float8e4nv)
    else:  # of a power of two the exponent is enough
        scales = (groups.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    return packed, scales, scale + nan_unless_finite(x, 1)
