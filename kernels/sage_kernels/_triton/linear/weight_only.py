"""Matmul of a few rows in 16 bit or fp32 with a weight in 8 bit; reading the weight limits its speed."""

import triton
import triton.language as tl

from ..compat import gdc_launch_dependents, gdc_wait
from .epilogue import finish_and_store
from .matmul import tile_of


_PIECES = tl.constexpr(8)  # pieces of a row that are prefetched, each by one instruction


@triton.jit
def _prefetch(w_rows, first, depth, BYTES: tl.constexpr, ASM: tl.constexpr):
    """Have L2 read BYTES of each row of the weight from `first` on. Rows must be aligned to 16 bytes.

    L2 sees what the launch before writes, so this is safe before that launch has ended.
    """
    PIECE: tl.constexpr = BYTES // _PIECES
    at = tl.minimum(first + tl.arange(0, _PIECES) * PIECE, depth - PIECE)
    address = (w_rows[:, None] + at[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(ASM, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


def prefetch_instruction(size: int) -> str:
    """Return the PTX of a prefetch of one piece, of `size` bytes of a row. From sm_90 on."""
    return f"cp.async.bulk.prefetch.L2.global [$1], {size // _PIECES.value}; mov.b32 $0, 0;"


@triton.jit(do_not_specialize=["rows", "tokens"])
def _weight_only_kernel(
    x_ptr, w_ptr, out_ptr, residual_ptr, sums_ptr, w_scale_ptr, bias_ptr, gate_ptr,
    rows, columns, columns_out, depth, tokens, stride_x, stride_w, stride_gb, stride_gt, stride_r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, FP32: tl.constexpr, ASM: tl.constexpr, OVERLAP: tl.constexpr,
    SCALE_STEP: tl.constexpr, PREFETCH: tl.constexpr, PREFETCH_ASM: tl.constexpr,
):  # fmt: skip
    """Multiply a few rows by a weight in 8 bit.

    x [rows, depth], codes w [columns, depth], out [rows, columns_out]. Grid: tiles · PARTS.
    A code is exact in 16 bit, and its product with a 16-bit number is exact in fp32. FP32: multiply in fp32.
    LANES: warps divide the depth of a step among them, so that a tile with few rows of the weight keeps them all busy.
    PARTS: so many programs share a tile, each multiplies some of the depth and leaves sums [BLOCK_M, BLOCK_N] for
    `_add_parts_kernel`.
    OVERLAP: the launch may begin before the one before it ends, and lets the next one begin.
    PREFETCH: bytes of each row of the weight that L2 reads meanwhile; 0: none.
    """
    if OVERLAP:
        gdc_launch_dependents()
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    i, j = tile_of(tile, rows, columns, BLOCK_M, BLOCK_N, GROUP)
    m, n = i * BLOCK_M + tl.arange(0, BLOCK_M), j * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + m.to(tl.int64) * stride_x
    # rows of the weight beyond the last one read it again: that is cheaper than a mask on each load
    w_rows = w_ptr + tl.minimum(n, columns - 1).to(tl.int64) * stride_w
    STEP: tl.constexpr = LANES * BLOCK_K
    first, last = 0, depth
    if PARTS > 1:
        span = tl.cdiv(tl.cdiv(depth, STEP), PARTS) * STEP
        first = part * span
        last = tl.minimum(first + span, depth)
    if PREFETCH > 0:
        _prefetch(w_rows, first, depth, PREFETCH, PREFETCH_ASM)
    if OVERLAP:
        gdc_wait()
    # The weight is the left operand: then tensor cores take it from the registers where it was converted, and the side
    # padded to 8 or 16 is that of x, which may have 1 row
    if LANES == 1:
        k = tl.arange(0, BLOCK_K)[None, :]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in tl.range(first, last, STEP, num_stages=STAGES):
            inside = start + k < depth
            # masked, since with 1 row of 16 most loads of x would be of rows beyond the last
            x = tl.load(x_rows[:, None] + (start + k), mask=inside & (m < rows)[:, None], other=0.0)
            w = tl.load(w_rows[:, None] + (start + k), mask=inside, other=0.0)
            if FP32:
                sums = tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), sums, input_precision="ieee")
            else:
                sums = tl.dot(w.to(x.dtype), tl.trans(x), sums)
    else:
        k = tl.arange(0, LANES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
        by_lane = tl.zeros([LANES, BLOCK_N, BLOCK_M], tl.float32)
        for start in tl.range(first, last, STEP, num_stages=STAGES):
            inside = start + k < depth
            x = tl.load(x_rows[None, :, None] + (start + k), mask=inside & (m < rows)[None, :, None], other=0.0)
            w = tl.load(w_rows[None, :, None] + (start + k), mask=inside, other=0.0)
            if FP32:
                w, x = w.to(tl.float32), x.to(tl.float32)
            by_lane = tl.dot(w.to(x.dtype), tl.permute(x, (0, 2, 1)), by_lane, input_precision="ieee")
        sums = tl.sum(by_lane, 0)
    if PARTS > 1:
        at = sums_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_M * BLOCK_N)
        tl.store(at + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], tl.trans(sums))
    else:
        finish_and_store(
            tl.trans(sums), m, j, w_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr, residual_ptr, out_ptr, rows, columns,
            columns_out, tokens, stride_gb, stride_gt, stride_r, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, GATE,
            HAS_RESIDUAL, ASM, False, SCALE_STEP,
        )  # fmt: skip
