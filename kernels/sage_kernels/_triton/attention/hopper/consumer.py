"""A consumer warpgroup, from its query rows to its part of the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....facts import recipe
from .epilogue import finish
from .int8_loop import sum_up_codes
from .int8_sums import value_sums
from .main_loop import sum_up
from .queries import quantize_queries
from .split_keys import with_other_pieces
from .types import ROW_FIELDS, ROWS, TO_MIDRANGE, Layouts, Total, Warpgroup


_P_EXPONENT_LIMIT = gl.constexpr(recipe.P_EXPONENT_LIMIT)
_LAGGED_EXPONENT = gl.constexpr(recipe.LAGGED_EXPONENT)


@gluon.jit
def _kept_reference(program, score_rows, group_index, ROW: gl.constexpr):
    """Return the softmax reference [ROWS] from the row maxima of the previous call.

    These are max scores per row (log2) with K centred on that call's midrange, taken as if centred on this call's.
    """
    tile = program.tile
    row_max = program.recorded.row_max_ptr + (tile.b * tile.heads + tile.h).to(gl.int64) * tile.seq_q + score_rows
    earlier = gl.load(row_max, mask=score_rows < tile.seq_q, other=0.0)
    earlier -= program.shared.of_rows.index(group_index * ROW_FIELDS + TO_MIDRANGE).load(ROW)
    # a kept NaN or -inf says nothing about this call: 0 is as good a guess as any
    return gl.where(gl.abs(earlier) < _P_EXPONENT_LIMIT, earlier - _LAGGED_EXPONENT, 0.0)


@gluon.jit
def _sum_up(reference, program, group, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Run the loop over key tiles for the formats of P and V."""
    if KIND.format.pv == "int8":
        total = sum_up_codes(value_sums(program, KIND), group_index, group, KIND, LAYOUTS)
    else:
        total = sum_up(reference, group, group_index, KIND, LAYOUTS)
    return total


@gluon.jit
def consume(program, group_index, KIND: gl.constexpr):
    """Quantise a warpgroup's query rows, walk the key tiles, write the output."""
    WIDTH: gl.constexpr = KIND.width
    BLOCK_N: gl.constexpr = KIND.block_n
    PV_DTYPE: gl.constexpr = KIND.pv_dtype
    FORMAT: gl.constexpr = KIND.format
    FP8: gl.constexpr = FORMAT.pv == "fp8_e4m3"
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    BITS: gl.constexpr = PV_DTYPE.primitive_bitwidth
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 256 // BITS]
    )
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=32 // BITS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(
        operand_index=0,
        parent=gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]),
        k_width=2,
    )
    LAYOUTS: gl.constexpr = Layouts(scores=SCORES, out=OUT, p_operand=P_OPERAND, weights=WEIGHTS)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)

    row_scale = quantize_queries(program, group_index, KIND, ROW)

    q_codes = program.shared.q_codes.index(group_index)
    reference = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    zero = gl.zeros((ROWS, BLOCK_N), gl.int32 if KIND.qk_dtype == gl.int8 else gl.float32, SCORES)
    score_rows = program.tile.first_row + group_index * ROWS + gl.arange(0, ROWS, ROW)
    if FORMAT.reference == "lagged":
        reference = _kept_reference(program, score_rows, group_index, ROW)
    earlier = program.shared.earlier
    if FP8:
        earlier = (earlier[0].index(group_index), earlier[1].index(group_index))
    group = Warpgroup(
        q_codes=q_codes, zero=zero, row_scale=row_scale, score_rows=score_rows, earlier=earlier,
        zeroed=program.shared.zeroed, turns=program.shared.turns, ring=program.ring, seen=program.seen,
    )  # fmt: skip

    if KIND.masking.mask == "tiles":
        # pieces of a short list may be empty: then all sums are 0
        total = Total(
            acc=gl.zeros((ROWS, WIDTH), gl.float32, OUT),
            reference=reference,
            running_sum=gl.zeros([ROWS], gl.float32, ROW),
            largest_p=gl.zeros([ROWS], gl.int32, ROW),
        )
        if program.seen.visited > 0:
            total = _sum_up(reference, program, group, group_index, KIND, LAYOUTS)
    else:
        total = _sum_up(reference, program, group, group_index, KIND, LAYOUTS)
    if FORMAT.reference != "running":
        # once all warpgroups are through, `redo` may use the ring
        mbarrier.arrive(program.shared.finished, count=1)
    if KIND.splits:
        is_last = gl.to_tensor(True)
        if program.split.pieces > 1:
            total, is_last = with_other_pieces(total, program.split, group_index, KIND, LAYOUTS)
        if is_last:
            finish(program, group, total, group_index, KIND, LAYOUTS)
    else:
        finish(program, group, total, group_index, KIND, LAYOUTS)
