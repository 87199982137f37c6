"""A kernel that stores both forms of FP4 codes. Imported where Triton is known to be there."""

import triton
import triton.language as tl

from sage_kernels._triton.mixed.formats import base_codes, packed_codes


@triton.jit
def fp4_codes_kernel(x_ptr, emulated_ptr, packed_ptr, groups_ptr, scale_ptr, BASE: tl.constexpr, GROUPS: tl.constexpr):
    rows, channels = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + rows * 64 + channels)
    emulated, _ = base_codes(x, BASE, 16, 64)
    packed, groups, scale = packed_codes(x, BASE, 16, 64)
    tl.store(emulated_ptr + rows * 64 + channels, emulated)
    tl.store(packed_ptr + rows * 32 + tl.arange(0, 32)[None, :], packed)
    tl.store(groups_ptr + rows * GROUPS + tl.arange(0, GROUPS)[None, :], groups)
    tl.store(scale_ptr + tl.arange(0, 16), scale)
