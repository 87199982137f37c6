"""Mixed attention: promoted tiles, whose scores are of Q and K in 16 bit instead of their codes.

A promoted key tile takes two slots of the ring, half of the channels each, as large as a tile of codes. Those that are
seen wholly have a loop of their own (promoted_step). Where a mask is needed, tiles of both kinds come one after the
other, few of them, and scores are not left in flight (block_step).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...hopper_primitives import barrier, load_tile
from .key_tiles import is_promoted, seen_tile
from .operands import as_operand, value_operand
from .producer import copy_keys, copy_values
from .softmax import fixed_softmax_tile, load_key_scale, masked_softmax_tile, sum_in_lanes
from .types import ROWS, Place, Seen, Sums


_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def half_queries(GROUPS: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr):
    """Shared memory for all query rows in 16 bit: for each warpgroup, two halves of their channels."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH // 2], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [GROUPS * 2, ROWS, WIDTH // 2], LAYOUT)


@gluon.jit
def keep_half_queries(program, group_index, KIND: gl.constexpr):
    """Query rows of one warpgroup in 16 bit, to shared memory. The fence of quantize_queries is theirs, too."""
    HALF: gl.constexpr = KIND.width // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    inputs = program.inputs
    tile = program.tile
    rows = tile.first_row + group_index * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    q_base = inputs.q_ptr + tile.b.to(gl.int64) * inputs.stride_qb + tile.h.to(gl.int64) * inputs.stride_qh
    q_rows = q_base + rows.to(gl.int64)[:, None] * inputs.stride_qs
    for half in gl.static_range(2):
        channels = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
        inside = (rows < tile.seq_q)[:, None] & (channels < KIND.head_dim)
        q = gl.load(q_rows + channels, mask=inside, other=0.0)
        program.shared.q_half.index(group_index * 2 + half).store(q.to(KIND.pv_dtype))


@gluon.jit
def _ordinary_scores(k_tile, scale_tile, group, SCORES: gl.constexpr):
    """Scores with an ordinary key tile, base 2 [R, N]."""
    sums = warpgroup_mma(group.q_codes, k_tile.permute((1, 0)), group.zero, use_acc=False, is_async=True)
    scale = load_key_scale(scale_tile, True, SCORES)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    return sums.to(gl.float32) * scale * group.row_scale[:, None]


@gluon.jit
def _products(half: gl.constexpr, k_half, products, group, KIND: gl.constexpr):
    """Products of half of the channels of Q and of a promoted key tile, started; added to `products`."""
    k_rows = k_half.reshape((KIND.block_n, KIND.width // 2)).permute((1, 0))
    return warpgroup_mma(group.q_half[half], k_rows, products, use_acc=half == 1, is_async=True)


@gluon.jit
def _promoted_scores(products, group, SCORES: gl.constexpr):
    """Scores with a promoted key tile, base 2 [R, N], of its products when they are there."""
    lowered = group.lowered.load(gl.SliceLayout(1, SCORES)) * _LOG2_E
    products = gl.convert_layout(warpgroup_mma_wait(num_outstanding=0, deps=(products,)), SCORES)
    # smoothing lowered the scores of ordinary tiles by q·c
    return products * (group.softmax_scale * _LOG2_E) - lowered[:, None]


@gluon.jit
def _no_products(KIND: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KIND.block_n, 16]
    )
    return gl.zeros((ROWS, KIND.block_n), gl.float32, LAYOUT)


@gluon.jit
def _half_tile(slot, seen, ring):
    """Where half of a promoted tile lies. Its descriptors are those of an ordinary tile there, which ptxas (of Triton
    3.6) then computes on the way to the products of that alone: promoted ones took what a register held. So it must
    not see that they are the same."""
    return ring.half_tiles.index(slot + gl.minimum(seen.seq_kv, 0))


@gluon.jit
def _scores_in_ring(i, slot, phase, group, KIND: gl.constexpr, SCORES: gl.constexpr):
    """Scores of the i-th tile, and the last slot that it takes, with its phase. All of K has been read."""
    ring = group.ring
    if is_promoted(i, group.seen) == 0:
        scores = _ordinary_scores(ring.k_tiles.index(slot), ring.k_scales.index(slot), group, SCORES)
    else:
        first = _half_tile(slot, group.seen, ring)
        slot, phase = ring.following(slot, phase)
        ring.wait_filled(slot, phase)
        products = _products(0, first, _no_products(KIND), group, KIND)
        products = _products(1, ring.half_tiles.index(slot), products, group, KIND)
        scores = _promoted_scores(products, group, SCORES)
    return scores, slot, phase


@gluon.jit
def promoted_step(at, sums, group, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """`_key_step` of a promoted tile that is seen wholly."""
    BLOCK_N: gl.constexpr = KIND.block_n
    SCORES: gl.constexpr = LAYOUTS.scores
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ring = group.ring
    second, phase = ring.following(at.slot, at.phase)
    ring.wait_filled(second, phase)
    products = _products(0, ring.half_tiles.index(at.slot), _no_products(KIND), group, KIND)
    products = _products(1, ring.half_tiles.index(second), products, group, KIND)
    p_operand = as_operand(sums.p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
    v_tile = value_operand(ring.v_tiles.index(at.slot), KIND.width, BLOCK_N, KIND.format.pv)
    acc = warpgroup_mma(p_operand, v_tile, sums.acc, is_async=True)
    ring.release_before(at.slot)
    scale = gl.full([ROWS], 0.0, gl.float32, ROW) + group.softmax_scale * _LOG2_E
    # smoothing lowered the scores of ordinary tiles by q·c
    reference = sums.reference + group.lowered.load(ROW) * _LOG2_E
    barrier()
    products = warpgroup_mma_wait(num_outstanding=1, deps=(products,))
    p, running_sum, top = fixed_softmax_tile(
        gl.convert_layout(products, SCORES), scale, 1.0, reference, sums.running_sum, sums.top, BLOCK_N, KIND.format
    )  # fmt: skip
    acc, p_operand, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p_operand, p))
    ring.release_before(second)
    slot, phase = ring.following(second, phase)
    ring.wait_filled(slot, phase)
    at = Place(before=at.before, tile=at.tile, slot=slot, phase=phase, tile_scale=at.tile_scale)
    return at, Sums(
        acc=acc, p=p, reference=sums.reference, running_sum=running_sum, top=top,
        earlier_reference=sums.earlier_reference,
    )  # fmt: skip


@gluon.jit
def block_step(i, at, sums, group, KIND: gl.constexpr, LAYOUTS: gl.constexpr, FIRST: gl.constexpr):
    """Scores of the i-th key tile, a promoted one or one that may need a mask, and its softmax under P·V of the tile
    before; without that for the first of all."""
    BLOCK_N: gl.constexpr = KIND.block_n
    MASKING: gl.constexpr = KIND.masking
    FORMAT: gl.constexpr = KIND.format
    SCORES: gl.constexpr = LAYOUTS.scores
    ring = group.ring
    seen = group.seen
    tile = at.tile
    after = seen_tile(gl.minimum(i + 1, seen.visited - 1), seen, MASKING)
    scores, slot, phase = _scores_in_ring(i, at.slot, at.phase, group, KIND, SCORES)
    acc = sums.acc
    if not FIRST:
        p_operand = as_operand(sums.p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
        v_tile = value_operand(ring.v_tiles.index(at.slot), KIND.width, BLOCK_N, FORMAT.pv)
        acc = warpgroup_mma(p_operand, v_tile, acc, is_async=True)
        ring.release_before(at.slot)
    one = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    p, reference, running_sum, top, rescale = masked_softmax_tile(
        scores, one, 1.0, group.score_rows, tile * BLOCK_N, seen, sums.reference, sums.running_sum, sums.top,
        SCORES, BLOCK_N, MASKING, FORMAT, False,
    )  # fmt: skip
    if not FIRST:
        acc, p_operand, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p_operand, p))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, LAYOUTS.out))[:, None]
    if is_promoted(i, seen):
        ring.release_before(slot)
    slot, phase = ring.following(slot, phase)
    ring.wait_filled(slot, phase)
    at = Place(before=tile, tile=after, slot=slot, phase=phase, tile_scale=at.tile_scale)
    return at, Sums(
        acc=acc, p=p, reference=reference, running_sum=running_sum, top=top, earlier_reference=sums.earlier_reference
    )


@gluon.jit
def redo_blocks(program, group, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """`redo` of redo.py, of tiles some of which are promoted: their halves come into one slot, one after the other."""
    BLOCK_N: gl.constexpr = KIND.block_n
    SCORES: gl.constexpr = LAYOUTS.scores
    inputs = program.inputs
    ring = program.ring
    rows = program.tile
    of_ring = program.seen
    h_kv = rows.h // rows.group
    v_head = rows.b * (rows.heads // rows.group) + h_kv
    HALF_BYTES: gl.constexpr = inputs.k_half.block_type.nbytes
    VALUE_BYTES: gl.constexpr = inputs.v_tiles.block_type.nbytes
    seen = Seen(
        reach=of_ring.reach, tiles_ptr=of_ring.tiles_ptr, n_tiles=of_ring.n_tiles, first=rows.first,
        first_full=of_ring.first_full, full=rows.full, promoted=of_ring.promoted, ordinary=of_ring.ordinary,
        visited=rows.visited, left=of_ring.left, right=of_ring.right, offset=of_ring.offset, seq_kv=of_ring.seq_kv,
    )  # fmt: skip
    landed = program.shared.landed.index(group_index * 2)
    half_landed = program.shared.landed.index(group_index * 2 + 1)
    k_tile = ring.k_tiles.index(group_index)
    half_tile = _half_tile(group_index, of_ring, ring)
    v_tile = ring.v_tiles.index(group_index)
    scale_tile = ring.k_scales.index(group_index)
    v_rows = value_operand(v_tile, KIND.width, BLOCK_N, KIND.format.pv)
    acc = gl.zeros((ROWS, KIND.width), gl.float32, LAYOUTS.out)
    reference = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    running_sum = sum_in_lanes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), BLOCK_N)
    one = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    promoted = 0
    for i in range(rows.visited):
        tile = seen_tile(i, seen, KIND.masking)
        # the copy engine may overwrite what this warpgroup has read
        fence_async_shared()
        barrier()
        if is_promoted(i, seen) == 0:
            copy_keys(
                inputs.k_codes, inputs.k_scales, rows.k_row, tile, landed, k_tile, scale_tile, VALUE_BYTES, BLOCK_N,
                True,
            )  # fmt: skip
        else:
            mbarrier.expect(landed, VALUE_BYTES + HALF_BYTES)
            load_tile(inputs.k_half, [rows.b, tile * BLOCK_N, h_kv, 0], landed, half_tile)
        copy_values(
            inputs.v_tiles, v_head, rows.b, h_kv, tile, seen.seq_kv, landed, v_tile, KIND.width, BLOCK_N,
            KIND.format.pv,
        )  # fmt: skip
        mbarrier.wait(landed, i & 1)
        if is_promoted(i, seen) == 0:
            scores = _ordinary_scores(k_tile, scale_tile, group, SCORES)
        else:
            products = _products(0, half_tile, _no_products(KIND), group, KIND)
            products = warpgroup_mma_wait(num_outstanding=0, deps=(products,))
            fence_async_shared()
            barrier()
            mbarrier.expect(half_landed, HALF_BYTES)
            load_tile(inputs.k_half, [rows.b, tile * BLOCK_N, h_kv, KIND.width // 2], half_landed, half_tile)
            mbarrier.wait(half_landed, promoted & 1)
            promoted += 1
            products = _products(1, half_tile, products, group, KIND)
            scores = _promoted_scores(products, group, SCORES)
        p, reference, running_sum, _, rescale = masked_softmax_tile(
            scores, one, 1.0, group.score_rows, tile * BLOCK_N, seen, reference, running_sum, running_sum, SCORES,
            BLOCK_N, KIND.masking, KIND.format, False,
        )  # fmt: skip
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, LAYOUTS.out))[:, None]
        p_operand = as_operand(p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
        acc = warpgroup_mma(p_operand, v_rows, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    row_sum = gl.convert_layout(gl.sum(running_sum, 1), gl.SliceLayout(1, SCORES))
    return acc, reference, row_sum
