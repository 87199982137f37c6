"""P and V as operands of the tensor cores, the zeroing of hidden values, and the order of key tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...prologue.mask_tiles import HIDES_KEYS as _HIDES_KEYS
from ..operands import tile_at
from .types import ROWS


HIDES_KEYS = gl.constexpr(_HIDES_KEYS.value)
_ZEROED_ROWS = gl.constexpr(16)  # rows of V rewritten at a time: few, as registers are scarce in the key loop


@gluon.jit
def as_operand(p, PV_DTYPE: gl.constexpr, P_OPERAND: gl.constexpr, BLOCK_N: gl.constexpr):
    """Convert P to the format and register layout of P·V. Moves nothing between threads.

    8-bit P is given as words of four codes, see `packed` of fp8_sums.py.
    """
    if PV_DTYPE.primitive_bitwidth == 8:
        low = gl.join(p.to(gl.uint8), (p >> 8).to(gl.uint8))
        high = gl.join((p >> 16).to(gl.uint8), (p >> 24).to(gl.uint8))
        codes = gl.permute(gl.join(low, high), (0, 1, 2, 4, 3))
        operand = gl.reshape(codes, (ROWS, BLOCK_N)).to(PV_DTYPE, bitcast=True)
    else:
        operand = p.to(PV_DTYPE)
    return gl.convert_layout(operand, P_OPERAND)


@gluon.jit
def value_operand(v_tile, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, PV: gl.constexpr):
    """Return a value tile in shared memory as [BLOCK_N, WIDTH]."""
    if PV != "16bit":
        rows = v_tile.permute((1, 0))
    else:
        rows = v_tile.reshape((BLOCK_N, WIDTH))
    return rows


@gluon.jit
def zero_hidden(v_tile, reach, first_key, FIRST: gl.constexpr, END: gl.constexpr, WIDTH: gl.constexpr):
    """Zero the values of hidden keys in shared memory, because a probability of 0 times NaN is NaN.

    FIRST, END: keys of the tile. Hidden are keys that no row sees.
    """
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    for start in gl.static_range(FIRST, END, _ZEROED_ROWS):
        rows = start + gl.arange(0, _ZEROED_ROWS, gl.SliceLayout(1, IO))
        v_rows = v_tile.slice(start, _ZEROED_ROWS, 0)
        v = v_rows.load(IO)
        v_rows.store(gl.where((gl.load(reach + first_key + rows) > float("-inf"))[:, None], v, gl.full_like(v, 0.0)))
    fence_async_shared()


@gluon.jit
def zero_hidden_together(v_tile, reach, first_key, zeroed, turn, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr,
                         group_index: gl.constexpr):  # fmt: skip
    """Run `zero_hidden` in the first two warpgroups, half of the tile each; all wait until both are done.

    A third warpgroup arrives at the barrier, too, though it zeroes nothing. Otherwise the two could be two turns ahead
    of it, and it would wait for a phase that is long over. turn: how many tiles were zeroed before.
    """
    HALF: gl.constexpr = BLOCK_N // 2
    if group_index < 2:
        zero_hidden(v_tile, reach, first_key, group_index * HALF, (group_index + 1) * HALF, WIDTH)
    mbarrier.arrive(zeroed, count=1)
    mbarrier.wait(zeroed, turn & 1)


@gluon.jit
def zero_hidden_of(tile, zeroings, v_tile, seen, zeroed, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr,
                   MASKING: gl.constexpr, group_index: gl.constexpr):  # fmt: skip
    """Zero the values of a tile's hidden keys, if it has any; return how many tiles were zeroed so far.

    tile: from `listed_tile`. A tile that is partly visible under a mask of keys is taken to hide some.
    """
    if MASKING.mask == "rows":
        if tile >= HIDES_KEYS:
            first_key = tile_number(tile, MASKING) * BLOCK_N
            zero_hidden_together(v_tile, seen.reach, first_key, zeroed, zeroings, BLOCK_N, WIDTH, group_index)
            zeroings += 1
    elif MASKING.mask == "keys":
        zero_hidden_together(v_tile, seen.reach, tile * BLOCK_N, zeroed, zeroings, BLOCK_N, WIDTH, group_index)
        zeroings += 1
    return zeroings


@gluon.jit
def listed_tile(i, seen, MASKING: gl.constexpr):
    """Return the i-th key tile to visit, with HIDES_KEYS in lists of a mask of rows.

    Tiles that all rows see completely come first.
    """
    if MASKING.mask == "tiles":  # programs may share a list, so `i` counts from the beginning of the piece
        tile = tile_at(
            seen.first + i, seen.tiles_ptr, seen.n_tiles, 0, 0, seen.first_full, MASKING.mask, MASKING.has_left
        )  # fmt: skip
    else:
        tile = tile_at(
            i, seen.tiles_ptr, seen.n_tiles, seen.first, seen.first_full, seen.full, MASKING.mask, MASKING.has_left
        )  # fmt: skip
    return tile


@gluon.jit
def tile_number(tile, MASKING: gl.constexpr):
    """Return the number of a key tile from `listed_tile`."""
    if MASKING.mask == "rows":
        tile = tile & (HIDES_KEYS - 1)
    return tile


@gluon.jit
def seen_tile(i, seen, MASKING: gl.constexpr):
    """Return the number of the i-th key tile to visit."""
    return tile_number(listed_tile(i, seen, MASKING), MASKING)
