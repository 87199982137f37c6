"""The last tiles of a matmul, each multiplied in parts by some programs: their sums added, and what follows."""

import triton
import triton.language as tl

from ..compat import gdc_wait
from .epilogue import finish_and_store
from .matmul import tile_of


STRIP = 16  # rows of a program


@triton.jit(do_not_specialize=["rows", "tokens", "whole", "parts"])
def _add_parts_kernel(
    sums_ptr, out_ptr, residual_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr,
    rows, columns, columns_out, tokens, whole, parts, stride_gb, stride_gt, stride_r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [rows, columns_out] of the tiles from `whole` on, of sums [tiles, parts, BLOCK_M, BLOCK_N], int32 or fp32,
    added in this order. Grid: STRIP rows of a tile a program. OVERLAP: these may begin before the sums are there."""
    if OVERLAP:
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
        ASM,
    )  # fmt: skip
