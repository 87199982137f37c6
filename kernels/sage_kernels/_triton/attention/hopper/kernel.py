"""The attention kernel for Hopper (sm_90) in Gluon: one warp copies, two or three warpgroups compute.

It computes the same as ../kernel.py, for causal attention, sliding windows, masks, and lists of key tiles.
REFERENCE and PV mean the same as there. Two things go beyond Triton's own pipeliner: copies run ahead by as many tiles
as the ring has slots, and P·V of one tile runs during the softmax of the next.

Who waits for whom (tile t: keys K_t with their scales, values V_t; slot s holds K_t and V_t-1):

    producer, 1 warp (producer.py)             ring (../../ring.py)      each consumer: a warpgroup, 64 query rows
                                                                         (main_loop.py)
    acquire: wait for freed[s]    <─────────── freed[s] ───────────────  release_before, one arrival a warpgroup
    expect bytes, start copies    ──copies──>  K_t, V_t-1
                                  ──arrive──>  filled[s] ─────────────>  wait_filled
                                                                           S_t = Q·K_t     started (tensor cores, INT8)
                                                                           O += P_t-1·V_t-1   started behind it
                                                                           release_before: slot of tile t-1 is free
                                                                           wait for S_t; softmax: P_t, while P·V runs
                                                                           wait for O, and then on to tile t + 1

    Besides the ring, warpgroups wait for each other in two places:
    zeroed     two of them zero the values of hidden keys before any warpgroup multiplies these (operands.py);
    finished   a warpgroup that computes its rows again (redo.py) copies into the ring itself, once all warpgroups
               are through with it, and then waits for `landed`, barriers of its own.

Reading order: types.py (the structures passed around), ../../ring.py, producer.py, consumer.py: queries.py →
main_loop.py (softmax.py, operands.py, fp8_sums.py), or int8_loop.py (int8_sums.py) → split_keys.py → epilogue.py
(redo.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...hopper_primitives import wait_for_launch_before
from ...ring import KeyValueRing
from ..operands import band_tiles
from .consumer import consume
from .fp8_sums import allocate_earlier
from .int8_sums import allocate_lacking
from .producer import copy_keys_and_values
from .types import (
    ROW_FIELDS,
    ROWS,
    Copied,
    Format,
    Inputs,
    Kind,
    MaskKind,
    Program,
    Recorded,
    Seen,
    Shared,
    Split,
    Tile,
)


# registers of a thread; the two or three consumer warpgroups have those that the producer does not need
_REGISTERS_OF_TWO = gl.constexpr(240)
_REGISTERS_OF_THREE = gl.constexpr(160)
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _consume(program, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr):
    """Run `consume` for one warpgroup.

    The warpgroup's index is passed as a value, so that Triton reads the code once and not once for each warpgroup. The
    compiler sees it as a constant again once all is inlined. With a mask it decides which part of a tile to
    zero, and has to be a constant from the beginning.
    """
    if KIND.masking.mask == "keys" or KIND.masking.mask == "rows":
        consume(program, GROUP_INDEX, KIND)
    else:
        consume(program, gl.to_tensor(GROUP_INDEX), KIND)


@gluon.jit(do_not_specialize=[
    "seq_q", "seq_kv", "heads", "group", "state_width", "left", "right", "offset", "reach_step_b", "reach_step_h",
    "list_step_b", "list_step_h", "whole", "pieces",
])  # fmt: skip
def attention_fwd_hopper_kernel(
    q_ptr, keys, key_scales, values, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr,
    stats_ptr, row_ptr, counts_ptr, row_max_ptr, v_scale_ptr, state_width,
    stride_qb, stride_qs, stride_qh, mask_ptr, reach_ptr, tiles_ptr, numbers_ptr, stride_mb, stride_mh, stride_mq,
    reach_step_b, reach_step_h, list_step_b, list_step_h,
    left, right, offset, partials_ptr, arrived_ptr, whole, pieces, seq_q, seq_kv, heads, group, softmax_scale,
    HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, NUM_BUFFERS: gl.constexpr,
    SCALING: gl.constexpr, RETURN_LSE: gl.constexpr, MASK: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, REFERENCE: gl.constexpr, KEEPS_MAX: gl.constexpr,
    PV: gl.constexpr, GROUPS: gl.constexpr, SLICE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Attention of one query tile: GROUPS · 64 rows of one head.

    mask_ptr: mask of rows, whose keys are next to each other. keys: descriptor of codes of K, [rows, WIDTH], padded to
    whole tiles. values: descriptor of V [B, S_kv, H_kv, D] in 16 bit, or of 8-bit codes of V as the prologue lays them
    out. key_scales: quantisation scales of K, a pointer with one a key tile, or a descriptor with one a key (SCALING
    "per_token"). reach_ptr, tiles_ptr, numbers_ptr: of MaskTiles. With SPLIT, from program `whole` on, `pieces`
    programs share a query tile (split_keys.py), with partial sums in partials_ptr and counters in arrived_ptr. Other
    arguments as in ../kernel.py.
    """
    wait_for_launch_before()
    m_tiles = (seq_q + GROUPS * ROWS - 1) // (GROUPS * ROWS)
    n_tiles = (seq_kv + BLOCK_N - 1) // BLOCK_N

    # which query tile, and which piece of its keys
    program = gl.program_id(0)
    slot = 0
    piece = 0
    if SPLIT:  # from program `whole` on, `pieces` programs share a query tile
        slot = gl.maximum(program - whole, 0)
        pieces = gl.where(program < whole, 1, pieces)
        piece = slot % pieces
        program = gl.minimum(program, whole + slot // pieces)
    m_tile = program % m_tiles
    if HAS_RIGHT:
        m_tile = m_tiles - 1 - m_tile  # a head's longest tiles first: the last to run are then short
    first_row = m_tile * (GROUPS * ROWS)
    head_of_batch = program // m_tiles
    b = head_of_batch // heads
    h = head_of_batch % heads
    h_kv = h // group
    kv_head_of_batch = b * (heads // group) + h_kv
    k_row = kv_head_of_batch * n_tiles * BLOCK_N

    # which key tiles to visit: of the whole query tile, and of this piece
    QK_DTYPE: gl.constexpr = keys.dtype
    PV_DTYPE: gl.constexpr = values.dtype
    MASKING: gl.constexpr = MaskKind(mask=MASK, has_bias=HAS_BIAS, has_left=HAS_LEFT, has_right=HAS_RIGHT)
    FORMAT: gl.constexpr = Format(scale_per_key=SCALING == "per_token", pv=PV, reference=REFERENCE)
    reach = reach_ptr
    first = 0
    first_full = 0
    if MASK == "none":
        first, first_full, full, visited = band_tiles(
            first_row, seq_q, seq_kv, left, right, offset,
            BLOCK_M=GROUPS * ROWS, BLOCK_N=BLOCK_N, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT,
        )  # fmt: skip
    elif MASK == "tiles":  # a list for each query tile
        tiles_ptr += program.to(gl.int64) * n_tiles
        full = gl.load(numbers_ptr + program * 2)
        visited = gl.load(numbers_ptr + program * 2 + 1)
        first_full = full
    else:  # a list for each sample ("keys"), or for its heads and query tiles, too ("rows")
        which = b * list_step_b
        reach += b.to(gl.int64) * reach_step_b
        if MASK == "rows":
            which += h * list_step_h + m_tile
            reach += h_kv * reach_step_h
            mask_ptr += b.to(gl.int64) * stride_mb + h.to(gl.int64) * stride_mh
        tiles_ptr += which.to(gl.int64) * n_tiles
        full = gl.load(numbers_ptr + which * 2)
        visited = gl.load(numbers_ptr + which * 2 + 1)
    visited = gl.maximum(visited, 1)  # rows that see no key walk one tile, all of it masked
    ring_first = first
    ring_full = full
    ring_visited = visited
    if SPLIT:
        ring_first = first + visited * piece // pieces
        ring_visited = first + visited * (piece + 1) // pieces - ring_first
        ring_full = gl.minimum(gl.maximum(first + full - ring_first, 0), ring_visited)

    # shared memory
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], QK_DTYPE)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(QK_DTYPE, [GROUPS, ROWS, WIDTH], Q_LAYOUT)
    row_smem = gl.allocate_shared_memory(
        gl.float32, [GROUPS * ROW_FIELDS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    k_smem = gl.allocate_shared_memory(QK_DTYPE, [NUM_BUFFERS, BLOCK_N, WIDTH], keys.layout)
    v_smem = gl.allocate_shared_memory(PV_DTYPE, [NUM_BUFFERS] + values.block_type.shape, values.layout)
    if SCALING == "per_token":
        scale_smem = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, 1, BLOCK_N], key_scales.layout)
    else:
        scale_smem = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    freed = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    zeroed = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER).index(0)
    mbarrier.init(zeroed, count=GROUPS)
    finished = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER).index(0)
    mbarrier.init(finished, count=GROUPS)
    landed = gl.allocate_shared_memory(gl.int64, [GROUPS * 2, 1], BARRIER)
    for i in gl.static_range(GROUPS * 2):
        mbarrier.init(landed.index(i), count=1)
    for i in gl.static_range(NUM_BUFFERS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=GROUPS)
    earlier = (landed, landed)
    turns = landed
    if PV == "int8":
        earlier = allocate_lacking(GROUPS, WIDTH)
        turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
        for i in gl.static_range(GROUPS):
            mbarrier.init(turns.index(i), count=1)
        mbarrier.arrive(turns.index(0), count=1)
    if PV == "fp8_e4m3":
        earlier = (allocate_earlier(GROUPS, WIDTH), allocate_earlier(GROUPS, WIDTH))
    fence_async_shared()

    # arguments of the warps
    ring = KeyValueRing(
        k_tiles=k_smem, v_tiles=v_smem, k_scales=scale_smem, filled=filled, freed=freed, slots=NUM_BUFFERS
    )  # fmt: skip
    seen = Seen(
        reach=reach, tiles_ptr=tiles_ptr, n_tiles=n_tiles, first=ring_first, first_full=first_full, full=ring_full,
        visited=ring_visited, left=left, right=right, offset=offset, seq_kv=seq_kv, mask_ptr=mask_ptr,
        stride_mq=stride_mq, last_row=seq_q - 1,
    )  # fmt: skip
    inputs = Inputs(
        q_ptr=q_ptr, k_codes=keys, v_tiles=values, k_scales=key_scales, out_ptr=out_ptr,
        lse_ptr=lse_ptr, center_ptr=center_ptr, q_amax_ptr=q_amax_ptr, v_scale_ptr=v_scale_ptr, stride_qb=stride_qb,
        stride_qs=stride_qs, stride_qh=stride_qh, softmax_scale=softmax_scale,
    )  # fmt: skip
    recorded = Recorded(
        stats_ptr=stats_ptr, row_ptr=row_ptr, counts_ptr=counts_ptr, row_max_ptr=row_max_ptr,
        q_weight_ptr=q_weight_ptr, state_width=state_width,
    )  # fmt: skip
    shared = Shared(
        q_codes=q_smem, of_rows=row_smem, earlier=earlier, zeroed=zeroed, finished=finished,
        landed=landed, turns=turns,
    )  # fmt: skip
    tile = Tile(
        seq_q=seq_q, heads=heads, group=group, b=b, h=h, first_row=first_row, k_row=k_row, first=first, full=full,
        visited=visited,
    )  # fmt: skip
    split = Split(partials_ptr=partials_ptr, arrived_ptr=arrived_ptr, slot=slot, piece=piece, pieces=pieces)
    given = Program(
        inputs=inputs, recorded=recorded, shared=shared, ring=ring, seen=seen, tile=tile, split=split
    )  # fmt: skip
    copied = Copied(
        k_codes=keys, v_tiles=values, k_scales=key_scales, ring=ring, seen=seen, k_row=k_row,
        v_head=kv_head_of_batch, b=b, h_kv=h_kv,
    )  # fmt: skip
    # with lists and 16-bit P, reading scales early was slower
    EARLY: gl.constexpr = MASK == "none" or (MASK == "tiles" and PV == "fp8_e4m3")
    KIND: gl.constexpr = Kind(
        head_dim=HEAD_DIM, width=WIDTH, block_n=BLOCK_N, scaling=SCALING, return_lse=RETURN_LSE,
        keeps_max=KEEPS_MAX, groups=GROUPS, splits=SPLIT, slice=SLICE, masking=MASKING, format=FORMAT,
        qk_dtype=QK_DTYPE, pv_dtype=PV_DTYPE, scale_early=EARLY,
    )  # fmt: skip

    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (given, 0, KIND)),
                (_consume, (given, 1, KIND)),
                (copy_keys_and_values, (copied, WIDTH, BLOCK_N, MASKING, FORMAT)),
            ],
            [4, 1],
            [_REGISTERS_OF_TWO, _PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (given, 0, KIND)),
                (_consume, (given, 1, KIND)),
                (_consume, (given, 2, KIND)),
                (copy_keys_and_values, (copied, WIDTH, BLOCK_N, MASKING, FORMAT)),
            ],
            [4, 4, 1],
            [_REGISTERS_OF_THREE, _REGISTERS_OF_THREE, _PRODUCER_REGISTERS],
        )

    # Memory of a barrier stays a barrier until it is invalidated. A variant of the kernel that does not use one would
    # use its memory for something else. While other processes shared the GPU, the barrier's state came back over such
    # data: a NaN in one of ten thousand launches.
    mbarrier.invalidate(zeroed)
    mbarrier.invalidate(finished)
    for i in gl.static_range(GROUPS * 2):
        mbarrier.invalidate(landed.index(i))
    if PV == "int8":
        for i in gl.static_range(GROUPS):
            mbarrier.invalidate(turns.index(i))
    for i in gl.static_range(NUM_BUFFERS):
        mbarrier.invalidate(filled.index(i))
        mbarrier.invalidate(freed.index(i))
