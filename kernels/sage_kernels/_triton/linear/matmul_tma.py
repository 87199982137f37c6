"""The 8-bit matmul on Hopper and newer: the copy engine fills shared memory, programs stay for several tiles."""

import triton
import triton.language as tl

from .epilogue import finish_tile, halves
from .matmul import tile_of


@triton.jit
def _store_part(
    sums, m, i, j, part, x_scale, w_scale_ptr, bias_ptr, gate_ptr, residual_desc, out_desc, rows, columns, columns_out,
    tokens, stride_gb, stride_gt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Finish and store one of the PARTS of a tile's columns."""
    PART: tl.constexpr = BLOCK_N // PARTS
    first = j * BLOCK_N + part * PART
    y = finish_tile(
        sums, m, first, x_scale, w_scale_ptr, bias_ptr, gate_ptr, rows, columns, columns_out, tokens, stride_gb,
        stride_gt, BLOCK_M, PART, ACTIVATION, GATED, HAS_BIAS, GATE, ASM,
    )  # fmt: skip
    at = [i * BLOCK_M, first // 2 if GATED else first]
    if HAS_RESIDUAL:
        y += residual_desc.load(at).to(tl.float32)
    out_desc.store(at, y.to(out_desc.dtype))


@triton.jit(do_not_specialize=["rows", "tokens", "programs"])
def _linear_tma_kernel(
    x_desc, w_desc, out_desc, residual_desc, x_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr,
    rows, columns, columns_out, depth, tokens, programs, stride_gb, stride_gt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    IMPRECISE: tl.constexpr,
):  # fmt: skip
    """As `_linear_kernel`; descriptors of codes x [rows, depth], w [columns, depth], out and residual [rows,
    columns_out]. What lies beyond their edges is read as zero and not written. A tile is finished in PARTS of its
    columns, which leaves room for more stages. Grid: programs."""
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
        i, j = tile_of(tile, rows, columns, BLOCK_M, BLOCK_N, GROUP)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FP8 else tl.int32)
        for start in range(0, depth, BLOCK_K):
            x = x_desc.load([i * BLOCK_M, start])
            w = w_desc.load([j * BLOCK_N, start])
            sums = tl.dot(
                x,
                w.T,
                sums,
                max_num_imprecise_acc=IMPRECISE if IMPRECISE > 0 else None,
                out_dtype=tl.float32 if FP8 else tl.int32,
            )
        m = i * BLOCK_M + tl.arange(0, BLOCK_M)
        x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)
        parts = (sums,)
        if PARTS == 2:
            parts = halves(sums, BLOCK_M, BLOCK_N)
        if PARTS == 4:
            left, right = halves(sums, BLOCK_M, BLOCK_N)
            parts = halves(left, BLOCK_M, BLOCK_N // 2) + halves(right, BLOCK_M, BLOCK_N // 2)
        for part in tl.static_range(PARTS):
            _store_part(
                parts[part], m, i, j, part, x_scale, w_scale_ptr, bias_ptr, gate_ptr, residual_desc, out_desc, rows,
                columns, columns_out, tokens, stride_gb, stride_gt, BLOCK_M, BLOCK_N, PARTS, ACTIVATION, GATED,
                HAS_BIAS, GATE, HAS_RESIDUAL, ASM,
            )  # fmt: skip
