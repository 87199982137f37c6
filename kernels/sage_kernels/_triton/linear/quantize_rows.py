"""Quantise rows to 8 bit with one scale a row; norm and modulation in the same pass over memory."""

import triton
import triton.language as tl

from ..compat import gdc_launch_dependents
from ..primitives import AMAX_FLOOR, E4M3_MAX, INT8_MAX, round_to_int8, to_e4m3


@triton.jit
def _load_vector(ptr, columns, count):
    """Load a vector common to all rows, in fp32: [1, WIDTH]."""
    return tl.load(ptr + columns, mask=columns < count, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load_by_row(ptr, rows, columns, number, count, tokens, stride_batch, stride_token):
    """Load a tensor broadcast over rows, in fp32: [ROWS, WIDTH].

    Row r is token r % tokens of sample r // tokens; a stride is 0 if the tensor has one vector for all of these.
    """
    base = (rows // tokens).to(tl.int64) * stride_batch + (rows % tokens).to(tl.int64) * stride_token
    mask = (rows < number)[:, None] & (columns < count)[None, :]
    return tl.load(ptr + base[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_piece(x_ptr, beside_ptr, base, columns, inside, width_x, stride_x, stride_beside, HAS_BESIDE: tl.constexpr):
    """Load a piece of the input in fp32, [ROWS, WIDTH]; columns from width_x on come from `beside`."""
    if HAS_BESIDE:
        is_first = (columns < width_x)[None, :]
        x = tl.load(x_ptr + base * stride_x + columns[None, :], mask=inside & is_first, other=0.0).to(tl.float32)
        others = beside_ptr + base * stride_beside + (columns - width_x)[None, :]
        x = tl.where(is_first, x, tl.load(others, mask=inside & ~is_first, other=0.0).to(tl.float32))
    else:
        x = tl.load(x_ptr + base * stride_x + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _sum_of_rows(pieces, SQUARED: tl.constexpr):
    """Sum rows over all pieces, [ROWS]: first within threads, then once across threads."""
    total = pieces[0] * pieces[0] if SQUARED else pieces[0]
    for p in tl.static_range(1, len(pieces)):
        total += pieces[p] * pieces[p] if SQUARED else pieces[p]
    return tl.sum(total, 1)


@triton.jit(do_not_specialize=["number", "tokens", "eps"])
def _quantize_rows_kernel(
    x_ptr, beside_ptr, codes_ptr, scale_ptr, weight_ptr, bias_ptr, gain_ptr, shift_ptr, balance_ptr,
    number, count, width_x, tokens, eps, stride_x, stride_beside, stride_codes, stride_gb, stride_gt, stride_sb,
    stride_st,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BALANCE: tl.constexpr,
    HAS_BESIDE: tl.constexpr, FP8: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise, modulate and quantise rows [number, count]. Grid: groups of ROWS rows.

    Columns from width_x on are read from `beside`.
    A row is handled in PIECES of WIDTH columns, a power of two, as the widths of most models are a few of these.
    OVERLAP: let programs of the next launch start on free SMs; they wait for this launch before they read.
    """
    if OVERLAP:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = rows.to(tl.int64)[:, None]
    pieces = ()
    for p in tl.static_range(PIECES):
        columns = p * WIDTH + tl.arange(0, WIDTH)
        inside = (rows < number)[:, None] & (columns < count)[None, :]
        pieces += (
            _load_piece(x_ptr, beside_ptr, base, columns, inside, width_x, stride_x, stride_beside, HAS_BESIDE),
        )
    size = tl.cast(count, tl.float32)  # a count of 1 is a constant
    if NORM == "layer":
        mean = tl.div_rn(_sum_of_rows(pieces, False), size)[:, None]
        centred = ()
        for p in tl.static_range(PIECES):
            columns = p * WIDTH + tl.arange(0, WIDTH)
            inside = (rows < number)[:, None] & (columns < count)[None, :]
            centred += (tl.where(inside, pieces[p] - mean, 0.0),)
        pieces = centred
    if NORM != "none":
        root = tl.rsqrt(tl.div_rn(_sum_of_rows(pieces, True), size) + eps)[:, None]
    modulated = ()
    for p in tl.static_range(PIECES):
        columns = p * WIDTH + tl.arange(0, WIDTH)
        x = pieces[p]
        if NORM != "none":
            x = x * root
        if HAS_WEIGHT:
            x = x * _load_vector(weight_ptr, columns, count)
        if HAS_BIAS:
            x = x + _load_vector(bias_ptr, columns, count)
        if HAS_GAIN:
            x = x * _load_by_row(gain_ptr, rows, columns, number, count, tokens, stride_gb, stride_gt)
        if HAS_SHIFT:
            x = x + _load_by_row(shift_ptr, rows, columns, number, count, tokens, stride_sb, stride_st)
        if HAS_BALANCE:
            x = x * _load_vector(balance_ptr, columns, count)
        modulated += (x,)
    # max() drops NaN, and a lost NaN would become a plausible code: so NaN goes into the scale. This comes before the
    # maximum, because both at once would take more registers
    lost = modulated[0] * 0.0
    for p in tl.static_range(1, PIECES):
        lost += modulated[p] * 0.0
    lost = tl.sum(lost, 1)
    finite = ()
    for p in tl.static_range(PIECES):
        finite += (tl.where(modulated[p] * 0.0 == 0.0, modulated[p], 0.0),)
    top = tl.abs(finite[0])
    for p in tl.static_range(1, PIECES):
        top = tl.maximum(top, tl.abs(finite[p]))
    largest = E4M3_MAX if FP8 else INT8_MAX
    amax = tl.maximum(tl.max(top, 1), AMAX_FLOOR)
    inverse = tl.div_rn(amax * 0.0 + largest, amax)[:, None]
    for p in tl.static_range(PIECES):
        columns = p * WIDTH + tl.arange(0, WIDTH)
        inside = (rows < number)[:, None] & (columns < count)[None, :]
        x = finite[p] * inverse
        codes = to_e4m3(x) if FP8 else round_to_int8(x)
        tl.store(codes_ptr + base * stride_codes + columns[None, :], codes, mask=inside)
    tl.store(scale_ptr + rows, tl.div_rn(amax, amax * 0.0 + largest) + lost, mask=rows < number)
