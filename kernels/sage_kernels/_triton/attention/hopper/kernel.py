"""The attention kernel for Hopper (sm_90) in Gluon: one warp copies, two or three warpgroups compute.

Same mathematics as ../kernel.py, for masks that need not be read beside the loop: bands and masks of keys. What
Triton's own pipeliner can't give: the copy engine runs ahead by NUM_BUFFERS tiles, and P·V of one tile stays in flight
under the softmax of the next. REFERENCE and PV are those of ../kernel.py.
"""

import functools
from typing import NamedTuple

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

from .... import recipe
from ....state import COUNT_FIELDS, COUNT_REDONE, COUNT_TRIED, STAT_FIELDS, STAT_K_MAX, STAT_K_MIN, STAT_Q_AMAX
from ..key_tiles import band_tiles
from ..tiles import MAX_PIECES
from .parts import (
    ROWS,
    Copied,
    Format,
    MaskKind,
    Ring,
    Seen,
    allocate_kept,
    as_operand,
    bits_of,
    copy_keys,
    copy_keys_and_values,
    copy_values,
    fixed_softmax_tile,
    halves,
    load_key_scale,
    masked_softmax_tile,
    next_place,
    outgrown,
    packed,
    place_before,
    promote,
    record_amax,
    seen_tile,
    silence_hidden,
    silence_together,
    softmax_tile,
    store_kept,
    sum_in_lanes,
    value_operand,
    wait_for_prologue,
    with_kept,
)


_thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed in Triton 3.7
_STATS = gl.constexpr(STAT_FIELDS)
_STAT_Q_AMAX = gl.constexpr(STAT_Q_AMAX)
_STAT_K_MAX = gl.constexpr(STAT_K_MAX)
_STAT_K_MIN = gl.constexpr(STAT_K_MIN)
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
# what there is in shared memory of each query row of a warpgroup: scale, what smoothing took from its scores (LSE),
# and what takes a score to the terms of the kept ones
_SCALE = gl.constexpr(0)
_LOWERED = gl.constexpr(1)
_TO_KEPT = gl.constexpr(2)
_ROW_FIELDS = gl.constexpr(3)
_PIECES_EXPONENT = gl.constexpr(MAX_PIECES.bit_length() - 1)  # 2 to this many numbers
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_AMAX_FLOOR = gl.constexpr(1e-30)
_ROUND_MAGIC = gl.constexpr(12582912.0)  # as primitives.round_to_int8
_ROUND_MAGIC_BITS = gl.constexpr(0x4B400000)
# keys whose 8-bit products are summed in the tensor cores, which cut sums off: fewer take time, and with more the
# results come out too short (kernels/README.md, sections 8 and 9)
_PROMOTED_KEYS = gl.constexpr(640)
# registers of a thread: what the producer does not need, the two or three warpgroups have
_REGISTERS_OF_TWO = gl.constexpr(240)
_REGISTERS_OF_THREE = gl.constexpr(160)
_PRODUCER_REGISTERS = gl.constexpr(24)


class Kind(NamedTuple):
    """What the kernel is compiled for.

    keeps_max: the rows' largest scores are kept for a later call; splits: tiles of query rows can be cut along the
    keys; pv_dtype: of P and V as operands.
    """

    head_dim: gl.constexpr
    width: gl.constexpr
    block_n: gl.constexpr
    buffers: gl.constexpr
    scaling: gl.constexpr
    return_lse: gl.constexpr
    keeps_max: gl.constexpr
    groups: gl.constexpr
    splits: gl.constexpr
    slice: gl.constexpr
    masking: gl.constexpr
    format: gl.constexpr
    pv_dtype: gl.constexpr


class Layouts(NamedTuple):
    """Of scores, of P·V, and of P as its operand."""

    scores: gl.constexpr
    out: gl.constexpr
    p_operand: gl.constexpr


class Inputs(NamedTuple):
    """Tensors that all warpgroups read and write. k_codes, v_tiles and, one a key, k_scales are descriptors."""

    q_ptr: gl.tensor
    k_codes: gl.tensor
    v_tiles: gl.tensor
    k_scales: gl.tensor
    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    center_ptr: gl.tensor
    q_amax_ptr: gl.tensor
    v_scale_ptr: gl.tensor
    stride_qb: gl.tensor
    stride_qs: gl.tensor
    stride_qh: gl.tensor
    softmax_scale: gl.tensor


class Recorded(NamedTuple):
    """Of the HeadState; state_width: channels of its vectors."""

    stats_ptr: gl.tensor
    row_ptr: gl.tensor
    counts_ptr: gl.tensor
    row_max_ptr: gl.tensor
    q_weight_ptr: gl.tensor
    state_width: gl.tensor


class Shared(NamedTuple):
    """Shared memory of the warpgroups beside the ring.

    q_codes, of_rows: codes of their query rows, and _ROW_FIELDS numbers of each; kept: sums of earlier tiles (8-bit
    P); silenced, finished, landed: barriers: hidden values are zeroed, nobody needs the ring any more, a warpgroup's
    own keys, or values, are there.
    """

    q_codes: gl.shared_memory_descriptor
    of_rows: gl.shared_memory_descriptor
    kept: gl.shared_memory_descriptor
    silenced: gl.shared_memory_descriptor
    finished: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor


class Tile(NamedTuple):
    """The program's tile of query rows.

    first, full, visited: of all its key tiles, which are done again where the ring's (those of `Seen`) were in vain.
    """

    seq_q: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    b: gl.tensor
    h: gl.tensor
    first_row: gl.tensor
    k_row: gl.tensor
    first: gl.tensor
    full: gl.tensor
    visited: gl.tensor


class Split(NamedTuple):
    """Which piece of a tile that is cut along the keys; see `_with_other_pieces`."""

    partials_ptr: gl.tensor
    arrived_ptr: gl.tensor
    slot: gl.tensor
    piece: gl.tensor
    pieces: gl.tensor


class Given(NamedTuple):
    """All that a warpgroup is started with."""

    inputs: Inputs
    recorded: Recorded
    shared: Shared
    ring: Ring
    seen: Seen
    tile: Tile
    split: Split


class Walked(NamedTuple):
    """What all steps of a warpgroup share. kept: places of the two halves of the sums of earlier tiles."""

    q_codes: gl.shared_memory_descriptor
    zero: gl.tensor
    row_scale: gl.tensor
    score_rows: gl.tensor
    kept: gl.shared_memory_descriptor
    silenced: gl.shared_memory_descriptor
    ring: Ring
    seen: Seen


class Place(NamedTuple):
    """Where a warpgroup is: the tile before and this tile (where a mask is read), their place in the ring, its phase.

    What is there has been waited for. tile_scale: of this tile, where it is read as soon as it is there.
    """

    before: gl.tensor
    tile: gl.tensor
    slot: gl.tensor
    phase: gl.tensor
    tile_scale: gl.tensor


class Sums(NamedTuple):
    """Of one warpgroup, so far.

    acc: P·V; p: P of the tile before; running_sum: of P, by lanes; top: bits of the largest P, by lanes (lagged
    reference); kept_reference: what the sums of earlier tiles are on the terms of (8-bit P).
    """

    acc: gl.tensor
    p: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor
    top: gl.tensor
    kept_reference: gl.tensor


class Total(NamedTuple):
    """Sums over all keys; running_sum and the bits of the largest P by rows."""

    acc: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor
    largest_p: gl.tensor


@gluon.jit
def _next_tile(slot, phase, tile_scale, ring, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Wait for the next tile. Returns its place in the ring, its phase, and its scale where that is read at once."""
    SCALE_PER_KEY: gl.constexpr = KIND.format.scale_per_key
    slot, phase = next_place(slot, phase, KIND.buffers)
    mbarrier.wait(ring.filled.index(slot), phase)
    if KIND.masking.mask == "none" and not SCALE_PER_KEY:
        tile_scale = load_key_scale(ring.k_scales.index(slot), SCALE_PER_KEY, LAYOUTS.scores)
    return slot, phase, tile_scale


@gluon.jit
def _key_step(
    i, adds, at, sums, walked, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, LAYOUTS: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of the i-th key tile, under its softmax P·V of the one before.

    adds: whether P·V is added to acc; where not, acc starts anew.
    """
    WIDTH: gl.constexpr = KIND.width
    BLOCK_N: gl.constexpr = KIND.block_n
    MASKING: gl.constexpr = KIND.masking
    FORMAT: gl.constexpr = KIND.format
    SCALE_PER_KEY: gl.constexpr = FORMAT.scale_per_key
    FP8: gl.constexpr = FORMAT.pv == "fp8_e4m3"
    LAGGED: gl.constexpr = FORMAT.reference == "lagged"
    SCORES: gl.constexpr = LAYOUTS.scores
    OUT: gl.constexpr = LAYOUTS.out
    # for the next tile, before the wait for P·V: faster where a call is long (then Q is not sliced), and beside a mask
    # of keys the loop spills registers; kernels/README.md, section 9
    LONG: gl.constexpr = KIND.slice == ROWS and MASKING.mask == "none"
    WAITS_EARLY: gl.constexpr = not FP8 and (WIDTH == 64 or LONG)
    q_codes, zero, row_scale, score_rows, _, silenced, ring, seen = walked
    before, tile, slot, phase, tile_scale = at
    acc, p, reference, running_sum, top, kept_reference = sums
    if MASKED:  # a list is read one tile ahead
        after = seen_tile(gl.minimum(i + 1, seen.visited - 1), seen, MASKING)
    if MASKING.mask == "none" and not SCALE_PER_KEY:
        key_scale = tile_scale
    elif not SCALE_PER_KEY:
        key_scale = load_key_scale(ring.k_scales.index(slot), SCALE_PER_KEY, SCORES)
    scores = warpgroup_mma(q_codes, ring.k_tiles.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    v_tile = value_operand(ring.v_tiles.index(slot), WIDTH, BLOCK_N, FORMAT.pv)
    if MASKED and MASKING.mask == "keys" and not FP8:
        turn = i - gl.maximum(seen.full, 1)
        silence_together(v_tile, seen.reach, before * BLOCK_N, silenced, turn, BLOCK_N, WIDTH, GROUP_INDEX)
    p_operand = as_operand(p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
    acc = warpgroup_mma(p_operand, v_tile, acc, use_acc=adds, is_async=True)
    # The place before this one, which nothing has read since the last wait for P·V. The warps meet at a barrier on
    # both sides of an arrival: here, where all of them wait for the scores, that is cheap.
    mbarrier.arrive(ring.freed.index(place_before(slot, KIND.buffers)), count=1)
    _thread_barrier()
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    if SCALE_PER_KEY:
        key_scale = load_key_scale(ring.k_scales.index(slot), SCALE_PER_KEY, SCORES)
    if MASKED:
        p, reference, running_sum, top, rescale = masked_softmax_tile(
            scores, row_scale, key_scale, score_rows, tile * BLOCK_N, seen, reference, running_sum, top,
            SCORES, BLOCK_N, MASKING, FORMAT, LAGGED,
        )  # fmt: skip
    elif FORMAT.reference == "running":
        p, reference, running_sum, rescale = softmax_tile(
            scores, row_scale, key_scale, reference, running_sum, BLOCK_N, FORMAT
        )  # fmt: skip
    else:
        p, running_sum, top = fixed_softmax_tile(
            scores, row_scale, key_scale, reference, running_sum, top, BLOCK_N, FORMAT
        )  # fmt: skip
    place = (slot, phase, tile_scale)
    if WAITS_EARLY:  # that ends a basic block: without it ptxas sinks the exponentials below the wait for P·V
        place = _next_tile(slot, phase, tile_scale, ring, KIND, LAYOUTS)
    if FP8:  # an 8-bit operand can't be waited for; p is packed where its exponentials were, see `packed`
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
        p = packed(p, BLOCK_N)
    else:
        acc, p_operand, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p_operand, p))
    if not WAITS_EARLY:
        place = _next_tile(slot, phase, tile_scale, ring, KIND, LAYOUTS)
    if FORMAT.reference == "running" or (MASKED and not LAGGED):
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    if MASKED:
        before = tile
        tile = after
    at = Place(before, tile, place[0], place[1], place[2])
    return at, Sums(acc, p, reference, running_sum, top, kept_reference)


@gluon.jit
def _walk(
    first, end, at, sums, walked, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, LAYOUTS: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """`_key_step` of the tiles from the first-th to before the end-th.

    With 8-bit P, acc is added to the sums in `kept` after _PROMOTED_KEYS keys, and at the end.
    """
    if KIND.format.pv == "fp8_e4m3":
        STEPS: gl.constexpr = _PROMOTED_KEYS // KIND.block_n
        for start in range(first, end, STEPS):
            for i in range(start, gl.minimum(start + STEPS, end)):
                at, sums = _key_step(i, i > start, at, sums, walked, GROUP_INDEX, KIND, LAYOUTS, MASKED)
            acc, p, reference, running_sum, top, kept_reference = sums
            promote(acc, walked.kept, kept_reference, reference, KIND.width, LAYOUTS.out, KIND.format.reference)
            sums = Sums(acc, p, reference, running_sum, top, reference)
    else:
        for i in range(first, end):
            at, sums = _key_step(i, True, at, sums, walked, GROUP_INDEX, KIND, LAYOUTS, MASKED)
    return at, sums


class Places(NamedTuple):
    """Of what one warpgroup copies for itself: a key tile, a value tile, the scales, and their barriers."""

    k_tile: gl.shared_memory_descriptor
    v_tile: gl.shared_memory_descriptor
    scale_tile: gl.shared_memory_descriptor
    keys_landed: gl.shared_memory_descriptor
    values_landed: gl.shared_memory_descriptor


class Redone(NamedTuple):
    """The next tile, and the sums so far."""

    tile: gl.tensor
    acc: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor


@gluon.jit
def _copy_again(tile, places, given, KIND: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr):
    """Start the copy of a tile's keys, of its values, or of both, which keys_landed is of then.

    All that this warpgroup did with what is there must be done.
    """
    inputs = given.inputs
    rows = given.tile
    h_kv = rows.h // rows.group
    v_head = rows.b * (rows.heads // rows.group) + h_kv
    V_BYTES: gl.constexpr = inputs.v_tiles.block_type.nbytes
    values_landed = places.keys_landed if KEYS else places.values_landed
    # the copy engine may overwrite what this warpgroup has read and zeroed
    fence_async_shared()
    _thread_barrier()
    if KEYS:
        copy_keys(
            inputs.k_codes, inputs.k_scales, rows.k_row, tile, places.keys_landed, places.k_tile, places.scale_tile,
            V_BYTES if VALUES else 0, KIND.block_n, KIND.format.scale_per_key,
        )  # fmt: skip
    else:
        mbarrier.expect(values_landed, V_BYTES)
    if VALUES:
        copy_values(
            inputs.v_tiles, v_head, rows.b, h_kv, tile, given.seen.seq_kv, values_landed, places.v_tile, KIND.width,
            KIND.block_n, KIND.format.pv,
        )  # fmt: skip


@gluon.jit
def _redo_tiles(
    first, end, redone, places, given, walked, seen, KIND: gl.constexpr, LAYOUTS: gl.constexpr, MASKED: gl.constexpr
):
    """The tiles from the first-th to before the end-th with a running max.

    With 8-bit P, copies are one tile ahead. With 16-bit P rows are seldom done again, and copies ahead made the loop
    over the ring slower (kernels/README.md, section 9).
    """
    BLOCK_N: gl.constexpr = KIND.block_n
    FORMAT: gl.constexpr = KIND.format
    SCORES: gl.constexpr = LAYOUTS.scores
    FP8: gl.constexpr = FORMAT.pv == "fp8_e4m3"
    rows = given.tile
    kv_head = rows.b * (rows.heads // rows.group) + rows.h // rows.group
    k_tile, v_tile, scale_tile, keys_landed, values_landed = places
    v_rows = value_operand(v_tile, KIND.width, BLOCK_N, FORMAT.pv)
    for i in range(first, end):
        tile, acc, reference, running_sum = redone
        if FP8:
            after = seen_tile(gl.minimum(i + 1, seen.visited - 1), seen, KIND.masking)
        else:
            tile = seen_tile(i, seen, KIND.masking)
            after = tile
            _copy_again(tile, places, given, KIND, KEYS=True, VALUES=True)
        mbarrier.wait(keys_landed, i & 1)
        scores = warpgroup_mma(walked.q_codes, k_tile.permute((1, 0)), walked.zero, use_acc=False, is_async=True)
        if FORMAT.scale_per_key:
            key_scale = load_key_scale(scale_tile, FORMAT.scale_per_key, SCORES)
        else:
            key_scale = gl.load(given.inputs.k_scales + kv_head * seen.n_tiles + tile)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        if FP8:
            if i + 1 < seen.visited:
                _copy_again(after, places, given, KIND, KEYS=True, VALUES=False)
        if MASKED:
            p, reference, running_sum, _, rescale = masked_softmax_tile(
                scores, walked.row_scale, key_scale, walked.score_rows, tile * BLOCK_N, seen, reference, running_sum,
                running_sum, SCORES, BLOCK_N, KIND.masking, FORMAT, False,
            )  # fmt: skip
        else:
            p, reference, running_sum, rescale = softmax_tile(
                scores, walked.row_scale, key_scale, reference, running_sum, BLOCK_N, FORMAT
            )  # fmt: skip
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, LAYOUTS.out))[:, None]
        if FP8:
            p = packed(p, BLOCK_N)
        p_operand = as_operand(p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
        if FP8:
            mbarrier.wait(values_landed, i & 1)
        if MASKED and KIND.masking.mask == "keys" and not FP8:
            silence_hidden(v_rows, seen.reach, tile * BLOCK_N, 0, BLOCK_N, KIND.width)
            _thread_barrier()
        if FP8:  # each tile a sum of its own: this is not the fast path
            product = warpgroup_mma(p_operand, v_rows, gl.zeros_like(acc), use_acc=False, is_async=True)
            acc += warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        else:
            acc = warpgroup_mma(p_operand, v_rows, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if FP8:
            if i + 1 < seen.visited:
                _copy_again(after, places, given, KIND, KEYS=False, VALUES=True)
        redone = Redone(after, acc, reference, running_sum)
    return redone


@gluon.jit
def _redo(given, walked, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """All key tiles of one warpgroup with a running max, one after the other: it copies them itself."""
    BLOCK_N: gl.constexpr = KIND.block_n
    SCORES: gl.constexpr = LAYOUTS.scores
    FP8: gl.constexpr = KIND.format.pv == "fp8_e4m3"
    of_ring = given.seen
    rows = given.tile
    seen = Seen(
        of_ring.reach, of_ring.tiles_ptr, of_ring.n_tiles, rows.first, of_ring.first_full, rows.full, rows.visited,
        of_ring.left, of_ring.right, of_ring.offset, of_ring.seq_kv,
    )  # fmt: skip
    landed = given.shared.landed
    places = Places(
        given.ring.k_tiles.index(GROUP_INDEX),
        given.ring.v_tiles.index(GROUP_INDEX),
        given.ring.k_scales.index(GROUP_INDEX),
        landed.index(GROUP_INDEX * 2),
        landed.index(GROUP_INDEX * 2 + 1),
    )
    redone = Redone(
        seen_tile(0, seen, KIND.masking),
        gl.zeros((ROWS, KIND.width), gl.float32, LAYOUTS.out),
        gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES)),
        sum_in_lanes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), BLOCK_N),
    )
    whole = 0
    if FP8:
        _copy_again(redone.tile, places, given, KIND, KEYS=False, VALUES=True)
        _copy_again(redone.tile, places, given, KIND, KEYS=True, VALUES=False)
        if KIND.masking.mask == "none":  # beside a mask of keys, one more loop made the others spill registers
            whole = seen.full
            redone = _redo_tiles(0, whole, redone, places, given, walked, seen, KIND, LAYOUTS, MASKED=False)
    redone = _redo_tiles(whole, seen.visited, redone, places, given, walked, seen, KIND, LAYOUTS, MASKED=True)
    row_sum = gl.convert_layout(gl.sum(redone.running_sum, 1), gl.SliceLayout(1, SCORES))
    return redone.acc, redone.reference, row_sum


@gluon.jit
def _with_other_pieces(total, split, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Leave one warpgroup's sums over its piece of the keys in memory. Whoever comes last adds all pieces up.

    In their order, its own from memory too: the same bits, whoever that is. Nobody waits, so it does not matter which
    programs run at the same time.

    Returns: the total, and whether this is the last piece.
    """
    WIDTH: gl.constexpr = KIND.width
    GROUPS: gl.constexpr = KIND.groups
    OUT: gl.constexpr = LAYOUTS.out
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUTS.scores)
    acc, reference, running_sum, largest_p = total
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
        if KIND.format.pv != "fp8_e4m3":  # room for sums of as many numbers that just fit
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
    return Total(acc, reference, running_sum, largest_p), is_last


@gluon.jit
def _finish(given, walked, total, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """What one warpgroup does with its sums over all keys: see if they are good, else do them again; the output."""
    HEAD_DIM: gl.constexpr = KIND.head_dim
    WIDTH: gl.constexpr = KIND.width
    FP8: gl.constexpr = KIND.format.pv == "fp8_e4m3"
    LAGGED: gl.constexpr = KIND.format.reference == "lagged"
    OUT: gl.constexpr = LAYOUTS.out
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    inputs = given.inputs
    recorded = given.recorded
    seq_q, heads, group, b, h, first_row, _, _, full, _ = given.tile
    acc, reference, running_sum, largest_p = total
    score_rows = walked.score_rows
    of_rows = given.shared.of_rows
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUTS.scores)
    h_kv = h // group

    top = reference
    if KIND.format.reference != "running":
        if LAGGED:
            # exact: P of the largest score against the range of e4m3. A row that saw nothing, or a NaN, needs no other
            saw = ((largest_p != 0) | (full > 0)) & (largest_p <= _INFINITY)
            fits = (largest_p <= _LARGEST_P) & (largest_p >= _SMALLEST_P) | (saw == 0) | (score_rows >= seq_q)
            top = gl.where(saw, reference + gl.log2(largest_p.to(gl.float32, bitcast=True)), float("-inf"))
            again = gl.min(fits.to(gl.int32), 0) == 0
        else:
            again = outgrown(acc, running_sum, OUT)
        if KIND.scaling == "planned":
            lanes = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
            count = recorded.counts_ptr + (gl.load(recorded.row_ptr) + h_kv) * _COUNTS + lanes * 0
            # a warpgroup without rows did nothing
            one = gl.full_like(lanes, 1) * (first_row + GROUP_INDEX * ROWS < seq_q).to(gl.int32)
            gl.atomic_add(count + _TRIED, one, mask=lanes == 0, sem=_RELAXED)
            gl.atomic_add(count + _REDONE, one * again.to(gl.int32), mask=lanes == 0, sem=_RELAXED)
        if again:
            mbarrier.wait(given.shared.finished, 0)
            acc, reference, running_sum = _redo(given, walked, GROUP_INDEX, KIND, LAYOUTS)
            top = gl.where(gl.abs(reference) < _P_EXPONENT_LIMIT, reference + _P_EXPONENT, reference)
    elif KIND.keeps_max:
        top = gl.where(gl.abs(reference) < _P_EXPONENT_LIMIT, reference + _P_EXPONENT, reference)
    if KIND.keeps_max:
        # any number does for a row that saw nothing, or a NaN
        row_max = recorded.row_max_ptr + (b * heads + h).to(gl.int64) * seq_q + score_rows
        kept = top + of_rows.index(GROUP_INDEX * _ROW_FIELDS + _TO_KEPT).load(ROW)
        gl.store(row_max, gl.where(gl.abs(kept) < float("inf"), kept, 0.0), mask=score_rows < seq_q)
    if LAGGED:
        reference = gl.where(top == float("-inf"), top, reference)  # as a running max has it: nothing was seen

    # one division a row: that of a tensor takes several instructions for each of 64 numbers
    acc = acc * gl.convert_layout(1.0 / running_sum, gl.SliceLayout(1, OUT))[:, None]
    sees_nothing = gl.convert_layout((running_sum == 0.0) & (reference == float("-inf")), gl.SliceLayout(1, OUT))
    acc = gl.where(sees_nothing[:, None], gl.zeros_like(acc), acc)
    if FP8:
        v_scale = (
            inputs.v_scale_ptr + (b * (heads // group) + h_kv) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))
        )
        acc = acc * gl.load(v_scale)[None, :]
        # a mean of finite values is finite, but the rounding of its weights may push it beyond the largest number
        LARGEST: gl.constexpr = 65504.0 if inputs.out_ptr.dtype.element_ty == gl.float16 else 3.38e38
        acc = gl.where(acc > LARGEST, LARGEST, gl.where(acc < -LARGEST, -LARGEST, acc))
    out = gl.convert_layout(acc.to(inputs.out_ptr.dtype.element_ty), IO)
    rows = first_row + GROUP_INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, IO))
    inside = (rows < seq_q)[:, None] & (channels < HEAD_DIM)[None, :]
    out_rows = (b.to(gl.int64) * seq_q + rows) * heads + h  # contiguous [B, S_q, H, D]
    gl.store(inputs.out_ptr + out_rows[:, None] * HEAD_DIM + channels[None, :], out, mask=inside)
    if KIND.return_lse:
        lowered = of_rows.index(GROUP_INDEX * _ROW_FIELDS + _LOWERED).load(ROW)
        lse = (reference + gl.log2(running_sum)) * _LN_2 + lowered
        lse_at = inputs.lse_ptr + (b.to(gl.int64) * seq_q + score_rows) * heads + h
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
def _to_middle(center, recorded, h_kv, channels, HEAD_DIM: gl.constexpr):
    """As _to_middle of ../kernel.py: q · this takes a score to the terms of the kept ones."""
    is_channel = channels < HEAD_DIM
    stat = recorded.stats_ptr + (gl.load(recorded.row_ptr) + h_kv) * (_STATS * recorded.state_width) + channels
    high = gl.load(stat + _STAT_K_MAX * recorded.state_width, mask=is_channel, other=0.0)
    low = gl.load(stat + _STAT_K_MIN * recorded.state_width, mask=is_channel, other=0.0)
    return center - (high * 0.5 + low * 0.5)


@gluon.jit
def _quantize_queries(given, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, ROW: gl.constexpr):
    """Codes of one warpgroup's 64 query rows, and their numbers, to shared memory. Returns the rows' scales.

    Slice by slice (SLICE rows): this code runs once, so its time is that of fetching it.
    """
    HEAD_DIM: gl.constexpr = KIND.head_dim
    WIDTH: gl.constexpr = KIND.width
    SCALING: gl.constexpr = KIND.scaling
    RETURN_LSE: gl.constexpr = KIND.return_lse
    SLICE: gl.constexpr = KIND.slice
    SLICES: gl.constexpr = ROWS // SLICE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    CODES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SLICE, WIDTH], gl.int8)
    inputs = given.inputs
    recorded = given.recorded
    of_rows = given.shared.of_rows
    seq_q, heads, group, b, h, first_row, _, _, _, _ = given.tile
    h_kv = h // group
    kv_head_of_batch = b * (heads // group) + h_kv
    q_base = inputs.q_ptr + b.to(gl.int64) * inputs.stride_qb + h.to(gl.int64) * inputs.stride_qh
    first = first_row + GROUP_INDEX * ROWS
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if SLICES == 1:
        slices = 1
    else:  # SLICES, which the compiler does not know: no unrolling
        slices = gl.minimum(seq_q + SLICES, SLICES)
    q_slices = given.shared.q_codes._reinterpret(gl.int8, [KIND.groups * SLICES, SLICE, WIDTH], CODES)
    of_slices = of_rows._reinterpret(gl.float32, [KIND.groups * _ROW_FIELDS * SLICES, SLICE], of_rows.layout)
    fields = GROUP_INDEX * _ROW_FIELDS * SLICES
    weight = gl.load(recorded.q_weight_ptr + kv_head_of_batch * WIDTH + channels)[None, :]
    if SCALING == "planned":
        row = gl.load(recorded.row_ptr) + h_kv
        q_amax = gl.zeros((SLICE, WIDTH), gl.float32, LAYOUT)
    if SCALING == "per_head":
        amax_of_all = gl.load(inputs.q_amax_ptr + b * heads + h)
    if SCALING == "per_block":
        top = gl.zeros((SLICE, WIDTH), gl.float32, LAYOUT)
        for i in range(slices):
            q = _load_queries(q_base, inputs.stride_qs, first + i * SLICE, seq_q, HEAD_DIM, WIDTH, SLICE, LAYOUT)
            top = gl.maximum(top, gl.abs(q * weight))
        amax_of_all = gl.max(gl.max(top, 1), 0)
    if RETURN_LSE or KIND.keeps_max:
        center = gl.load(inputs.center_ptr + kv_head_of_batch * WIDTH + channels)
    if KIND.keeps_max:
        to_middle = _to_middle(center, recorded, h_kv, channels, HEAD_DIM)
    row_scale = gl.full([ROWS], 0.0, gl.float32, ROW)
    ahead = _load_queries(q_base, inputs.stride_qs, first, seq_q, HEAD_DIM, WIDTH, SLICE, LAYOUT)
    for i in range(slices):
        q = ahead
        if SLICES > 1:
            after = first + gl.minimum(i + 1, SLICES - 1) * SLICE
            ahead = _load_queries(q_base, inputs.stride_qs, after, seq_q, HEAD_DIM, WIDTH, SLICE, LAYOUT)
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
        scale = (amax * (1.0 / 127.0) + gl.sum(q * 0.0, 1)) * (inputs.softmax_scale * _LOG2_E)
        if SLICES == 1:
            # through shared memory, the plain loop beside a mask of keys spilled 20 registers (Triton 3.7.1)
            row_scale = gl.convert_layout(scale, ROW)
        else:
            of_slices.index(fields + _SCALE * SLICES + i).store(scale)
        if SCALING == "planned":
            q_amax = gl.maximum(q_amax, gl.abs(q))
        if RETURN_LSE:  # smoothing lowered every score of a row by q·c: put it back
            lowered = gl.sum(q * center[None, :], 1) * inputs.softmax_scale
            of_slices.index(fields + _LOWERED * SLICES + i).store(lowered)
        if KIND.keeps_max:
            to_kept = gl.sum(q * to_middle[None, :], 1) * (inputs.softmax_scale * _LOG2_E)
            of_slices.index(fields + _TO_KEPT * SLICES + i).store(to_kept)
    fence_async_shared()
    if SCALING == "planned":  # not before the fence, which waits for what is under way
        stat = recorded.stats_ptr + (row * _STATS + _STAT_Q_AMAX) * recorded.state_width
        record_amax(stat, gl.max(q_amax, 0), HEAD_DIM, WIDTH)
    if SLICES > 1:
        row_scale = of_rows.index(GROUP_INDEX * _ROW_FIELDS + _SCALE).load(ROW)
    return row_scale


@gluon.jit
def _sum_up(reference, walked, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """One warpgroup's sums over the key tiles that come through the ring. reference: of the first tile's softmax."""
    WIDTH: gl.constexpr = KIND.width
    BLOCK_N: gl.constexpr = KIND.block_n
    MASKING: gl.constexpr = KIND.masking
    FORMAT: gl.constexpr = KIND.format
    SCALE_PER_KEY: gl.constexpr = FORMAT.scale_per_key
    FP8: gl.constexpr = FORMAT.pv == "fp8_e4m3"
    LAGGED: gl.constexpr = FORMAT.reference == "lagged"
    SCORES: gl.constexpr = LAYOUTS.scores
    OUT: gl.constexpr = LAYOUTS.out
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_codes, zero, row_scale, score_rows, kept, silenced, ring, seen = walked
    kept_reference = reference
    running_sum = sum_in_lanes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), BLOCK_N)
    top = (running_sum * 0.0).to(gl.int32)
    acc = gl.zeros((ROWS, WIDTH), gl.float32, OUT)
    if FP8:
        nothing, _ = halves(acc, WIDTH)
        store_kept(kept[0], nothing, WIDTH)
        store_kept(kept[1], nothing, WIDTH)

    tile = seen_tile(0, seen, MASKING)
    mbarrier.wait(ring.filled.index(0), 0)
    scores = warpgroup_mma(q_codes, ring.k_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    key_scale = load_key_scale(ring.k_scales.index(0), SCALE_PER_KEY, SCORES)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    p, reference, running_sum, top, rescale = masked_softmax_tile(
        scores, row_scale, key_scale, score_rows, tile * BLOCK_N, seen, reference, running_sum, top,
        SCORES, BLOCK_N, MASKING, FORMAT, LAGGED,
    )  # fmt: skip
    if FP8:
        p = packed(p, BLOCK_N)
    slot, phase, tile_scale = _next_tile(0, 0, row_scale, ring, KIND, LAYOUTS)
    at = Place(tile, tile, slot, phase, tile_scale)
    sums = Sums(acc, p, reference, running_sum, top, kept_reference)
    at, sums = _walk(1, seen.full, at, sums, walked, GROUP_INDEX, KIND, LAYOUTS, MASKED=False)
    partial = gl.maximum(seen.full, 1)
    before = seen_tile(partial - 1, seen, MASKING)
    tile = seen_tile(gl.minimum(partial, seen.visited - 1), seen, MASKING)
    at = Place(before, tile, at.slot, at.phase, at.tile_scale)
    at, sums = _walk(partial, seen.visited, at, sums, walked, GROUP_INDEX, KIND, LAYOUTS, MASKED=True)
    acc, p, reference, running_sum, top, kept_reference = sums
    v_tile = value_operand(ring.v_tiles.index(at.slot), WIDTH, BLOCK_N, FORMAT.pv)
    if MASKING.mask == "keys" and not FP8:
        if seen.visited > seen.full:
            turn = seen.visited - partial
            silence_together(v_tile, seen.reach, at.before * BLOCK_N, silenced, turn, BLOCK_N, WIDTH, GROUP_INDEX)
    p_operand = as_operand(p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
    # each walk ends with what it summed up in `kept`
    acc = warpgroup_mma(p_operand, v_tile, acc, use_acc=not FP8, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if FP8:
        acc = with_kept(acc, kept, kept_reference, reference, WIDTH, OUT, FORMAT.reference)
    running_sum = gl.convert_layout(gl.sum(running_sum, 1), ROW)
    largest_p = gl.convert_layout(gl.max(top, 1), ROW)
    return Total(acc, reference, running_sum, largest_p)


@gluon.jit
def _consume(given, GROUP_INDEX: gl.constexpr, KIND: gl.constexpr):
    """One warpgroup: quantise 64 query rows, walk the key tiles, write the output."""
    WIDTH: gl.constexpr = KIND.width
    BLOCK_N: gl.constexpr = KIND.block_n
    PV_DTYPE: gl.constexpr = KIND.pv_dtype
    FORMAT: gl.constexpr = KIND.format
    FP8: gl.constexpr = FORMAT.pv == "fp8_e4m3"
    LAGGED: gl.constexpr = FORMAT.reference == "lagged"
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    BITS: gl.constexpr = PV_DTYPE.primitive_bitwidth
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 256 // BITS]
    )
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=32 // BITS)
    LAYOUTS: gl.constexpr = Layouts(SCORES, OUT, P_OPERAND)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)

    ring = given.ring
    seen = given.seen
    seq_q, heads, group, b, h, first_row, _, _, _, _ = given.tile
    row_scale = _quantize_queries(given, GROUP_INDEX, KIND, ROW)

    q_codes = given.shared.q_codes.index(GROUP_INDEX)
    reference = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    zero = gl.zeros((ROWS, BLOCK_N), gl.int32, SCORES)
    score_rows = first_row + GROUP_INDEX * ROWS + gl.arange(0, ROWS, ROW)
    if LAGGED:
        row_max = given.recorded.row_max_ptr + (b * heads + h).to(gl.int64) * seq_q + score_rows
        earlier = gl.load(row_max, mask=score_rows < seq_q, other=0.0)
        earlier -= given.shared.of_rows.index(GROUP_INDEX * _ROW_FIELDS + _TO_KEPT).load(ROW)
        # of a NaN or -inf nothing is known, and 0 is as good a guess as any
        reference = gl.where(gl.abs(earlier) < _P_EXPONENT_LIMIT, earlier - _LAGGED_EXPONENT, 0.0)
    kept = given.shared.kept
    if FP8:
        kept = (kept[0].index(GROUP_INDEX), kept[1].index(GROUP_INDEX))
    walked = Walked(q_codes, zero, row_scale, score_rows, kept, given.shared.silenced, ring, seen)

    total = _sum_up(reference, walked, GROUP_INDEX, KIND, LAYOUTS)
    if FORMAT.reference != "running":
        # the ring is free for other use once all warpgroups are through
        mbarrier.arrive(given.shared.finished, count=1)
    if KIND.splits:
        is_last = gl.to_tensor(True)
        if given.split.pieces > 1:
            total, is_last = _with_other_pieces(total, given.split, GROUP_INDEX, KIND, LAYOUTS)
        if is_last:
            _finish(given, walked, total, GROUP_INDEX, KIND, LAYOUTS)
    else:
        _finish(given, walked, total, GROUP_INDEX, KIND, LAYOUTS)


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
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, REFERENCE: gl.constexpr, KEEPS_MAX: gl.constexpr,
    PV: gl.constexpr, GROUPS: gl.constexpr, SLICE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    wait_for_prologue()
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
    MASKING: gl.constexpr = MaskKind(MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT)
    FORMAT: gl.constexpr = Format(SCALING == "per_token", PV, REFERENCE)
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
    ring_first = first
    ring_full = full
    ring_visited = visited
    if SPLIT:
        ring_first = first + visited * piece // pieces
        ring_visited = first + visited * (piece + 1) // pieces - ring_first
        ring_full = gl.minimum(gl.maximum(first + full - ring_first, 0), ring_visited)

    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.int8)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(gl.int8, [GROUPS, ROWS, WIDTH], Q_LAYOUT)
    row_smem = gl.allocate_shared_memory(
        gl.float32, [GROUPS * _ROW_FIELDS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
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
    landed = gl.allocate_shared_memory(gl.int64, [GROUPS * 2, 1], BARRIER)
    for i in gl.static_range(GROUPS * 2):
        mbarrier.init(landed.index(i), count=1)
    for i in gl.static_range(NUM_BUFFERS):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(freed.index(i), count=GROUPS)
    fence_async_shared()
    ring = Ring(k_smem, v_smem, scale_smem, filled, freed)
    seen = Seen(
        reach, tiles_ptr, n_tiles, ring_first, first_full, ring_full, ring_visited, left, right, offset, seq_kv
    )
    kept = (landed, landed)
    if PV == "fp8_e4m3":
        kept = (allocate_kept(GROUPS, WIDTH), allocate_kept(GROUPS, WIDTH))
    given = Given(
        Inputs(
            q_ptr, keys, values, key_scales, out_ptr, lse_ptr, center_ptr, q_amax_ptr, v_scale_ptr, stride_qb,
            stride_qs, stride_qh, softmax_scale,
        ),
        Recorded(stats_ptr, row_ptr, counts_ptr, row_max_ptr, q_weight_ptr, state_width),
        Shared(q_smem, row_smem, kept, silenced, finished, landed),
        ring,
        seen,
        Tile(seq_q, heads, group, b, h, first_row, k_row, first, full, visited),
        Split(partials_ptr, arrived_ptr, slot, piece, pieces),
    )  # fmt: skip
    KIND: gl.constexpr = Kind(
        HEAD_DIM,
        WIDTH,
        BLOCK_N,
        NUM_BUFFERS,
        SCALING,
        RETURN_LSE,
        KEEPS_MAX,
        GROUPS,
        SPLIT,
        SLICE,
        MASKING,
        FORMAT,
        PV_DTYPE,
    )
    copied = Copied(keys, values, key_scales, ring, seen, k_row, kv_head_of_batch, b, h_kv)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (given, 0, KIND)),
                (_consume, (given, 1, KIND)),
                (copy_keys_and_values, (copied, WIDTH, BLOCK_N, NUM_BUFFERS, MASKING, FORMAT)),
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
    for i in gl.static_range(GROUPS * 2):
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
