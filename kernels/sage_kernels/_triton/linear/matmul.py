"""The 8-bit matmul with its epilogue for any GPU, reading tiles through pointers.

Also the kernel that adds up the last tiles of the Hopper matmul, which programs compute in parts.
"""

import triton
import triton.language as tl

from ..compat import gdc_launch_dependents, gdc_wait
from .epilogue import finish_and_store


STRIP = 16  # rows of the output that one program of `_add_parts_kernel` finishes


@triton.jit
def multiply_add(sums, x, w, FP8: tl.constexpr):
    """Return sums + x · w for codes [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_N], in exact int32 or in fp32.

    FP8 tensor cores truncate terms of a long sum. So they sum one block at most, and these sums are added in fp32.
    """
    if FP8:
        sums = tl.dot(x, w, sums, max_num_imprecise_acc=x.shape[1], out_dtype=tl.float32)
    else:
        sums = tl.dot(x, w, sums, out_dtype=tl.int32)
    return sums


@triton.jit
def tile_of(program, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return row and column of a program's tile.

    Programs walk GROUP rows of tiles column by column, so that neighbours find each other's operands in L2.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    inside = program % (GROUP * tiles_n)
    return first + inside % size, inside // size


@triton.jit(do_not_specialize=["rows", "tokens"])
def _linear_kernel(
    x_ptr, w_ptr, out_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr,
    rows, columns, columns_out, depth, tokens, stride_x, stride_w, stride_gb, stride_gt, stride_r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute out [rows, columns_out] from codes x [rows, depth] and w [columns, depth]. Grid: tiles."""
    i, j = tile_of(tl.program_id(0), rows, columns, BLOCK_M, BLOCK_N, GROUP)
    m, n = i * BLOCK_M + tl.arange(0, BLOCK_M), j * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows beyond the last one read it again: that is cheaper than a mask on each load
    x_rows = x_ptr + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * stride_x
    w_rows = w_ptr + tl.minimum(n, columns - 1).to(tl.int64)[:, None] * stride_w
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FP8 else tl.int32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        inside = (start + k < depth)[None, :]
        x = tl.load(x_rows + (start + k)[None, :], mask=inside, other=0.0)
        w = tl.load(w_rows + (start + k)[None, :], mask=inside, other=0.0)
        sums = multiply_add(sums, x, tl.trans(w), FP8)
    finish_and_store(
        sums, m, j, x_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr, residual_ptr, out_ptr, rows, columns, columns_out,
        tokens, stride_gb, stride_gt, stride_r, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, GATE, HAS_RESIDUAL, ASM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tokens", "whole", "parts"])
def _add_parts_kernel(
    sums_ptr, out_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr,
    rows, columns, columns_out, tokens, whole, parts, stride_gb, stride_gt, stride_r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr, HAS_X_SCALE: tl.constexpr = True, SCALE_STEP: tl.constexpr = 1,
):  # fmt: skip
    """Add up the parts of the shared tiles, and finish them into out [rows, columns_out].

    These are the tiles from number `whole` on. Parts are added in order, so that results repeat.

    sums: int32 or fp32 [tiles, parts, BLOCK_M, BLOCK_N]. Grid: strips of STRIP rows of the tiles.
    OVERLAP: programs may begin before the sums are written, so they wait first.
    HAS_X_SCALE: False for sums of rows in 16 bit, whose next launch may begin early, too.
    """
    if OVERLAP:
        if not HAS_X_SCALE:
            gdc_launch_dependents()
        gdc_wait()
    STRIPS: tl.constexpr = BLOCK_M // STRIP
    tile, strip = tl.program_id(0) // STRIPS, tl.program_id(0) % STRIPS
    i, j = tile_of(whole + tile, rows, columns, BLOCK_M, BLOCK_N, GROUP)
    row = strip * STRIP + tl.arange(0, STRIP)
    at = sums_ptr + (tile * parts).to(tl.int64) * (BLOCK_M * BLOCK_N)
    at += row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.load(at)
    for _ in range(1, parts):
        at += BLOCK_M * BLOCK_N
        sums += tl.load(at)
    finish_and_store(
        sums, i * BLOCK_M + row, j, x_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr, residual_ptr, out_ptr, rows, columns,
        columns_out, tokens, stride_gb, stride_gt, stride_r, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, GATE, HAS_RESIDUAL,
        ASM, HAS_X_SCALE, SCALE_STEP,
    )  # fmt: skip
