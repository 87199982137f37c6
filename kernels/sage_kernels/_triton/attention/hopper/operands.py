"""P and V as operands of the tensor cores, and hidden values, which are zeroed before they are one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .types import ROWS


_ZEROED_ROWS = gl.constexpr(16)  # values rewritten together: few registers, in the middle of the key loop


@gluon.jit
def as_operand(p, PV_DTYPE: gl.constexpr, P_OPERAND: gl.constexpr, BLOCK_N: gl.constexpr):
    """P in the format and the layout of P·V; 8-bit P is given as `packed`. Moves nothing between threads."""
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
    """A value tile in shared memory as [BLOCK_N, WIDTH]."""
    if PV != "16bit":
        rows = v_tile.permute((1, 0))
    else:
        rows = v_tile.reshape((BLOCK_N, WIDTH))
    return rows


@gluon.jit
def zero_hidden(v_tile, reach, first_key, FIRST: gl.constexpr, END: gl.constexpr, WIDTH: gl.constexpr):
    """Zero the values of keys that no row sees, in shared memory: a probability of 0 would not silence a NaN."""
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
    """`zero_hidden` by the first two warpgroups, half of the tile each; all wait until both are done.

    All arrive, the one that does nothing too: otherwise two could be two turns ahead of it, and it would take the
    phase that it waits for, which is long over, for one to come.

    turn: how many tiles they did so before.
    """
    HALF: gl.constexpr = BLOCK_N // 2
    if group_index < 2:
        zero_hidden(v_tile, reach, first_key, group_index * HALF, (group_index + 1) * HALF, WIDTH)
    mbarrier.arrive(zeroed, count=1)
    mbarrier.wait(zeroed, turn & 1)
