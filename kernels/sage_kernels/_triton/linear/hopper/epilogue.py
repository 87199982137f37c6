"""Epilogue of the Hopper matmul: from a warpgroup's sums to its output, in fp32, rounded once."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...hopper_primitives import barrier, store_tile
from ..epilogue import activated
from .producer import residual_tile
from .types import PART


@gluon.jit
def load_vector(ptr, first, end, COUNT: gl.constexpr):
    """Load COUNT numbers from `first` on, 0 from `end` on, spread over the threads to take few registers."""
    at = first + gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(ptr + at, mask=at < end, other=0.0)


@gluon.jit
def finish(acc, x_scale, w_scale, bias, gate, KIND: gl.constexpr, SUMS: gl.constexpr):
    """Turn sums [rows, block_n] into fp32 outputs [rows, block_out], without residual and gates by row.

    x_scale, w_scale, bias, gate: from `load_vector`. gate is used if one vector serves all rows.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(0, SUMS)
    y = acc.to(gl.float32) * gl.convert_layout(x_scale, gl.SliceLayout(1, SUMS))[:, None]
    y *= gl.convert_layout(w_scale, COLUMN)[None, :]
    if KIND.has_bias:
        y += gl.convert_layout(bias, COLUMN).to(gl.float32)[None, :]
    if KIND.gated:
        value, pair = gl.split(gl.reshape(y, (KIND.rows, KIND.block_out, 2)))
        y = value * activated(pair, KIND.activation, True)
    else:
        y = activated(y, KIND.activation, True)
    if KIND.gate == "all":
        y *= gl.convert_layout(gate, gl.SliceLayout(0, y.type.layout)).to(gl.float32)[None, :]
    return y


@gluon.jit
def _times_gate(y, row, column, vectors, sizes):
    Y: gl.constexpr = y.type.layout
    m = row + gl.arange(0, y.shape[0], gl.SliceLayout(1, Y))
    o = column + gl.arange(0, y.shape[1], gl.SliceLayout(0, Y))
    base = (m // vectors.tokens).to(gl.int64) * vectors.stride_gb
    base += (m % vectors.tokens).to(gl.int64) * vectors.stride_gt
    inside = (m < sizes.rows)[:, None] & (o < sizes.columns_out)[None, :]
    return y * gl.load(vectors.gate_ptr + base[:, None] + o[None, :], mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _halves(y):
    """Return the left and right half of a tile's columns; no data moves between threads."""
    return gl.split(gl.permute(gl.reshape(y, (y.shape[0], 2, y.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def add_and_store(y, row, column, slot, phase, operands, HALF: gl.constexpr, FIRST: gl.constexpr, KIND: gl.constexpr):
    """Apply gates by row, add the residual, round, and store outputs y, which begin at (row, column).

    y is halved until a slot of the ring can hold the residual of its columns. FIRST: y's first column in the tile.
    Returns: the next slot and its phase.
    """
    AT_ONCE: gl.constexpr = operands.residual_desc.block_type.shape[1]
    if y.shape[1] > AT_ONCE:
        left, right = _halves(y)
        MIDDLE: gl.constexpr = y.shape[1] // 2
        slot, phase = add_and_store(left, row, column, slot, phase, operands, HALF, FIRST, KIND)
        slot, phase = add_and_store(
            right, row, column + MIDDLE, slot, phase, operands, HALF, FIRST + MIDDLE, KIND
        )  # fmt: skip
    else:
        if KIND.gate == "row":
            y = _times_gate(y, row, column, operands.vectors, operands.sizes)
        if KIND.has_residual:
            ring = operands.ring
            ring.wait_filled(slot, phase)
            y += residual_tile(ring, slot, HALF, operands.residual_desc).load(y.type.layout).to(gl.float32)
            ring.release(slot)
            slot, phase = ring.following(slot, phase)
        _store(y.to(operands.out_desc.dtype), row, column, operands, HALF, FIRST, KIND)
    return slot, phase


@gluon.jit
def _store(y, row, column, operands, HALF: gl.constexpr, FIRST: gl.constexpr, KIND: gl.constexpr):
    if y.shape[1] > PART:
        left, right = _halves(y)
        MIDDLE: gl.constexpr = y.shape[1] // 2
        _store(left, row, column, operands, HALF, FIRST, KIND)
        _store(right, row, column + MIDDLE, operands, HALF, FIRST + MIDDLE, KIND)
    else:
        buffer = operands.parts.index(HALF * KIND.buffers + FIRST // PART % KIND.buffers)
        tma.store_wait(KIND.buffers - 1)  # until the copy engine has read the buffer's last content
        barrier()
        buffer.store(y)
        fence_async_shared()
        barrier()
        store_tile(operands.out_desc, [row, column], buffer)
