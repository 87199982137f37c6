"""The producer warp of the Hopper matmul: it keeps the ring full, also from one tile to the next."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...hopper_primitives import load_tile, reinterpret
from ..matmul import tile_of
from .types import BLOCK_K


@gluon.jit
def unit_of(unit, sizes, KIND: gl.constexpr):
    """Return a unit's tile and the range of its codes, counted in slots: (tile, first, end).

    A slot has BLOCK_K channels. A unit is a whole tile or a part of a shared one. Parts begin with an even slot, since
    FP8 sums two slots at a time.
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
def copy_codes(x_desc, w_desc, residual_desc, ring, sizes, KIND: gl.constexpr):
    """Fill slot after slot as the warpgroups free them: a tile's codes, then its residual, if any.

    A slot holds BLOCK_K channels of the codes.
    """
    ROWS: gl.constexpr = KIND.rows
    BLOCK_N: gl.constexpr = KIND.block_n
    BLOCK_OUT: gl.constexpr = KIND.block_out
    slot = 0
    phase = 0
    for unit in range(gl.program_id(0), sizes.units, sizes.programs):
        tile, first_slot, end_slot = unit_of(unit, sizes, KIND)
        i, j = tile_of(tile, sizes.rows, sizes.columns, 2 * ROWS, BLOCK_N, KIND.group)
        row = i * (2 * ROWS)
        for start in range(first_slot * BLOCK_K, end_slot * BLOCK_K, BLOCK_K):
            ring.acquire(slot, phase)
            filled = ring.filled.index(slot)
            mbarrier.expect(filled, 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            load_tile(x_desc, [row, start], filled, ring.x.index(2 * slot))
            load_tile(w_desc, [j * BLOCK_N, start], filled, ring.w.index(slot))
            load_tile(x_desc, [row + ROWS, start], filled, ring.x.index(2 * slot + 1))
            slot, phase = ring.following(slot, phase)
        if KIND.has_residual:
            if not KIND.split or unit < sizes.whole:
                slot, phase = _copy_residual(residual_desc, row, j * BLOCK_OUT, slot, phase, ring, KIND)


@gluon.jit
def _copy_residual(residual_desc, row, column, slot, phase, ring, KIND: gl.constexpr):
    AT_ONCE: gl.constexpr = residual_desc.block_type.shape[1]
    for first in gl.static_range(0, KIND.block_out, AT_ONCE):
        ring.acquire(slot, phase)
        filled = ring.filled.index(slot)
        mbarrier.expect(filled, 2 * residual_desc.block_type.nbytes)
        for half in gl.static_range(2):
            place = residual_tile(ring, slot, half, residual_desc)
            load_tile(residual_desc, [row + half * KIND.rows, column + first], filled, place)
        slot, phase = ring.following(slot, phase)
    return slot, phase


@gluon.jit
def residual_tile(ring, slot, half, residual_desc):
    """Return a warpgroup's memory in a slot as a tile of the residual. half: which warpgroup."""
    memory = ring.x.index(2 * slot + half)
    return reinterpret(memory, residual_desc.dtype, residual_desc.block_type.shape, residual_desc.layout)
