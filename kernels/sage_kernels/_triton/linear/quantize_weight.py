"""Quantise a weight to 8 bit in one launch, each row with the range of codes that fits it best."""

import torch
import triton
import triton.language as tl

from ...facts import recipe
from ...facts.numerics import CODE_TYPES
from ..launch import launch
from ..primitives import AMAX_FLOOR, E4M3_MAX, INT8_MAX, round_to_int8, to_e4m3


_WIDTH = 1024  # columns at a time
ALIGNMENT = 16  # bytes between rows of codes are a multiple of this


@triton.jit
def _load_columns(w_ptr, balance_ptr, columns, depth, HAS_BALANCE: tl.constexpr):
    """Load columns of a weight's row in fp32, divided by the balance; 0 beyond its end."""
    w = tl.load(w_ptr + columns, mask=columns < depth, other=0.0).to(tl.float32)
    if HAS_BALANCE:
        w = tl.div_rn(w, tl.load(balance_ptr + columns, mask=columns < depth, other=1.0))
    return w


@triton.jit
def _codes_of(w, inverse):
    """Round to the nearest of the codes from -127 to 127."""
    return round_to_int8(tl.clamp(w * inverse, -INT8_MAX, INT8_MAX))


@triton.jit
def _quantize_weight_kernel(
    w_ptr, codes_ptr, scale_ptr, balance_ptr, depth, stride_w, stride_codes,
    WIDTH: tl.constexpr, SHRINKS: tl.constexpr, HAS_BALANCE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Quantise one row [depth] in three readings: its largest element, the error of each range, codes.

    Squared errors are fp32, their sums fp64: so no order of summation changes which range is chosen. Codes from
    `depth` to stride_codes become zeros. Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    w_ptr += row * stride_w
    codes_ptr += row * stride_codes
    largest = E4M3_MAX if FP8 else INT8_MAX
    top = tl.zeros([WIDTH], tl.float32)
    for start in range(0, depth, WIDTH):
        w = _load_columns(w_ptr, balance_ptr, start + tl.arange(0, WIDTH), depth, HAS_BALANCE)
        top = tl.maximum(top, tl.abs(w))
    best = tl.max(top, 0)
    if not FP8:
        amax = best
        sums = ()
        for _ in tl.static_range(len(SHRINKS)):
            sums += (tl.zeros([WIDTH], tl.float64),)
        for start in range(0, depth, WIDTH):
            w = _load_columns(w_ptr, balance_ptr, start + tl.arange(0, WIDTH), depth, HAS_BALANCE)
            added = ()
            for i in tl.static_range(len(SHRINKS)):
                tried = tl.maximum(amax * SHRINKS[i], AMAX_FLOOR)
                scale = tl.div_rn(tried, tried * 0.0 + largest)
                codes = _codes_of(w, tl.div_rn(tried * 0.0 + largest, tried))
                error = codes.to(tl.float32) * scale - w
                added += (sums[i] + (error * error).to(tl.float64),)
            sums = added
        least = tl.sum(sums[0], 0)
        for i in tl.static_range(1, len(SHRINKS)):
            error = tl.sum(sums[i], 0)
            best = tl.where(error < least, amax * SHRINKS[i], best)
            least = tl.minimum(error, least)
    best = tl.maximum(best, AMAX_FLOOR)
    inverse = tl.div_rn(best * 0.0 + largest, best)
    for start in range(0, stride_codes, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        w = _load_columns(w_ptr, balance_ptr, columns, depth, HAS_BALANCE)
        codes = to_e4m3(w * inverse) if FP8 else _codes_of(w, inverse)
        tl.store(codes_ptr + columns, codes, mask=columns < stride_codes)
    tl.store(scale_ptr + row, tl.div_rn(best, best * 0.0 + largest))


def launch_quantize_weight(
    weight: torch.Tensor, format: str, balance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the rows of a finite weight [N, K], divided by balance [K], as `ref_quantize_weight` does.

    Returns: codes [N, K], rows a multiple of ALIGNMENT bytes apart with zeros between; scale fp32 [N].
    """
    rows, depth = weight.shape
    weight = weight if weight.stride(1) == 1 or depth == 1 else weight.contiguous()
    stride = -(-depth // ALIGNMENT) * ALIGNMENT
    codes = torch.empty(rows, stride, dtype=CODE_TYPES[format], device=weight.device)
    scale = torch.empty(rows, dtype=torch.float32, device=weight.device)
    with torch.cuda.device_of(weight):
        launch(
            _quantize_weight_kernel, rows,
            weight, codes, scale, scale if balance is None else balance.float().contiguous(), depth, weight.stride(0),
            stride, WIDTH=_WIDTH, SHRINKS=recipe.SHRINKS, HAS_BALANCE=balance is not None, FP8=format == "fp8",
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes[:, :depth], scale
