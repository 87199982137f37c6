"""Query tiles shared by programs: each sums over its piece of the keys, the last adds them up."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...hopper_primitives import barrier
from ..tiles import MAX_PIECES
from .types import ROWS, Total


_PIECES_EXPONENT = gl.constexpr(MAX_PIECES.bit_length() - 1)  # MAX_PIECES is 2 to this power


@gluon.jit
def with_other_pieces(total, split, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Store one warpgroup's sums over its piece of the keys; if it comes last, add up all pieces.

    All pieces are read from memory, its own too, and added in their order: so the bits do not depend on which one is
    last. Nobody waits, so it does not matter which programs run at the same time.

    Returns: the total, and True in the last piece.
    """
    WIDTH: gl.constexpr = KIND.width
    GROUPS: gl.constexpr = KIND.groups
    OUT: gl.constexpr = LAYOUTS.out
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUTS.scores)
    acc = total.acc
    reference = total.reference
    running_sum = total.running_sum
    largest_p = total.largest_p
    slot = split.slot
    pieces = split.pieces
    rows = gl.arange(0, ROWS, ROW)
    acc_rows = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    # memory of a piece and warpgroup: three numbers a row, then acc
    SIZE: gl.constexpr = ROWS * (WIDTH + 3)
    of_rows = split.partials_ptr + (slot * GROUPS + group_index) * SIZE + rows
    of_acc = split.partials_ptr + (slot * GROUPS + group_index) * SIZE + 3 * ROWS
    of_acc += acc_rows[:, None] * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))[None, :]
    gl.store(of_rows, reference)
    gl.store(of_rows + ROWS, running_sum)
    gl.store(of_rows + 2 * ROWS, largest_p.to(gl.float32, bitcast=True))
    gl.store(of_acc, acc)
    barrier()  # all is stored before the arrival is counted
    arrived = gl.atomic_add(split.arrived_ptr + (slot // pieces) * GROUPS + group_index, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == pieces - 1
    if is_last:
        of_rows -= split.piece * GROUPS * SIZE
        of_acc -= split.piece * GROUPS * SIZE
        reference = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        for i in range(pieces):
            reference = gl.maximum(reference, gl.load(of_rows + i * (GROUPS * SIZE), cache_modifier=".cg"))
        finite = gl.where(reference == float("-inf"), 0.0, reference)
        if KIND.format.pv != "fp8_e4m3":  # leaves room for the sum of MAX_PIECES numbers that just fit
            finite += _PIECES_EXPONENT
            reference += _PIECES_EXPONENT
        acc = gl.zeros_like(acc)
        running_sum = gl.zeros_like(running_sum)
        largest_p = gl.zeros_like(largest_p)
        for i in range(pieces):
            at = of_rows + i * (GROUPS * SIZE)
            weight = gl.exp2(gl.load(at, cache_modifier=".cg") - finite)
            running_sum += gl.load(at + ROWS, cache_modifier=".cg") * weight
            largest = gl.load(at + 2 * ROWS, cache_modifier=".cg").to(gl.int32, bitcast=True)
            largest_p = gl.maximum(largest_p, largest)
            piece_acc = gl.load(of_acc + i * (GROUPS * SIZE), cache_modifier=".cg")
            acc += piece_acc * gl.convert_layout(weight, gl.SliceLayout(1, OUT))[:, None]
    return Total(acc=acc, reference=reference, running_sum=running_sum, largest_p=largest_p), is_last
