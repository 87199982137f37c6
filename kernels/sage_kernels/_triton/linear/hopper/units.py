"""What a program multiplies in one go: a tile, or some channels of one of the last tiles, which programs share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .types import BLOCK_K


@gluon.jit
def unit_of(unit, sizes, KIND: gl.constexpr):
    """(tile, first, end): which tile a unit is of, and from which slot of its codes to which.

    Parts begin with an even slot, as FP8 adds up two slots at a time.
    """
    slots = (sizes.depth + BLOCK_K - 1) // BLOCK_K
    tile = unit
    first = 0
    end = slots
    if KIND.split:
        rest = unit - sizes.whole
        part = rest % sizes.parts
        pairs = (slots + 1) // 2
        is_whole = rest < 0
        tile = gl.where(is_whole, unit, sizes.whole + rest // sizes.parts)
        first = gl.where(is_whole, 0, part * pairs // sizes.parts * 2)
        end = gl.where(is_whole, slots, gl.minimum((part + 1) * pairs // sizes.parts * 2, slots))
    return tile, first, end


@gluon.jit
def keep_sums(acc, unit, operands, HALF: gl.constexpr, KIND: gl.constexpr):
    """Write a warpgroup's sums of a part of a tile to memory: [unit - whole, rows of the tile, columns]."""
    SUMS: gl.constexpr = acc.type.layout
    m = HALF * KIND.rows + gl.arange(0, KIND.rows, gl.SliceLayout(1, SUMS))
    n = gl.arange(0, KIND.block_n, gl.SliceLayout(0, SUMS))
    first = (unit - operands.sizes.whole).to(gl.int64) * (2 * KIND.rows * KIND.block_n)
    # as 64 bits before `first` comes to it: else the loop before this spills registers
    at = (m[:, None] * KIND.block_n + n[None, :]).to(gl.int64) + first
    gl.store(operands.sums_ptr + at, acc)
