"""Matmul of rows in 16 bit or fp32 with a weight in 8 bit; reading the weight limits its speed."""

import triton
import triton.language as tl

from .matmul import tile_of


@triton.jit(do_not_specialize=["rows"])
def _weight_only_kernel(
    x_ptr, w_ptr, out_ptr, w_scale_ptr, bias_ptr, rows, columns, depth, stride_x, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Compute out [rows, columns] from x [rows, depth] and codes w [columns, depth]. Grid: tiles.

    A code is exact in 16 bit, and its product with a 16-bit number is exact in fp32. FP32: multiply in fp32.
    """
    i, j = tile_of(tl.program_id(0), rows, columns, BLOCK_M, BLOCK_N, GROUP)
    m, n = i * BLOCK_M + tl.arange(0, BLOCK_M), j * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * stride_x
    # rows of the weight beyond the last one read it again: that is cheaper than a mask on each load
    w_rows = w_ptr + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * stride_w
    # The weight is the left operand: then tensor cores take it from the registers where it was converted, and the side
    # padded to 16 is that of x, which may have 1 row
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        inside = (start + k < depth)[None, :]
        # masked, since with 1 row of 16 most loads of x would be of rows beyond the last
        x = tl.load(x_rows + (start + k)[None, :], mask=inside & (m < rows)[:, None], other=0.0)
        w = tl.load(w_rows + (start + k)[None, :], mask=inside, other=0)
        if FP32:
            sums = tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), sums, input_precision="ieee")
        else:
            sums = tl.dot(w.to(x.dtype), tl.trans(x), sums)
    y = tl.trans(sums) * tl.load(w_scale_ptr + n, mask=n < columns, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])
