"""The attention kernel for Hopper (sm_90) in Gluon: one warp copies, two or three warpgroups compute.

Same mathematics as attention_fwd.py, for masks that need not be read beside the loop: bands and masks of keys. What
Triton's own pipeliner can't give: the copy engine runs ahead by NUM_BUFFERS tiles, and P·V of one tile stays in flight
under the softmax of the next. REFERENCE and PV are those of attention_fwd.py; see hopper_parts.py for what its tuples
hold.
"""

import functools

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

from .. import recipe
from ..state import COUNT_FIELDS, COUNT_REDONE, COUNT_TRIED, STAT_FIELDS, STAT_Q_AMAX
from .hopper_parts import (
    ROWS,
    allocate_kept,
    as_operand,
    bits_of,
    copy_keys,
    copy_keys_and_values,
    copy_values,
    fixed_softmax_tile,
    halves,
    load_kept,
    load_key_scale,
    masked_softmax_tile,
    next_place,
    outgrown,
    promote,
    record_amax,
    seen_tile,
    silence_hidden,
    silence_together,
    softmax_tile,
    store_kept,
    sum_in_lanes,
    value_operand,
    with_kept,
)
from .mask_tiles import band_tiles
from .tiles import MAX_PIECES


_thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in Triton 3.7
_STATS = gl.constexpr(STAT_FIELDS)
_STAT_Q_AMAX = gl.constexpr(STAT_Q_AMAX)
_COUNTS = gl.constexpr(COUNT_FIELDS)
_TRIED = gl.constexpr(COUNT_TRIED)
_REDONE = gl.constexpr(COUNT_REDONE)
_P_EXPONENT = gl.constexpr(recipe.P_EXPONENT)
_P_EXPONENT_LIMIT = gl.constexpr(recipe.P_EXPONENT_LIMIT)
_LAGGED_EXPONENT = gl.constexpr(recipe.LAGGED_EXPONENT)
# as integers of the same bits, which positive numbers are ordered by
_SMALLEST_P = gl.constexpr(bits_of(2.0**recipe.LAGGED_LOWEST))
_LARGEST_P = gl.constexpr(bits_of(2.0**recipe.LAGGED_HIGHEST))
_INFINITY = gl.constexpr(bits_of(float("inf")))
_RELAXED = gl.constexpr("relaxed")  # as primitives.RELAXED
_PIECES_EXPONENT = gl.constexpr(MAX_PIECES.bit_length() - 1)  # 2 to this many numbers
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_AMAX_FLOOR = gl.constexpr(1e-30)
_ROUND_MAGIC = gl.constexpr(12582912.0)  # as primitives.round_to_int8
_ROUND_MAGIC_BITS = gl.constexpr(0x4B400000)
# keys whose 8-bit products are summed in the tensor cores: with 1024, long sums of equal values came out too short
_PROMOTED_KEYS = gl.constexpr(512)
# registers of a thread: what the producer does not need, the two or three warpgroups have
_REGISTERS_OF_TWO = gl.constexpr(240)
_REGISTERS_OF_THREE = gl.constexpr(160)
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _key_step(
    i, at, sums, walked, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr,
    LAYOUTS: gl.constexpr, PV_DTYPE: gl.constexpr, MASKED: gl.constexpr, PROMOTES: gl.constexpr,
):  # fmt: skip
    """Scores of the i-th key tile, under its softmax P·V of the one before.

    at: the tile before and this tile (where a mask is read), their place in the ring and its phase; what is there has
    been waited for. Also the tile's scale, where it is read as soon as it is there.
    sums: acc, P of the tile before, reference, running sum by lanes, bits of the largest P by lanes (lagged
    reference), and with 8-bit P the reference that the sums in `kept` are on the terms of.
    walked: what all steps of a warpgroup share, see `_consume`.
    PROMOTES: whether acc is added to the sums in `kept` and starts anew.
    """
    WIDTH: gl.constexpr = KIND[1]
    BLOCK_N: gl.constexpr = KIND[2]
    NUM_BUFFERS: gl.constexpr = KIND[3]
    SCALE_PER_KEY: gl.constexpr = FORMAT[0]
    FP8: gl.constexpr = FORMAT[1] == "fp8_e4m3"
    LAGGED: gl.constexpr = FORMAT[2] == "lagged"
    SCORES: gl.constexpr = LAYOUTS[0]
    OUT: gl.constexpr = LAYOUTS[1]
    READ_AHEAD: gl.constexpr = MASKING[0] == "none" and not FP8 and not SCALE_PER_KEY
    q_codes, zero, row_scale, score_rows, ring, seen, silenced, k_scales, kept = walked
    before, tile, slot, phase, tile_scale = at
    acc, p, reference, running_sum, top, kept_reference = sums
    k_smem, v_smem, scale_smem, filled, freed = ring
    if MASKED:  # a list is read one tile ahead
        after = seen_tile(gl.minimum(i + 1, seen[6] - 1), seen, MASKING)
    if READ_AHEAD:
        key_scale = tile_scale
    elif FP8 and MASKING[0] == "none" and not SCALE_PER_KEY:
        # the ring has it too; from memory, beside the products, it is faster by 1.5 %
        key_scale = gl.load(k_scales + seen_tile(i, seen, MASKING))
    elif not SCALE_PER_KEY:
        key_scale = load_key_scale(scale_smem.index(slot), SCALE_PER_KEY, SCORES)
    scores = warpgroup_mma(q_codes, k_smem.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    v_tile = value_operand(v_smem.index(slot), WIDTH, BLOCK_N, FORMAT[1])
    if MASKED and MASKING[0] == "keys" and not FP8:
        turn = i - gl.maximum(seen[5], 1)
        silence_together(v_tile, seen[0], before * BLOCK_N, silenced, turn, BLOCK_N, WIDTH, GROUP_INDEX)
    p_operand = as_operand(p, PV_DTYPE, LAYOUTS[2], BLOCK_N)
    acc = warpgroup_mma(p_operand, v_tile, acc, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    if SCALE_PER_KEY:
        key_scale = load_key_scale(scale_smem.index(slot), SCALE_PER_KEY, SCORES)
    if MASKED:
        p, reference, running_sum, top, rescale = masked_softmax_tile(
            scores, row_scale, key_scale, score_rows, tile * BLOCK_N, seen, reference, running_sum, top,
            SCORES, BLOCK_N, MASKING, FORMAT, LAGGED,
        )  # fmt: skip
    elif FORMAT[2] == "running":
        p, reference, running_sum, rescale = softmax_tile(
            scores, row_scale, key_scale, reference, running_sum, BLOCK_N, FORMAT
        )  # fmt: skip
    else:
        p, running_sum, top = fixed_softmax_tile(
            scores, row_scale, key_scale, reference, running_sum, top, BLOCK_N, FORMAT
        )  # fmt: skip
    if PROMOTES:  # half of the sums under the wait for P·V: the scores' registers are free by now
        kept_half = load_kept(kept[0], WIDTH, OUT)
    # waiting here for the next tiles ends a basic block: without it ptxas sinks the exponentials below the wait
    # for P·V
    next_slot, next_phase = next_place(slot, phase, NUM_BUFFERS)
    mbarrier.wait(filled.index(next_slot), next_phase)
    if READ_AHEAD:  # under the wait for P·V
        tile_scale = load_key_scale(scale_smem.index(next_slot), SCALE_PER_KEY, SCORES)
    if FP8:  # an 8-bit operand can't be waited for
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
    else:
        acc, p_operand, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p_operand, p))
    mbarrier.arrive(freed.index(slot), count=1)
    if FORMAT[2] == "running" or (MASKED and not LAGGED):
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    if PROMOTES:
        promote(acc, kept, kept_half, kept_reference, reference, WIDTH, OUT, FORMAT[2])
        acc = gl.zeros_like(acc)
        kept_reference = reference
    if MASKED:
        before = tile
        tile = after
    at = (before, tile, next_slot, next_phase, tile_scale)
    return at, (acc, p, reference, running_sum, top, kept_reference)


@gluon.jit
def _walk(
    first, end, at, sums, walked, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, MASKING: gl.constexpr,
    FORMAT: gl.constexpr, LAYOUTS: gl.constexpr, PV_DTYPE: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """`_key_step` of the tiles from the first-th to before the end-th.

    With 8-bit P the last of _PROMOTED_KEYS keys promotes, in code of its own: a branch in the loop cost more than what
    it did.
    """
    if FORMAT[1] == "fp8_e4m3":
        STEPS: gl.constexpr = _PROMOTED_KEYS // KIND[2]
        for start in range(first, end, STEPS):
            last = gl.minimum(start + STEPS, end) - 1
            for i in range(start, last):
                at, sums = _key_step(
                    i, at, sums, walked, GROUP_INDEX, KIND, MASKING, FORMAT, LAYOUTS, PV_DTYPE, MASKED, PROMOTES=False
                )
            at, sums = _key_step(
                last, at, sums, walked, GROUP_INDEX, KIND, MASKING, FORMAT, LAYOUTS, PV_DTYPE, MASKED, PROMOTES=True
            )
    else:
        for i in range(first, end):
            at, sums = _key_step(
                i, at, sums, walked, GROUP_INDEX, KIND, MASKING, FORMAT, LAYOUTS, PV_DTYPE, MASKED, PROMOTES=False
            )
    return at, sums


@gluon.jit
def _redo(
    keys, values, key_scales, q_codes, zero, row_scale, k_scales, k_tile, v_tile, scale_tile, landed, k_row, v_head,
    b, h_kv, score_rows, seen,
    WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr, LAYOUTS: gl.constexpr,
    PV_DTYPE: gl.constexpr,
):  # fmt: skip
    """All key tiles of one warpgroup with a running max, one after the other: it copies them itself."""
    SCORES: gl.constexpr = LAYOUTS[0]
    OUT: gl.constexpr = LAYOUTS[1]
    reference = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    running_sum = sum_in_lanes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), BLOCK_N)
    acc = gl.zeros((ROWS, WIDTH), gl.float32, OUT)
    v_rows = value_operand(v_tile, WIDTH, BLOCK_N, FORMAT[1])
    for i in range(seen[6]):
        tile = seen_tile(i, seen, MASKING)
        # the copy engine may overwrite what this warpgroup has read and zeroed
        fence_async_shared()
        _thread_barrier()
        copy_keys(
            keys, key_scales, k_row, tile, landed, k_tile, scale_tile, values.block_type.nbytes, BLOCK_N, FORMAT[0]
        )
        copy_values(values, v_head, b, h_kv, tile, seen[10], landed, v_tile, WIDTH, BLOCK_N, FORMAT[1])
        mbarrier.wait(landed, i & 1)
        scores = warpgroup_mma(q_codes, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        if FORMAT[0]:
            key_scale = load_key_scale(scale_tile, FORMAT[0], SCORES)
        else:
            key_scale = gl.load(k_scales + tile)
        p, reference, running_sum, _, rescale = masked_softmax_tile(
            scores, row_scale, key_scale, score_rows, tile * BLOCK_N, seen, reference, running_sum, running_sum,
            SCORES, BLOCK_N, MASKING, FORMAT, False,
        )  # fmt: skip
        if MASKING[0] == "keys" and FORMAT[1] != "fp8_e4m3":
            silence_hidden(v_rows, seen[0], tile * BLOCK_N, 0, BLOCK_N, WIDTH)
            _thread_barrier()
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
        p_operand = as_operand(p, PV_DTYPE, LAYOUTS[2], BLOCK_N)
        if FORMAT[1] == "fp8_e4m3":  # each tile a sum of its own: this is not the fast path
            product = warpgroup_mma(p_operand, v_rows, gl.zeros_like(acc), use_acc=False, is_async=True)
            acc += warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        else:
            acc = warpgroup_mma(p_operand, v_rows, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    return acc, reference, gl.convert_layout(gl.sum(running_sum, 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def _with_other_pieces(
    sums, split, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, FORMAT: gl.constexpr, LAYOUTS: gl.constexpr
):  # fmt: skip
    """Leave one warpgroup's sums over its piece of the keys in memory. Whoever comes last adds all pieces up.

    In their order, its own from memory too: the same bits, whoever that is. Nobody waits, so it does not matter which
    programs run at the same time.

    sums: acc, reference, running sum, bits of the largest P. Returns: these, and whether this is the last piece.
    """
    WIDTH: gl.constexpr = KIND[1]
    GROUPS: gl.constexpr = KIND[6]
    OUT: gl.constexpr = LAYOUTS[1]
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUTS[0])
    acc, reference, running_sum, largest_p = sums
    partials_ptr, arrived_ptr, slot, piece, pieces = split
    rows = gl.arange(0, ROWS, ROW)
    acc_rows = gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    # of a piece and warpgroup: acc, then three numbers a row
    SIZE: gl.constexpr = ROWS * (WIDTH + 3)
    of_rows = partials_ptr + (slot * GROUPS + GROUP_INDEX) * SIZE + rows
    of_acc = partials_ptr + (slot * GROUPS + GROUP_INDEX) * SIZE + 3 * ROWS
    of_acc += acc_rows[:, None] * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))[None, :]
    gl.store(of_rows, reference)
    gl.store(of_rows + ROWS, running_sum)
    gl.store(of_rows + 2 * ROWS, largest_p.to(gl.float32, bitcast=True))
    gl.store(of_acc, acc)
    _thread_barrier()  # all of it is stored before anyone is told
    arrived = gl.atomic_add(arrived_ptr + (slot // pieces) * GROUPS + GROUP_INDEX, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == pieces - 1
    if is_last:
        of_rows -= piece * GROUPS * SIZE
        of_acc -= piece * GROUPS * SIZE
        reference = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        for i in range(pieces):
            reference = gl.maximum(reference, gl.load(of_rows + i * (GROUPS * SIZE), cache_modifier=".cg"))
        finite = gl.where(reference == float("-inf"), 0.0, reference)
        if FORMAT[1] != "fp8_e4m3":  # room for sums of as many numbers that just fit
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
    return (acc, reference, running_sum, largest_p), is_last


@gluon.jit
def _finish(
    given, known, sums, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr,
    LAYOUTS: gl.constexpr, PV_DTYPE: gl.constexpr,
):  # fmt: skip
    """What one warpgroup does with its sums over all keys: see whether they are good, else do them again; the output.

    known: what it knows of its rows.
    """
    HEAD_DIM: gl.constexpr = KIND[0]
    WIDTH: gl.constexpr = KIND[1]
    BLOCK_N: gl.constexpr = KIND[2]
    SCALING: gl.constexpr = KIND[4]
    RETURN_LSE: gl.constexpr = KIND[5]
    FP8: gl.constexpr = FORMAT[1] == "fp8_e4m3"
    LAGGED: gl.constexpr = FORMAT[2] == "lagged"
    OUT: gl.constexpr = LAYOUTS[1]
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    q_ptr, keys, values, key_scales, out_ptr, lse_ptr, center_ptr, q_amax_ptr, v_scale_ptr = given[:9]
    stats_ptr, row_ptr, counts_ptr, row_max_ptr, q_weight_ptr, state_width = given[9]
    q_smem, row_smem, silenced, finished, landed = given[11]
    k_smem, v_smem, scale_smem, filled, freed = given[12]
    seen = given[13]
    seq_q, heads, group, b, h, first_row, k_row, first, full, visited, tries = given[14]
    q_codes, zero, row_scale, shift, score_rows, row_max, kv_head_of_batch = known
    acc, reference, running_sum, largest_p = sums
    h_kv = h // group
    k_scales = key_scales
    if not FORMAT[0]:
        k_scales += kv_head_of_batch * seen[2]

    top = reference
    if FORMAT[2] != "running":
        if LAGGED:
            # exact: P of the largest score against the range of e4m3. A row that saw nothing, or a NaN, needs no other
            saw = ((largest_p != 0) | (full > 0) & (tries != 0)) & (largest_p <= _INFINITY)
            fits = (largest_p <= _LARGEST_P) & (largest_p >= _SMALLEST_P) | (saw == 0) | (score_rows >= seq_q)
            top = gl.where(saw, reference + gl.log2(largest_p.to(gl.float32, bitcast=True)), float("-inf"))
            again = (gl.min(fits.to(gl.int32), 0) == 0) | (tries == 0)
        else:
            again = outgrown(acc, running_sum, OUT)
        if SCALING == "planned":
            lanes = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
            count = counts_ptr + (gl.load(row_ptr) + h_kv) * _COUNTS + lanes * 0
            # a warpgroup without rows did nothing
            one = gl.full_like(lanes, 1) * (first_row + GROUP_INDEX * ROWS < seq_q).to(gl.int32)
            gl.atomic_add(count + _TRIED, one, mask=lanes == 0, sem=_RELAXED)
            gl.atomic_add(count + _REDONE, one * again.to(gl.int32), mask=lanes == 0, sem=_RELAXED)
        if again:
            mbarrier.wait(finished, 0)
            reach, tiles_ptr, n_tiles, _, first_full, _, _, left, right, offset, seq_kv = seen
            everything = (reach, tiles_ptr, n_tiles, first, first_full, full, visited, left, right, offset, seq_kv)
            acc, reference, running_sum = _redo(
                keys, values, key_scales, q_codes, zero, row_scale, k_scales, k_smem.index(GROUP_INDEX),
                v_smem.index(GROUP_INDEX), scale_smem.index(GROUP_INDEX), landed.index(GROUP_INDEX), k_row,
                kv_head_of_batch, b, h_kv, score_rows, everything,
                WIDTH, BLOCK_N, MASKING, FORMAT, LAYOUTS, PV_DTYPE,
            )  # fmt: skip
            top = gl.where(gl.abs(reference) < _P_EXPONENT_LIMIT, reference + _P_EXPONENT, reference)
    if LAGGED:
        # any number does for a row that saw nothing; -inf would have it done again for ever
        gl.store(row_max, gl.where(top == float("-inf"), 0.0, top), mask=score_rows < seq_q)
        reference = gl.where(top == float("-inf"), top, reference)  # as a running max has it: nothing was seen

    # one division a row: that of a tensor takes several instructions for each of 64 numbers
    acc = acc * gl.convert_layout(1.0 / running_sum, gl.SliceLayout(1, OUT))[:, None]
    sees_nothing = gl.convert_layout((running_sum == 0.0) & (reference == float("-inf")), gl.SliceLayout(1, OUT))
    acc = gl.where(sees_nothing[:, None], gl.zeros_like(acc), acc)
    if FP8:
        v_scale = v_scale_ptr + kv_head_of_batch * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
        acc = acc * gl.load(v_scale)[None, :]
        # a mean of finite values is finite, but the rounding of its weights may push it beyond the largest number
        LARGEST: gl.constexpr = 65504.0 if out_ptr.dtype.element_ty == gl.float16 else 3.38e38
        acc = gl.where(acc > LARGEST, LARGEST, gl.where(acc < -LARGEST, -LARGEST, acc))
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), IO)
    rows = first_row + GROUP_INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, IO))
    inside = (rows < seq_q)[:, None] & (channels < HEAD_DIM)[None, :]
    out_rows = (b.to(gl.int64) * seq_q + rows) * heads + h  # contiguous [B, S_q, H, D]
    gl.store(out_ptr + out_rows[:, None] * HEAD_DIM + channels[None, :], out, mask=inside)
    if RETURN_LSE:
        lse = (reference + gl.log2(running_sum)) * _LN_2 + shift
        lse_at = lse_ptr + (b.to(gl.int64) * seq_q + score_rows) * heads + h
        gl.store(lse_at, lse, mask=score_rows < seq_q)


@gluon.jit
def _load_queries(q_base, stride_qs, first, seq_q, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, SLICE: gl.constexpr,
                  LAYOUT: gl.constexpr):  # fmt: skip
    """SLICE query rows from `first` on in fp32, zero beyond the sequence and the head."""
    rows = first + gl.arange(0, SLICE, gl.SliceLayout(1, LAYOUT))
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (rows < seq_q)[:, None] & (channels < HEAD_DIM)[None, :]
    q = gl.load(q_base + rows.to(gl.int64)[:, None] * stride_qs + channels[None, :], mask=inside, other=0.0)
    return q.to(gl.float32)


@gluon.jit
def _quantize_queries(given, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, ROW: gl.constexpr):
    """Codes of one warpgroup's 64 query rows to shared memory; the rows' scales, and what smoothing took from their
    scores (LSE).

    Slice by slice (SLICE rows): this code runs once, so its time is that of fetching it.
    """
    HEAD_DIM: gl.constexpr = KIND[0]
    WIDTH: gl.constexpr = KIND[1]
    SCALING: gl.constexpr = KIND[4]
    RETURN_LSE: gl.constexpr = KIND[5]
    GROUPS: gl.constexpr = KIND[6]
    SLICE: gl.constexpr = KIND[8]
    SLICES: gl.constexpr = ROWS // SLICE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    CODES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SLICE, WIDTH], gl.int8)
    q_ptr, keys, values, key_scales, out_ptr, lse_ptr, center_ptr, q_amax_ptr, v_scale_ptr = given[:9]
    stats_ptr, row_ptr, counts_ptr, row_max_ptr, q_weight_ptr, state_width = given[9]
    stride_qb, stride_qs, stride_qh = given[10]
    q_smem, row_smem, silenced, finished, landed = given[11]
    seq_q, heads, group, b, h, first_row = given[14][:6]
    softmax_scale = given[15]
    h_kv = h // group
    kv_head_of_batch = b * (heads // group) + h_kv
    q_base = q_ptr + b.to(gl.int64) * stride_qb + h.to(gl.int64) * stride_qh
    first = first_row + GROUP_INDEX * ROWS
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if SLICES == 1:
        slices = 1
    else:  # SLICES, which the compiler does not know: no unrolling
        slices = gl.minimum(seq_q + SLICES, SLICES)
    q_slices = q_smem._reinterpret(gl.int8, [GROUPS * SLICES, SLICE, WIDTH], CODES)
    of_slices = row_smem._reinterpret(gl.float32, [GROUPS * 2 * SLICES, SLICE], row_smem.layout)
    if SCALING == "planned":
        row = gl.load(row_ptr) + h_kv
        weight = gl.load(q_weight_ptr + kv_head_of_batch * WIDTH + channels)[None, :]
        q_amax = gl.zeros((SLICE, WIDTH), gl.float32, LAYOUT)
    if SCALING == "per_head":
        amax_of_all = gl.load(q_amax_ptr + b * heads + h)
    if SCALING == "per_block":
        top = gl.zeros((SLICE, WIDTH), gl.float32, LAYOUT)
        for i in range(slices):
            top = gl.maximum(
                top, gl.abs(_load_queries(q_base, stride_qs, first + i * SLICE, seq_q, HEAD_DIM, WIDTH, SLICE, LAYOUT))
            )
        amax_of_all = gl.max(gl.max(top, 1), 0)
    if RETURN_LSE:
        center = gl.load(center_ptr + kv_head_of_batch * WIDTH + channels)[None, :]
    row_scale = gl.full([ROWS], 0.0, gl.float32, ROW)
    shift = row_scale
    for i in range(slices):
        q = _load_queries(q_base, stride_qs, first + i * SLICE, seq_q, HEAD_DIM, WIDTH, SLICE, LAYOUT)
        x = q
        if SCALING == "planned":
            x = q * weight
        if SCALING == "planned" or SCALING == "per_token":
            amax = gl.max(gl.abs(x), 1)
        else:
            amax = gl.full([SLICE], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT)) + amax_of_all
        amax = gl.maximum(amax, _AMAX_FLOOR)
        inverse = gl.div_rn(gl.full_like(amax, 127.0), amax)
        codes = (x * inverse[:, None] + _ROUND_MAGIC).to(gl.int32, bitcast=True) - _ROUND_MAGIC_BITS
        q_slices.index(GROUP_INDEX * SLICES + i).store(codes.to(gl.int8))
        # a NaN in a row must not be laundered into a code: max() dropped it
        scale = (amax * (1.0 / 127.0) + gl.sum(q * 0.0, 1)) * (softmax_scale * _LOG2_E)
        if (
            SLICES == 1
        ):  # through shared memory, the plain loop beside a mask of keys spilled 20 registers (Triton 3.7.1)
            row_scale = gl.convert_layout(scale, ROW)
        else:
            of_slices.index(GROUP_INDEX * 2 * SLICES + i).store(scale)
        if SCALING == "planned":
            q_amax = gl.maximum(q_amax, gl.abs(q))
        if RETURN_LSE:  # smoothing lowered every score of a row by q·c: put it back
            lowered = gl.sum(q * center, 1) * softmax_scale
            if SLICES == 1:
                shift = gl.convert_layout(lowered, ROW)
            else:
                of_slices.index((GROUP_INDEX * 2 + 1) * SLICES + i).store(lowered)
    fence_async_shared()
    if SCALING == "planned":  # not before the fence, which waits for what is under way
        stat = stats_ptr + row * (_STATS * state_width) + _STAT_Q_AMAX * state_width
        record_amax(stat, gl.max(q_amax, 0), HEAD_DIM, WIDTH)
    if SLICES > 1:
        row_scale = row_smem.index(GROUP_INDEX * 2).load(ROW)
        if RETURN_LSE:
            shift = row_smem.index(GROUP_INDEX * 2 + 1).load(ROW)
    return row_scale, shift


@gluon.jit
def _consume(
    given, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr,
    PV_DTYPE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: quantise 64 query rows, walk the key tiles, write the output.

    given: see the kernel. In `sizes`, first, full and visited are of all tiles, which are done again where the ring's
    (those of `seen`) were in vain.
    """
    WIDTH: gl.constexpr = KIND[1]
    BLOCK_N: gl.constexpr = KIND[2]
    NUM_BUFFERS: gl.constexpr = KIND[3]
    row_max_ptr = given[9][3]
    q_smem, _, silenced, finished, _ = given[11]
    ring = given[12]
    seen = given[13]
    seq_q, heads, group, b, h, first_row = given[14][:6]
    SPLIT: gl.constexpr = KIND[7]
    SCALE_PER_KEY: gl.constexpr = FORMAT[0]
    FP8: gl.constexpr = FORMAT[1] == "fp8_e4m3"
    LAGGED: gl.constexpr = FORMAT[2] == "lagged"
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    BITS: gl.constexpr = PV_DTYPE.primitive_bitwidth
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 256 // BITS]
    )
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=32 // BITS)
    LAYOUTS: gl.constexpr = (SCORES, OUT, P_OPERAND)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)

    k_smem, v_smem, scale_smem, filled, freed = ring
    kv_head_of_batch = b * (heads // group) + h // group
    row_scale, shift = _quantize_queries(given, GROUP_INDEX, KIND, ROW)
    k_scales = given[3]
    if not SCALE_PER_KEY:
        k_scales += kv_head_of_batch * seen[2]

    q_codes = q_smem.index(GROUP_INDEX)
    reference = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    kept_reference = reference
    running_sum = sum_in_lanes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), BLOCK_N)
    top = (running_sum * 0.0).to(gl.int32)
    acc = gl.zeros((ROWS, WIDTH), gl.float32, OUT)
    zero = gl.zeros((ROWS, BLOCK_N), gl.int32, SCORES)
    score_rows = first_row + GROUP_INDEX * ROWS + gl.arange(0, ROWS, ROW)
    row_max = row_max_ptr + (b * heads + h).to(gl.int64) * seq_q + score_rows
    if LAGGED:
        earlier = gl.load(row_max, mask=score_rows < seq_q, other=0.0)
        reference = gl.where(gl.abs(earlier) < _P_EXPONENT_LIMIT, earlier - _LAGGED_EXPONENT, 0.0)
    kept = given[17]
    if FP8:
        kept = (kept.index(GROUP_INDEX * 2), kept.index(GROUP_INDEX * 2 + 1))
        nothing, _ = halves(acc, WIDTH)
        store_kept(kept[0], nothing, WIDTH)
        store_kept(kept[1], nothing, WIDTH)

    tile = seen_tile(0, seen, MASKING)
    mbarrier.wait(filled.index(0), 0)
    scores = warpgroup_mma(q_codes, k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    key_scale = load_key_scale(scale_smem.index(0), SCALE_PER_KEY, SCORES)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    mbarrier.arrive(freed.index(0), count=1)
    p, reference, running_sum, top, rescale = masked_softmax_tile(
        scores, row_scale, key_scale, score_rows, tile * BLOCK_N, seen, reference, running_sum, top,
        SCORES, BLOCK_N, MASKING, FORMAT, LAGGED,
    )  # fmt: skip
    slot, phase = next_place(0, 0, NUM_BUFFERS)
    mbarrier.wait(filled.index(slot), phase)
    tile_scale = row_scale  # where it is not used
    if MASKING[0] == "none" and not FP8 and not SCALE_PER_KEY:
        tile_scale = load_key_scale(scale_smem.index(slot), SCALE_PER_KEY, SCORES)
    at = (tile, tile, slot, phase, tile_scale)
    sums = (acc, p, reference, running_sum, top, kept_reference)
    walked = (q_codes, zero, row_scale, score_rows, ring, seen, silenced, k_scales, kept)
    at, sums = _walk(1, seen[5], at, sums, walked, GROUP_INDEX, KIND, MASKING, FORMAT, LAYOUTS, PV_DTYPE, MASKED=False)
    partial = gl.maximum(seen[5], 1)
    tile = seen_tile(gl.minimum(partial, seen[6] - 1), seen, MASKING)
    at = (seen_tile(partial - 1, seen, MASKING), tile, at[2], at[3], at[4])
    at, sums = _walk(
        partial, seen[6], at, sums, walked, GROUP_INDEX, KIND, MASKING, FORMAT, LAYOUTS, PV_DTYPE, MASKED=True
    )
    acc, p, reference, running_sum, top, kept_reference = sums
    v_tile = value_operand(v_smem.index(at[2]), WIDTH, BLOCK_N, FORMAT[1])
    if MASKING[0] == "keys" and not FP8:
        if seen[6] > seen[5]:
            turn = seen[6] - partial
            silence_together(v_tile, seen[0], at[0] * BLOCK_N, silenced, turn, BLOCK_N, WIDTH, GROUP_INDEX)
    p_operand = as_operand(p, PV_DTYPE, P_OPERAND, BLOCK_N)
    acc = warpgroup_mma(p_operand, v_tile, acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if FP8:
        acc = with_kept(acc, kept, kept_reference, reference, WIDTH, OUT, FORMAT[2])
    running_sum = gl.convert_layout(gl.sum(running_sum, 1), ROW)
    largest_p = gl.convert_layout(gl.max(top, 1), ROW)
    if FORMAT[2] != "running":
        # the ring is free for other use once all warpgroups are through
        mbarrier.arrive(finished, count=1)
    sums = (acc, reference, running_sum, largest_p)
    known = (q_codes, zero, row_scale, shift, score_rows, row_max, kv_head_of_batch)
    if SPLIT:
        is_last = gl.to_tensor(True)
        if given[16][4] > 1:
            sums, is_last = _with_other_pieces(sums, given[16], GROUP_INDEX, KIND, FORMAT, LAYOUTS)
        if is_last:
            _finish(given, known, sums, GROUP_INDEX, KIND, MASKING, FORMAT, LAYOUTS, PV_DTYPE)
    else:
        _finish(given, known, sums, GROUP_INDEX, KIND, MASKING, FORMAT, LAYOUTS, PV_DTYPE)


@gluon.jit(do_not_specialize=[
    "seq_q", "seq_kv", "heads", "group", "state_width", "left", "right", "offset", "reach_step_b", "list_step_b",
    "whole", "pieces",
])  # fmt: skip
def attention_fwd_hopper_kernel(
    q_ptr, keys, key_scales, values, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr,
    stats_ptr, row_ptr, counts_ptr, row_max_ptr, v_scale_ptr, state_width,
    stride_qb, stride_qs, stride_qh, reach_ptr, tiles_ptr, numbers_ptr, reach_step_b, list_step_b,
    left, right, offset, partials_ptr, arrived_ptr, whole, pieces, seq_q, seq_kv, heads, group, softmax_scale,
    HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, NUM_BUFFERS: gl.constexpr,
    SCALING: gl.constexpr, RETURN_LSE: gl.constexpr, MASK: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, REFERENCE: gl.constexpr, PV: gl.constexpr, GROUPS: gl.constexpr,
    SLICE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    m_tiles = (seq_q + GROUPS * ROWS - 1) // (GROUPS * ROWS)
    n_tiles = (seq_kv + BLOCK_N - 1) // BLOCK_N
    program = gl.program_id(0)
    slot = 0
    piece = 0
    if SPLIT:  # from program `whole` on, `pieces` programs share a tile of query rows
        slot = gl.maximum(program - whole, 0)
        pieces = gl.where(program < whole, 1, pieces)
        piece = slot % pieces
        program = gl.minimum(program, whole + slot // pieces)
    m_tile = program % m_tiles
    if HAS_RIGHT:
        m_tile = m_tiles - 1 - m_tile  # the long ones of a head first: the last to run are then short
    first_row = m_tile * (GROUPS * ROWS)
    head_of_batch = program // m_tiles
    b = head_of_batch // heads
    h = head_of_batch % heads
    h_kv = h // group
    kv_head_of_batch = b * (heads // group) + h_kv
    k_row = kv_head_of_batch * n_tiles * BLOCK_N
    PV_DTYPE: gl.constexpr = values.dtype
    MASKING: gl.constexpr = (MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT)
    FORMAT: gl.constexpr = (SCALING == "per_token", PV, REFERENCE)
    reach = reach_ptr
    first = 0
    first_full = 0
    if MASK == "none":
        first, first_full, full, visited = band_tiles(
            first_row, seq_q, seq_kv, left, right, offset,
            BLOCK_M=GROUPS * ROWS, BLOCK_N=BLOCK_N, HAS_LEFT=HAS_LEFT, HAS_RIGHT=HAS_RIGHT,
        )  # fmt: skip
    else:
        tiles_ptr += (b * list_step_b).to(gl.int64) * n_tiles
        full = gl.load(numbers_ptr + b * list_step_b * 2)
        visited = gl.load(numbers_ptr + b * list_step_b * 2 + 1)
        reach += b.to(gl.int64) * reach_step_b
    visited = gl.maximum(visited, 1)  # a program that sees nothing walks one tile, all of it masked
    tries = 1
    ring_first = first
    ring_full = full
    ring_visited = visited
    if SPLIT:
        ring_first = first + visited * piece // pieces
        ring_visited = first + visited * (piece + 1) // pieces - ring_first
        ring_full = gl.minimum(gl.maximum(first + full - ring_first, 0), ring_visited)
    if REFERENCE == "lagged":
        # a row that was never seen has no reference: one tile through the ring, then all with a running max
        rows = first_row + gl.arange(0, 4 * ROWS, gl.BlockedLayout([1], [32], [4], [0]))
        is_row = rows < gl.minimum(first_row + GROUPS * ROWS, seq_q)
        earlier = gl.load(row_max_ptr + head_of_batch.to(gl.int64) * seq_q + rows, mask=is_row, other=0.0)
        tries = gl.min((gl.abs(earlier) < _P_EXPONENT_LIMIT).to(gl.int32), 0)
        ring_full = gl.where(tries != 0, ring_full, 0)
        ring_visited = gl.where(tries != 0, ring_visited, 1)

    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.int8)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(gl.int8, [GROUPS, ROWS, WIDTH], Q_LAYOUT)
    row_smem = gl.allocate_shared_memory(gl.float32, [GROUPS * 2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_smem = gl.allocate_shared_memory(gl.int8, [NUM_BUFFERS, BLOCK_N, WIDTH], keys.layout)
    v_smem = gl.allocate_shared_memory(PV_DTYPE, [NUM_BUFFERS] + values.block_type.shape, values.layout)
    if SCALING == "per_token":
        scale_smem = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, 1, BLOCK_N], key_scales.layout)
    else:
        scale_smem = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    freed = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    silenced = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER).index(0)
    mbarrier.init(silenced, count=GROUPS)
    finished = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER).index(0)
    mbarrier.init(finished, count=GROUPS)
    landed = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    for i in gl.static_range(GROUPS):
        mbarrier.init(landed.index(i), count=1)
    for i in gl.static_range(NUM_BUFFERS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=GROUPS)
    fence_async_shared()
    ring = (k_smem, v_smem, scale_smem, filled, freed)
    seen = (reach, tiles_ptr, n_tiles, ring_first, first_full, ring_full, ring_visited, left, right, offset, seq_kv)
    state = (stats_ptr, row_ptr, counts_ptr, row_max_ptr, q_weight_ptr, state_width)
    strides = (stride_qb, stride_qs, stride_qh)
    smem = (q_smem, row_smem, silenced, finished, landed)
    sizes = (seq_q, heads, group, b, h, first_row, k_row, first, full, visited, tries)
    split = (partials_ptr, arrived_ptr, slot, piece, pieces)
    kept = landed
    if PV == "fp8_e4m3":
        kept = allocate_kept(GROUPS, WIDTH)
    given = (
        q_ptr, keys, values, key_scales, out_ptr, lse_ptr, center_ptr, q_amax_ptr, v_scale_ptr, state, strides, smem,
        ring, seen, sizes, softmax_scale, split, kept,
    )  # fmt: skip
    KIND: gl.constexpr = (HEAD_DIM, WIDTH, BLOCK_N, NUM_BUFFERS, SCALING, RETURN_LSE, GROUPS, SPLIT, SLICE)
    copied = (keys, values, key_scales, ring, seen, k_row, kv_head_of_batch, b, h_kv)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (given, 0, KIND, MASKING, FORMAT, PV_DTYPE)),
                (_consume, (given, 1, KIND, MASKING, FORMAT, PV_DTYPE)),
                (copy_keys_and_values, (copied, WIDTH, BLOCK_N, NUM_BUFFERS, MASKING, FORMAT)),
            ],
            [4, 1],
            [_REGISTERS_OF_TWO, _PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (given, 0, KIND, MASKING, FORMAT, PV_DTYPE)),
                (_consume, (given, 1, KIND, MASKING, FORMAT, PV_DTYPE)),
                (_consume, (given, 2, KIND, MASKING, FORMAT, PV_DTYPE)),
                (copy_keys_and_values, (copied, WIDTH, BLOCK_N, NUM_BUFFERS, MASKING, FORMAT)),
            ],
            [4, 4, 1],
            [_REGISTERS_OF_THREE, _REGISTERS_OF_THREE, _PRODUCER_REGISTERS],
        )
    # A barrier stays one until then, whatever else its memory is used for; and used for something else it would be,
    # where this variant of the kernel has no use for the barrier. While other processes share the GPU, its state came
    # back into what had been written over it: a NaN in one of ten thousand launches.
    mbarrier.invalidate(silenced)
    mbarrier.invalidate(finished)
    for i in gl.static_range(GROUPS):
        mbarrier.invalidate(landed.index(i))
    for i in gl.static_range(NUM_BUFFERS):
        mbarrier.invalidate(filled.index(i))
        mbarrier.invalidate(freed.index(i))


_GLUON_DTYPES = {
    torch.int8: gl.int8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


@functools.cache
def _layout_of(block: tuple[int, ...], dtype: torch.dtype):
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_DTYPES[dtype])


def describe(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor through which the copy engine reads blocks of x, swizzled as the tensor cores want them."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, _layout_of(tuple(block), x.dtype))
