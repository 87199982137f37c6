"""Combine step of decode attention: merge the outputs of all splits of the keys into one row."""

import triton
import triton.language as tl

from ..compat import gdc_wait


_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["splits", "all_rows"])
def _combine_kernel(partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, splits, all_rows, HEAD_DIM: tl.constexpr,
                    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
                    RETURN_LSE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """Merge BLOCK_D channels of one row over its splits, in a fixed order, so that results repeat.

    Grid: rows × parts of the channels.
    """
    if OVERLAP:
        gdc_wait()
    parts: tl.constexpr = WIDTH // BLOCK_D
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    channels = part * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in tl.range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        rows = split.to(tl.int64) * all_rows + row
        lse = tl.load(partial_lse_ptr + rows, mask=split < splits, other=float("-inf"))
        inside = (split < splits)[:, None] & (channels < HEAD_DIM)[None, :]
        values = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + channels[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - safe)
        rescale = tl.exp2(top - safe)
        acc = acc * rescale + tl.sum(values * weight[:, None], 0)
        total = total * rescale + tl.sum(weight, 0)
        top = new_top
    out = tl.where((total == 0.0) & (top == float("-inf")), 0.0, acc / total)
    tl.store(out_ptr + row * HEAD_DIM + channels, out.to(out_ptr.dtype.element_ty), mask=channels < HEAD_DIM)
    if RETURN_LSE:
        tl.store(lse_ptr + row, (top + tl.log2(total)) * _LN_2, mask=part == 0)
