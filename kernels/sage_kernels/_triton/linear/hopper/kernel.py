"""The 8-bit matmul for Hopper (sm_90) in Gluon: one warp copies, two warpgroups multiply and finish.

Same mathematics as ../matmul.py. Two things go beyond Triton's own pipeliner: copies for the next tile run while a
tile is finished, and the two warpgroups, each with half of a tile's rows, need not wait for each other.

Who waits for whom (slot s holds BLOCK_K channels of a tile's codes, or a part of its residual):

    producer, 1 warp (producer.py)             ring (../../ring.py)      each warpgroup, half of the rows (sums.py)

    acquire: wait for freed[s]    <─────────── freed[s] ───────────────  release, one turn later
    expect bytes, start copies    ──copies──>  x, w
                                  ──arrive──>  filled[s] ─────────────>  wait_filled, multiply

    then, for each tile (epilogue.py): scales, bias, activation, gate, and the residual, which comes through the ring
    too; the copy engine writes pieces of the output from shared memory while the next ones are computed.

A unit is the work a program does at a time. Units are whole tiles first. If the last round of tiles has work for only
a few programs, these tiles are shared: each unit multiplies some channels of one, its sums go to memory, and
`_add_parts_kernel` (../matmul.py) adds them up.

Reading order: types.py (data passed between functions), ../../ring.py, producer.py, sums.py, epilogue.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...hopper_primitives import let_next_launch_begin, wait_for_launch_before
from ...ring import CodeRing
from ..matmul import tile_of
from .epilogue import add_and_store, finish, load_vector
from .producer import copy_codes, unit_of
from .sums import fp8_sums, int8_sums, keep_sums
from .types import BLOCK_K, PART, Kind, Operands, Sizes, Vectors


# registers of a thread: the two warpgroups get those that the producer does not need
_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _sums(unit, slot, phase, operands, HALF: gl.constexpr, KIND: gl.constexpr, SUMS: gl.constexpr):
    """Return one warpgroup's sums of a unit, the next slot and its phase."""
    _, first, end = unit_of(unit, operands.sizes, KIND)
    depth = (end - first) * BLOCK_K
    if KIND.fp8:
        acc, slot, phase = fp8_sums(operands.ring, slot, phase, depth, HALF, KIND, SUMS)
    else:
        acc, slot, phase = int8_sums(operands.ring, slot, phase, depth, HALF, KIND, SUMS)
    return acc, slot, phase


@gluon.jit
def _consume(operands, HALF: gl.constexpr, KIND: gl.constexpr):
    """Run one warpgroup on its half of the rows: first whole tiles, then parts of shared ones."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KIND.block_n, 32]
    )
    BLOCK_OUT: gl.constexpr = KIND.block_out
    vectors = operands.vectors
    sizes = operands.sizes
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), sizes.whole, sizes.programs):
        i, j = tile_of(tile, sizes.rows, sizes.columns, 2 * KIND.rows, KIND.block_n, KIND.group)
        row = (2 * i + HALF) * KIND.rows
        # loaded before the loop, which hides their latency
        x_scale = load_vector(vectors.x_scale_ptr, row, sizes.rows, KIND.rows)
        w_scale = load_vector(vectors.w_scale_ptr, j * KIND.block_n, sizes.columns, KIND.block_n)
        bias = w_scale
        gate = w_scale
        if KIND.has_bias:
            bias = load_vector(vectors.bias_ptr, j * KIND.block_n, sizes.columns, KIND.block_n)
        if KIND.gate == "all":
            gate = load_vector(vectors.gate_ptr, j * BLOCK_OUT, sizes.columns_out, BLOCK_OUT)
        acc, slot, phase = _sums(tile, slot, phase, operands, HALF, KIND, SUMS)
        y = finish(acc, x_scale, w_scale, bias, gate, KIND, SUMS)
        slot, phase = add_and_store(y, row, j * BLOCK_OUT, slot, phase, operands, HALF, 0, KIND)
    if KIND.split:  # a loop without `finish`: in one with it, FP8 spills registers (Triton 3.8)
        for unit in range(sizes.whole + gl.program_id(0), sizes.units, sizes.programs):
            acc, slot, phase = _sums(unit, slot, phase, operands, HALF, KIND, SUMS)
            keep_sums(acc, unit, operands, HALF, KIND)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "tokens", "programs", "whole", "parts"])
def linear_hopper_kernel(
    x_desc, w_desc, out_desc, residual_desc, sums_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr,
    rows, columns, columns_out, depth, tokens, programs, whole, parts, stride_gb, stride_gt,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, BUFFERS: gl.constexpr,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, FP8: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Compute the same as `_linear_kernel`, for operands given as tensor descriptors.

    Codes x [rows, depth] and w [columns, depth] give out [rows, columns_out]. x, w, out and residual are descriptors:
    beyond their edges zeros are read and nothing is written.
    SPLIT: tiles from number `whole` on are divided into `parts` parts each. Their sums go to sums [parts of all these
    tiles, BLOCK_M, BLOCK_N], for `_add_parts_kernel`. Grid: `programs`.
    """
    ROWS: gl.constexpr = BLOCK_M // 2
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * SLOTS, ROWS, BLOCK_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [SLOTS, BLOCK_N, BLOCK_K], w_desc.layout)
    pieces = gl.allocate_shared_memory(out_desc.dtype, [2 * BUFFERS, ROWS, PART], out_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    freed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=2)
    fence_async_shared()

    ring = CodeRing(x=x_smem, w=w_smem, filled=filled, freed=freed, slots=SLOTS)
    tiles = ((rows + BLOCK_M - 1) // BLOCK_M) * ((columns + BLOCK_N - 1) // BLOCK_N)
    sizes = Sizes(
        rows=rows, columns=columns, columns_out=columns_out, depth=depth, programs=programs,
        units=whole + (tiles - whole) * parts, whole=whole, parts=parts,
    )  # fmt: skip
    vectors = Vectors(
        x_scale_ptr=x_scale_ptr, w_scale_ptr=w_scale_ptr, bias_ptr=bias_ptr, gate_ptr=gate_ptr, tokens=tokens,
        stride_gb=stride_gb, stride_gt=stride_gt,
    )  # fmt: skip
    operands = Operands(
        ring=ring, parts=pieces, out_desc=out_desc, residual_desc=residual_desc, sums_ptr=sums_ptr, vectors=vectors,
        sizes=sizes,
    )  # fmt: skip
    KIND: gl.constexpr = Kind(
        rows=ROWS, block_n=BLOCK_N, block_out=BLOCK_N // 2 if GATED else BLOCK_N, group=GROUP, buffers=BUFFERS,
        activation=ACTIVATION, gated=GATED, has_bias=HAS_BIAS, gate=GATE, has_residual=HAS_RESIDUAL, fp8=FP8,
        split=SPLIT,
    )  # fmt: skip
    if SPLIT:
        let_next_launch_begin()
    wait_for_launch_before()
    gl.warp_specialize(
        [
            (_consume, (operands, 0, KIND)),
            (_consume, (operands, 1, KIND)),
            (copy_codes, (x_desc, w_desc, residual_desc, ring, sizes, KIND)),
        ],
        [4, 1],
        [_REGISTERS, _PRODUCER_REGISTERS],
    )

    # memory of a barrier must not be used for anything else before this
    for i in gl.static_range(SLOTS):
        mbarrier.invalidate(filled.index(i))
        mbarrier.invalidate(freed.index(i))
