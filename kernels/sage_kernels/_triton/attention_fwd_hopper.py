"""The attention kernel for Hopper (sm_90) in Gluon: one warp copies, two warpgroups of 64 query rows compute.

Same mathematics as attention_fwd.py, for masks that need not be read beside the loop: bands and masks of keys. What
Triton's own pipeliner can't give: the copy engine runs ahead by NUM_BUFFERS tiles, and P·V of one tile stays in flight
under the softmax of the next.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..state import STAT_FIELDS, STAT_Q_AMAX
from .hopper_parts import (
    band_tiles,
    copy_keys,
    copy_keys_and_values,
    fixed_softmax_tile,
    load_key_scale,
    load_tile,
    masked_softmax_tile,
    outgrown,
    silence_hidden,
    silence_together,
    softmax_tile,
    tile_at,
)


_thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in Triton 3.7
_STATS = gl.constexpr(STAT_FIELDS)
_STAT_Q_AMAX = gl.constexpr(STAT_Q_AMAX)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_AMAX_FLOOR = gl.constexpr(1e-30)
_ROUND_MAGIC = gl.constexpr(12582912.0)  # as primitives.round_to_int8
_ROUND_MAGIC_BITS = gl.constexpr(0x4B400000)
_ROWS = gl.constexpr(64)  # query rows of one warpgroup


@gluon.jit
def _next_slot(slot, phase, NUM_BUFFERS: gl.constexpr):
    """The next place in the ring of buffers, and the phase of its barriers."""
    wraps = slot == NUM_BUFFERS - 1
    return gl.where(wraps, 0, slot + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def _key_step(
    i, before, tile, v_slot, v_phase, slot, phase, acc, p, running_max, running_sum, q_codes, zero, row_scale,
    k_scales, k_smem, v_smem, scale_smem, k_full, k_empty, v_full, v_empty, silenced, reach, tiles_ptr, left,
    right, offset, score_rows, seq_kv, n_tiles, first, first_full, full, visited,
    GROUP_INDEX: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, NUM_BUFFERS: gl.constexpr,
    MASK: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    PV_DTYPE: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr, MASKED: gl.constexpr,
    KEEP_FIRST_MAX: gl.constexpr, SCALE_PER_KEY: gl.constexpr,
):  # fmt: skip
    """Scores of the i-th key tile, under its softmax P·V of the one `before`. Returns the tile after it first, and
    that one's slot in the ring and phase, which are counted up: i % NUM_BUFFERS takes a dozen instructions."""
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    # a list is read one tile ahead: its latency would add to that of the scale
    after = tile_at(gl.minimum(i + 1, visited - 1), tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
    if not SCALE_PER_KEY:
        key_scale = load_key_scale(k_scales, scale_smem.index(slot), tile, SCALE_PER_KEY, SCORES)
    mbarrier.wait(k_full.index(slot), phase)
    scores = warpgroup_mma(q_codes, k_smem.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_slot), v_phase)
    v_tile = v_smem.index(v_slot).reshape((BLOCK_N, WIDTH))
    if MASKED and MASK == "keys":
        turn = i - gl.maximum(full, 1)
        silence_together(v_tile, reach, before * BLOCK_N, silenced, turn, BLOCK_N, WIDTH, GROUP_INDEX)
    p_operand = gl.convert_layout(p.to(PV_DTYPE), P_OPERAND)
    acc = warpgroup_mma(p_operand, v_tile, acc, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    if SCALE_PER_KEY:
        key_scale = load_key_scale(k_scales, scale_smem.index(slot), tile, SCALE_PER_KEY, SCORES)
    mbarrier.arrive(k_empty.index(slot), count=1)
    if MASKED:
        p, running_max, running_sum, rescale = masked_softmax_tile(
            scores, row_scale, key_scale, reach, score_rows, tile * BLOCK_N, left, right, offset, seq_kv, running_max,
            running_sum, BLOCK_N, SCORES, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT, SCALE_PER_KEY,
        )  # fmt: skip
    elif KEEP_FIRST_MAX:
        p, running_sum = fixed_softmax_tile(scores, row_scale, key_scale, running_max, running_sum, SCALE_PER_KEY)
    else:
        p, running_max, running_sum, rescale = softmax_tile(
            scores, row_scale, key_scale, running_max, running_sum, SCALE_PER_KEY
        )
    # waiting here for the next keys ends a basic block: without it ptxas sinks the exponentials below the wait
    # for P·V
    next_slot, next_phase = _next_slot(slot, phase, NUM_BUFFERS)
    mbarrier.wait(k_full.index(next_slot), next_phase, pred=i + 1 < visited)
    acc, p_operand, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p_operand, p))
    mbarrier.arrive(v_empty.index(v_slot), count=1)
    if MASKED or not KEEP_FIRST_MAX:
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    return after, next_slot, next_phase, acc, p, running_max, running_sum


@gluon.jit
def _redo(
    keys, values, key_scales, q_codes, zero, row_scale, k_scales, k_tile, v_tile, scale_tile, landed, k_row, b, h_kv,
    reach, tiles_ptr, left, right, offset, score_rows, seq_kv, n_tiles, first, first_full, full, visited,
    WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, MASK: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, PV_DTYPE: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
    SCALE_PER_KEY: gl.constexpr,
):  # fmt: skip
    """All key tiles of one warpgroup with a running max, one after the other: it copies them itself."""
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    running_max = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    running_sum = gl.full([_ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros((_ROWS, WIDTH), gl.float32, OUT)
    v_rows = v_tile.reshape((BLOCK_N, WIDTH))
    for i in range(visited):
        tile = tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        # the copy engine may overwrite what this warpgroup has read and zeroed
        fence_async_shared()
        _thread_barrier()
        copy_keys(
            keys, key_scales, k_row, tile, landed, k_tile, scale_tile, values.block_type.nbytes, BLOCK_N, SCALE_PER_KEY
        )
        load_tile(values, [b, tile * BLOCK_N, h_kv, 0], landed, v_tile)
        mbarrier.wait(landed, i & 1)
        scores = warpgroup_mma(q_codes, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        p, running_max, running_sum, rescale = masked_softmax_tile(
            scores, row_scale, load_key_scale(k_scales, scale_tile, tile, SCALE_PER_KEY, SCORES), reach, score_rows,
            tile * BLOCK_N, left, right, offset, seq_kv, running_max, running_sum, BLOCK_N, SCORES, MASK, HAS_BIAS,
            HAS_LEFT, HAS_RIGHT, SCALE_PER_KEY,
        )  # fmt: skip
        if MASK == "keys":
            silence_hidden(v_rows, reach, tile * BLOCK_N, 0, BLOCK_N, WIDTH)
            _thread_barrier()
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
        acc = warpgroup_mma(gl.convert_layout(p.to(PV_DTYPE), P_OPERAND), v_rows, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    return acc, running_max, running_sum


@gluon.jit
def _consume(
    q_ptr, keys, values, key_scales, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr, stats_ptr, row_ptr,
    state_width, q_smem, k_smem, v_smem, scale_smem, k_full, k_empty, v_full, v_empty, silenced, finished, landed,
    k_row, stride_qb, stride_qs, stride_qh, reach, tiles_ptr, left, right, offset,
    seq_q, seq_kv, heads, group, b, h, first_row, n_tiles, first, first_full, full, visited, softmax_scale,
    GROUP_INDEX: gl.constexpr, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_BUFFERS: gl.constexpr, SCALING: gl.constexpr, RETURN_LSE: gl.constexpr, MASK: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PV_DTYPE: gl.constexpr,
    KEEP_FIRST_MAX: gl.constexpr, SCALE_PER_KEY: gl.constexpr,
):  # fmt: skip
    """One warpgroup: quantise 64 query rows, walk the key tiles, write the output."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])

    h_kv = h // group
    kv_head_of_batch = b * (heads // group) + h_kv
    rows = first_row + GROUP_INDEX * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, IO))
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, IO))
    inside = (rows < seq_q)[:, None] & (channels < HEAD_DIM)[None, :]

    # quantise Q: [64, WIDTH]
    q_base = q_ptr + b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
    q = gl.load(q_base + rows.to(gl.int64)[:, None] * stride_qs + channels[None, :], mask=inside, other=0.0).to(
        gl.float32
    )
    x = q
    if SCALING == "planned":
        x = q * gl.load(q_weight_ptr + kv_head_of_batch * WIDTH + channels)[None, :]
        stat = stats_ptr + (gl.load(row_ptr) + h_kv) * (_STATS * state_width) + _STAT_Q_AMAX * state_width + channels
        gl.atomic_max(stat, gl.max(gl.abs(q), 0), mask=channels < HEAD_DIM)
    amax = gl.max(gl.abs(x), 1)
    if SCALING == "per_block":
        amax = gl.full_like(amax, 0.0) + gl.max(amax, 0)
    if SCALING == "per_head":
        amax = gl.full_like(amax, 0.0) + gl.load(q_amax_ptr + b * heads + h)
    amax = gl.maximum(amax, _AMAX_FLOOR)
    inverse = gl.div_rn(gl.full_like(amax, 127.0), amax)
    codes = (x * inverse[:, None] + _ROUND_MAGIC).to(gl.int32, bitcast=True) - _ROUND_MAGIC_BITS
    q_smem.index(GROUP_INDEX).store(codes.to(gl.int8))
    fence_async_shared()
    # a NaN in a row must not be laundered into a code: max() dropped it
    row_scale = (amax * (1.0 / 127.0) + gl.sum(q * 0.0, 1)) * (softmax_scale * _LOG2_E)
    row_scale = gl.convert_layout(row_scale, ROW)
    if RETURN_LSE:  # smoothing lowered every score of a row by q·c: put it back
        center = gl.load(center_ptr + kv_head_of_batch * WIDTH + channels)
        shift = gl.convert_layout(gl.sum(q * center[None, :], 1) * softmax_scale, ROW)

    q_codes = q_smem.index(GROUP_INDEX)
    k_scales = key_scales
    if not SCALE_PER_KEY:
        k_scales += kv_head_of_batch * n_tiles
    running_max = gl.full([_ROWS], float("-inf"), gl.float32, ROW)
    running_sum = gl.full([_ROWS], 0.0, gl.float32, ROW)
    acc = gl.zeros((_ROWS, WIDTH), gl.float32, OUT)
    zero = gl.zeros((_ROWS, BLOCK_N), gl.int32, SCORES)

    score_rows = first_row + GROUP_INDEX * _ROWS + gl.arange(0, _ROWS, ROW)
    tile = tile_at(0, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
    mbarrier.wait(k_full.index(0), 0)
    scores = warpgroup_mma(q_codes, k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    key_scale = load_key_scale(k_scales, scale_smem.index(0), tile, SCALE_PER_KEY, SCORES)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    mbarrier.arrive(k_empty.index(0), count=1)
    p, running_max, running_sum, rescale = masked_softmax_tile(
        scores, row_scale, key_scale, reach, score_rows, tile * BLOCK_N, left, right, offset, seq_kv, running_max,
        running_sum, BLOCK_N, SCORES, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT, SCALE_PER_KEY,
    )  # fmt: skip
    v_slot = 0
    v_phase = 0
    slot = 1
    phase = 0
    before = tile
    tile = tile_at(gl.minimum(1, visited - 1), tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
    for i in range(1, full):
        after, next_slot, next_phase, acc, p, running_max, running_sum = _key_step(
            i, before, tile, v_slot, v_phase, slot, phase, acc, p, running_max, running_sum, q_codes, zero, row_scale,
            k_scales, k_smem, v_smem, scale_smem, k_full, k_empty, v_full, v_empty, silenced, reach, tiles_ptr, left,
            right, offset, score_rows, seq_kv, n_tiles, first, first_full, full, visited,
            GROUP_INDEX, WIDTH, BLOCK_N, NUM_BUFFERS, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT, PV_DTYPE, SCORES, OUT,
            False, KEEP_FIRST_MAX, SCALE_PER_KEY,
        )  # fmt: skip
        before = tile
        tile = after
        v_slot = slot
        v_phase = phase
        slot = next_slot
        phase = next_phase
    for i in range(gl.maximum(full, 1), visited):
        after, next_slot, next_phase, acc, p, running_max, running_sum = _key_step(
            i, before, tile, v_slot, v_phase, slot, phase, acc, p, running_max, running_sum, q_codes, zero, row_scale,
            k_scales, k_smem, v_smem, scale_smem, k_full, k_empty, v_full, v_empty, silenced, reach, tiles_ptr, left,
            right, offset, score_rows, seq_kv, n_tiles, first, first_full, full, visited,
            GROUP_INDEX, WIDTH, BLOCK_N, NUM_BUFFERS, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT, PV_DTYPE, SCORES, OUT,
            True, KEEP_FIRST_MAX, SCALE_PER_KEY,
        )  # fmt: skip
        before = tile
        tile = after
        v_slot = slot
        v_phase = phase
        slot = next_slot
        phase = next_phase
    mbarrier.wait(v_full.index(v_slot), v_phase)
    v_tile = v_smem.index(v_slot).reshape((BLOCK_N, WIDTH))
    if MASK == "keys":
        if visited > full:
            tile = tile_at(visited - 1, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
            turn = visited - gl.maximum(full, 1)
            silence_together(v_tile, reach, tile * BLOCK_N, silenced, turn, BLOCK_N, WIDTH, GROUP_INDEX)
    p_operand = gl.convert_layout(p.to(PV_DTYPE), P_OPERAND)
    acc = warpgroup_mma(p_operand, v_tile, acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if KEEP_FIRST_MAX:
        # the ring is free for other use once both warpgroups are through
        mbarrier.arrive(finished, count=1)
        if outgrown(acc, running_sum, OUT):
            mbarrier.wait(finished, 0)
            acc, running_max, running_sum = _redo(
                keys, values, key_scales, q_codes, zero, row_scale, k_scales, k_smem.index(GROUP_INDEX),
                v_smem.index(GROUP_INDEX), scale_smem.index(GROUP_INDEX), landed.index(GROUP_INDEX), k_row, b, h_kv,
                reach, tiles_ptr, left, right, offset, score_rows, seq_kv,
                n_tiles, first, first_full, full, visited,
                WIDTH, BLOCK_N, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT, PV_DTYPE, SCORES, OUT, SCALE_PER_KEY,
            )  # fmt: skip

    acc = acc / gl.convert_layout(running_sum, gl.SliceLayout(1, OUT))[:, None]
    sees_nothing = gl.convert_layout((running_sum == 0.0) & (running_max == float("-inf")), gl.SliceLayout(1, OUT))
    acc = gl.where(sees_nothing[:, None], gl.zeros_like(acc), acc)
    out = gl.convert_layout(acc, IO)
    out_rows = (b.to(gl.int64) * seq_q + rows) * heads + h  # contiguous [B, S_q, H, D]
    gl.store(out_ptr + out_rows[:, None] * HEAD_DIM + channels[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    if RETURN_LSE:
        lse = (running_max + gl.log2(running_sum)) * _LN_2 + shift
        lse_at = lse_ptr + (b.to(gl.int64) * seq_q + score_rows) * heads + h
        gl.store(lse_at, lse, mask=score_rows < seq_q)


@gluon.jit(do_not_specialize=[
    "seq_q", "seq_kv", "heads", "group", "state_width", "left", "right", "offset", "reach_step_b", "list_step_b",
])  # fmt: skip
def attention_fwd_hopper_kernel(
    q_ptr, keys, key_scales, values, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr,
    stats_ptr, row_ptr, state_width,
    stride_qb, stride_qs, stride_qh, reach_ptr, tiles_ptr, numbers_ptr, reach_step_b, list_step_b,
    left, right, offset, seq_q, seq_kv, heads, group, softmax_scale,
    HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, NUM_BUFFERS: gl.constexpr,
    SCALING: gl.constexpr, RETURN_LSE: gl.constexpr, MASK: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, KEEP_FIRST_MAX: gl.constexpr,
):  # fmt: skip
    m_tiles = (seq_q + 2 * _ROWS - 1) // (2 * _ROWS)
    n_tiles = (seq_kv + BLOCK_N - 1) // BLOCK_N
    m_tile = gl.program_id(0) % m_tiles
    if HAS_RIGHT:
        m_tile = m_tiles - 1 - m_tile  # the long ones of a head first: the last to run are then short
    first_row = m_tile * (2 * _ROWS)
    head_of_batch = gl.program_id(0) // m_tiles
    b = head_of_batch // heads
    h = head_of_batch % heads
    h_kv = h // group
    k_row = (b * (heads // group) + h_kv) * n_tiles * BLOCK_N
    PV_DTYPE: gl.constexpr = values.dtype
    SCALE_PER_KEY: gl.constexpr = SCALING == "per_token"
    reach = reach_ptr
    first = 0
    first_full = 0
    if MASK == "none":
        first, first_full, full, visited = band_tiles(
            first_row, 2 * _ROWS, seq_q, seq_kv, left, right, offset, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
    else:
        tiles_ptr += (b * list_step_b).to(gl.int64) * n_tiles
        full = gl.load(numbers_ptr + b * list_step_b * 2)
        visited = gl.load(numbers_ptr + b * list_step_b * 2 + 1)
        reach += b.to(gl.int64) * reach_step_b
    visited = gl.maximum(visited, 1)  # a program that sees nothing walks one tile, all of it masked

    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, WIDTH], gl.int8)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(gl.int8, [2, _ROWS, WIDTH], Q_LAYOUT)
    k_smem = gl.allocate_shared_memory(gl.int8, [NUM_BUFFERS, BLOCK_N, WIDTH], keys.layout)
    v_smem = gl.allocate_shared_memory(PV_DTYPE, [NUM_BUFFERS] + values.block_type.shape, values.layout)
    scale_smem = k_smem  # never read without a scale per key
    if SCALE_PER_KEY:
        scale_smem = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, 1, BLOCK_N], key_scales.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    silenced = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER).index(0)
    mbarrier.init(silenced, count=2)
    finished = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER).index(0)
    mbarrier.init(finished, count=2)
    landed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(landed.index(i), count=1)
    for i in gl.static_range(NUM_BUFFERS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                q_ptr, keys, values, key_scales, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr, stats_ptr,
                row_ptr, state_width,
                q_smem, k_smem, v_smem, scale_smem, k_full, k_empty, v_full, v_empty, silenced, finished, landed,
                k_row, stride_qb, stride_qs, stride_qh, reach, tiles_ptr, left, right, offset,
                seq_q, seq_kv, heads, group, b, h, first_row, n_tiles, first, first_full, full, visited, softmax_scale,
                0, HEAD_DIM, WIDTH, BLOCK_N, NUM_BUFFERS, SCALING, RETURN_LSE, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT,
                PV_DTYPE, KEEP_FIRST_MAX, SCALE_PER_KEY,
            )),
            (_consume, (
                q_ptr, keys, values, key_scales, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr, stats_ptr,
                row_ptr, state_width,
                q_smem, k_smem, v_smem, scale_smem, k_full, k_empty, v_full, v_empty, silenced, finished, landed,
                k_row, stride_qb, stride_qs, stride_qh, reach, tiles_ptr, left, right, offset,
                seq_q, seq_kv, heads, group, b, h, first_row, n_tiles, first, first_full, full, visited, softmax_scale,
                1, HEAD_DIM, WIDTH, BLOCK_N, NUM_BUFFERS, SCALING, RETURN_LSE, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT,
                PV_DTYPE, KEEP_FIRST_MAX, SCALE_PER_KEY,
            )),
            (copy_keys_and_values, (
                keys, values, key_scales, k_smem, v_smem, scale_smem, k_full, k_empty, v_full, v_empty, k_row, b,
                h_kv, tiles_ptr, n_tiles, first, first_full, full, visited, BLOCK_N, NUM_BUFFERS, MASK, HAS_LEFT,
                SCALE_PER_KEY,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_GLUON_DTYPES = {
    torch.int8: gl.int8,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


def describe(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor through which the copy engine reads blocks of x, swizzled as the tensor cores want them."""
    layout = gl.NVMMASharedLayout.get_default_for(block, _GLUON_DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
