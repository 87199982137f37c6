"""The epilogue of a warpgroup: check its sums, redo them if they do not fit, write the output."""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....facts import recipe
from ....facts.state import COUNT_FIELDS, COUNT_REDONE, COUNT_TRIED
from ...prologue.prepare_value_codes import FIRST_LOST, numbers_of, rows_before_sums
from .redo import redo
from .softmax import outgrown
from .types import LOWERED, ROW_FIELDS, ROWS, TO_MIDRANGE


def bits_of(number: float) -> int:
    """Return the bits of an fp32 number as an integer. Positive numbers have the order of their bits."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


_COUNTS = gl.constexpr(COUNT_FIELDS)
_TRIED = gl.constexpr(COUNT_TRIED)
_REDONE = gl.constexpr(COUNT_REDONE)
_P_EXPONENT = gl.constexpr(recipe.P_EXPONENT)
_P_EXPONENT_LIMIT = gl.constexpr(recipe.P_EXPONENT_LIMIT)
_SMALLEST_P = gl.constexpr(bits_of(2.0**recipe.LAGGED_LOWEST))
_LARGEST_P = gl.constexpr(bits_of(2.0**recipe.LAGGED_HIGHEST))
_INFINITY = gl.constexpr(bits_of(float("inf")))
_LN_2 = gl.constexpr(0.6931471805599453)
_FIRST_LOST = gl.constexpr(FIRST_LOST.value)
_LOST_ROWS = gl.constexpr(32)  # rows of numbers loaded at a time
_RELAXED = gl.constexpr("relaxed")  # see primitives.RELAXED


@gluon.jit
def _value_numbers(program, KIND: gl.constexpr, OUT: gl.constexpr):
    """Return scale and centre of V's channels, [WIDTH] each.

    It is `value_numbers` of ../../prologue/prepare_value_codes.py for Gluon.
    """
    WIDTH: gl.constexpr = KIND.width
    SUMS: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WIDTH, WIDTH // 4], [4, 1], [1, 0])
    tile = program.tile
    before, _ = rows_before_sums(program.seen.seq_kv)
    rows = before - _FIRST_LOST
    v_head = tile.b * (tile.heads // tile.group) + tile.h // tile.group
    numbers = numbers_of(program.inputs.v_scale_ptr, v_head, program.seen.seq_kv, KIND.block_n, WIDTH)
    lost = gl.zeros([_LOST_ROWS, WIDTH], gl.float32, SUMS)
    at = numbers + gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))[None, :]
    for first in range(0, rows, _LOST_ROWS):
        row = first + gl.arange(0, _LOST_ROWS, gl.SliceLayout(1, SUMS))[:, None]
        lost += gl.load(at + (row + _FIRST_LOST) * WIDTH, mask=row < rows, other=0.0)
    at = numbers + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
    return gl.load(at), gl.load(at + WIDTH) + gl.convert_layout(gl.sum(lost, 0), gl.SliceLayout(0, OUT))


@gluon.jit
def finish(program, group, total, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Turn a warpgroup's sums over all keys into its rows of output, LSE and kept row maxima."""
    HEAD_DIM: gl.constexpr = KIND.head_dim
    WIDTH: gl.constexpr = KIND.width
    FP8: gl.constexpr = KIND.format.pv == "fp8_e4m3"
    LAGGED: gl.constexpr = KIND.format.reference == "lagged"
    OUT: gl.constexpr = LAYOUTS.out
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUTS.scores)
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    inputs = program.inputs
    recorded = program.recorded
    of_rows = program.shared.of_rows
    tile = program.tile
    seq_q = tile.seq_q
    heads = tile.heads
    b = tile.b
    h = tile.h
    acc = total.acc
    reference = total.reference
    running_sum = total.running_sum
    largest_p = total.largest_p
    score_rows = group.score_rows
    h_kv = h // tile.group

    top = reference
    if KIND.format.reference != "running":
        if LAGGED:
            # compare the largest P of each row with the range of e4m3; a row that saw no key, or a NaN, always fits
            saw = ((largest_p != 0) | (tile.full > 0)) & (largest_p <= _INFINITY)
            fits = (largest_p <= _LARGEST_P) & (largest_p >= _SMALLEST_P) | (saw == 0) | (score_rows >= seq_q)
            top = gl.where(saw, reference + gl.log2(largest_p.to(gl.float32, bitcast=True)), float("-inf"))
            again = gl.min(fits.to(gl.int32), 0) == 0
        else:
            again = outgrown(acc, running_sum, OUT)
        if KIND.scaling == "planned":
            lanes = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
            count = recorded.counts_ptr + (gl.load(recorded.row_ptr) + h_kv) * _COUNTS + lanes * 0
            # a warpgroup without rows does not count
            one = gl.full_like(lanes, 1) * (tile.first_row + group_index * ROWS < seq_q).to(gl.int32)
            gl.atomic_add(count + _TRIED, one, mask=lanes == 0, sem=_RELAXED)
            gl.atomic_add(count + _REDONE, one * again.to(gl.int32), mask=lanes == 0, sem=_RELAXED)
        if again:
            mbarrier.wait(program.shared.finished, 0)
            acc, reference, running_sum = redo(program, group, group_index, KIND, LAYOUTS)
            top = gl.where(gl.abs(reference) < _P_EXPONENT_LIMIT, reference + _P_EXPONENT, reference)
    elif KIND.keeps_max:
        top = gl.where(gl.abs(reference) < _P_EXPONENT_LIMIT, reference + _P_EXPONENT, reference)
    if KIND.keeps_max:
        # any finite number will do for a row that saw no key, or a NaN
        row_max = recorded.row_max_ptr + (b * heads + h).to(gl.int64) * seq_q + score_rows
        kept = top + of_rows.index(group_index * ROW_FIELDS + TO_MIDRANGE).load(ROW)
        gl.store(row_max, gl.where(gl.abs(kept) < float("inf"), kept, 0.0), mask=score_rows < seq_q)
    if LAGGED:
        reference = gl.where(top == float("-inf"), top, reference)  # -inf, as with a running max, if no key was seen

    # one division a row: each division takes several instructions, and a thread holds 64 numbers
    acc = acc * gl.convert_layout(1.0 / running_sum, gl.SliceLayout(1, OUT))[:, None]
    sees_nothing = gl.convert_layout((running_sum == 0.0) & (reference == float("-inf")), gl.SliceLayout(1, OUT))
    acc = gl.where(sees_nothing[:, None], gl.zeros_like(acc), acc)
    if KIND.format.pv == "int8":
        v_scale, v_center = _value_numbers(program, KIND, OUT)
        acc = acc * v_scale[None, :] + gl.where(sees_nothing[:, None], gl.zeros_like(acc), v_center[None, :])
    if FP8:
        v_scale = (
            inputs.v_scale_ptr
            + (b * (heads // tile.group) + h_kv) * WIDTH
            + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
        )
        acc = acc * gl.load(v_scale)[None, :]
    if KIND.format.pv != "16bit":
        # rounded weights may push a mean of finite values beyond the largest finite number
        LARGEST: gl.constexpr = 65504.0 if inputs.out_ptr.dtype.element_ty == gl.float16 else 3.38e38
        acc = gl.where(acc > LARGEST, LARGEST, gl.where(acc < -LARGEST, -LARGEST, acc))
    out = gl.convert_layout(acc.to(inputs.out_ptr.dtype.element_ty), IO)
    rows = tile.first_row + group_index * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, IO))
    inside = (rows < seq_q)[:, None] & (channels < HEAD_DIM)[None, :]
    out_rows = (b.to(gl.int64) * seq_q + rows) * heads + h  # contiguous [B, S_q, H, D]
    gl.store(inputs.out_ptr + out_rows[:, None] * HEAD_DIM + channels[None, :], out, mask=inside)
    if KIND.return_lse:
        lowered = of_rows.index(group_index * ROW_FIELDS + LOWERED).load(ROW)
        lse = (reference + gl.log2(running_sum)) * _LN_2 + lowered
        lse_at = inputs.lse_ptr + (b.to(gl.int64) * seq_q + score_rows) * heads + h
        gl.store(lse_at, lse, mask=score_rows < seq_q)
