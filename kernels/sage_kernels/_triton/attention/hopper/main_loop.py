"""A warpgroup's loop over the key tiles in the ring: scores, softmax, and P·V one tile behind."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...hopper_primitives import barrier
from .fp8_sums import add_to_earlier, halves, packed, store_earlier, with_earlier
from .operands import as_operand, listed_tile, tile_number, value_operand, zero_hidden_of
from .softmax import fixed_softmax_tile, load_key_scale, load_row_mask, masked_softmax_tile, softmax_tile, sum_in_lanes
from .types import ROWS, Place, Sums, Total


# Keys that the tensor cores sum 8-bit products over. They cut off low bits of a sum: with more keys the results come
# out too short (kernels/README.md), and fewer keys take more time.
_KEYS_PER_SUM = gl.constexpr(640)


@gluon.jit
def _next_tile(slot, phase, tile_scale, ring, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Wait for the next tile; return its slot, its phase, and its scale if that is read early."""
    SCALE_PER_KEY: gl.constexpr = KIND.format.scale_per_key
    slot, phase = ring.following(slot, phase)
    ring.wait_filled(slot, phase)
    if KIND.scale_early and not SCALE_PER_KEY:
        tile_scale = load_key_scale(ring.k_scales.index(slot), SCALE_PER_KEY, LAYOUTS.scores)
    return slot, phase, tile_scale


@gluon.jit
def _key_step(
    i, adds, at, sums, group, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of the i-th key tile, while P·V of the tile before runs.

    adds: True to add P·V to acc, False to start acc anew.
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
    # Wait for the next tile before the wait for P·V: faster in long calls, in which Q is not sliced. With a mask of
    # keys it would spill registers.
    LONG: gl.constexpr = KIND.slice == ROWS and MASKING.mask == "none"
    WAITS_EARLY: gl.constexpr = not FP8 and (WIDTH == 64 or LONG)
    ring = group.ring
    seen = group.seen
    row_scale = group.row_scale
    before = at.before
    tile = at.tile
    slot = at.slot
    phase = at.phase
    tile_scale = at.tile_scale
    zeroings = at.zeroings
    acc = sums.acc
    p = sums.p
    reference = sums.reference
    running_sum = sums.running_sum
    top = sums.top
    if MASKED:  # a list is read one tile ahead
        after = listed_tile(gl.minimum(i + 1, seen.visited - 1), seen, MASKING)
    if KIND.scale_early and not SCALE_PER_KEY:
        key_scale = tile_scale
    elif not SCALE_PER_KEY:
        key_scale = load_key_scale(ring.k_scales.index(slot), SCALE_PER_KEY, SCORES)
    k_tile = ring.k_tiles.index(slot).permute((1, 0))
    scores = warpgroup_mma(group.q_codes, k_tile, group.zero, use_acc=False, is_async=True)
    v_tile = value_operand(ring.v_tiles.index(slot), WIDTH, BLOCK_N, FORMAT.pv)
    if MASKED and not FP8:
        zeroings = zero_hidden_of(before, zeroings, v_tile, seen, group.zeroed, BLOCK_N, WIDTH, MASKING, group_index)
    p_operand = as_operand(p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
    acc = warpgroup_mma(p_operand, v_tile, acc, use_acc=adds, is_async=True)
    # The slot before is free: nothing has read it since the last wait for P·V. An arrival has a barrier of the warps
    # on both sides, which is cheap here, where all of them wait for the scores.
    ring.release_before(slot)
    barrier()
    if MASKED:
        first_key = tile_number(tile, MASKING) * BLOCK_N
        given = load_row_mask(group.score_rows, first_key, seen, SCORES, BLOCK_N, MASKING)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    if SCALE_PER_KEY:
        key_scale = load_key_scale(ring.k_scales.index(slot), SCALE_PER_KEY, SCORES)
    if MASKED:
        p, reference, running_sum, top, rescale = masked_softmax_tile(
            scores, row_scale, key_scale, group.score_rows, first_key, seen, given, reference, running_sum, top,
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
    if WAITS_EARLY:  # this ends a basic block: without it ptxas moves the exponentials behind the wait for P·V
        slot, phase, tile_scale = _next_tile(slot, phase, tile_scale, ring, KIND, LAYOUTS)
    if FP8:  # the wait can't take an 8-bit operand; P is packed behind it, see `packed`
        acc, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p))
        p = packed(p, BLOCK_N)
    else:
        acc, p_operand, p = warpgroup_mma_wait(num_outstanding=0, deps=(acc, p_operand, p))
    if not WAITS_EARLY:
        slot, phase, tile_scale = _next_tile(slot, phase, tile_scale, ring, KIND, LAYOUTS)
    if FORMAT.reference == "running" or (MASKED and not LAGGED):
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    if MASKED:
        before = tile
        tile = after
    at = Place(before=before, tile=tile, slot=slot, phase=phase, tile_scale=tile_scale, zeroings=zeroings)
    return at, Sums(
        acc=acc, p=p, reference=reference, running_sum=running_sum, top=top, earlier_reference=sums.earlier_reference
    )


@gluon.jit
def _walk(
    first, end, at, sums, group, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Run `_key_step` for the tiles from the first-th to before the end-th.

    With FP8 P, acc is added to the sums of earlier tiles after every _KEYS_PER_SUM keys, and at the end.
    """
    if KIND.format.pv == "fp8_e4m3":
        STEPS: gl.constexpr = _KEYS_PER_SUM // KIND.block_n
        for start in range(first, end, STEPS):
            for i in range(start, gl.minimum(start + STEPS, end)):
                at, sums = _key_step(i, i > start, at, sums, group, group_index, KIND, LAYOUTS, MASKED)
            add_to_earlier(
                sums.acc, group.earlier, sums.earlier_reference, sums.reference, KIND.width, LAYOUTS.out,
                KIND.format.reference,
            )  # fmt: skip
            sums = Sums(
                acc=sums.acc, p=sums.p, reference=sums.reference, running_sum=sums.running_sum, top=sums.top,
                earlier_reference=sums.reference,
            )  # fmt: skip
    else:
        for i in range(first, end):
            at, sums = _key_step(i, True, at, sums, group, group_index, KIND, LAYOUTS, MASKED)
    return at, sums


@gluon.jit
def sum_up(reference, group, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Return one warpgroup's sums over the key tiles in the ring.

    reference: softmax reference that the first tile begins with.
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
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ring = group.ring
    seen = group.seen
    earlier_reference = reference
    running_sum = sum_in_lanes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), BLOCK_N)
    top = (running_sum * 0.0).to(gl.int32)
    acc = gl.zeros((ROWS, WIDTH), gl.float32, OUT)
    if FP8:
        nothing, _ = halves(acc, WIDTH)
        store_earlier(group.earlier[0], nothing, WIDTH)
        store_earlier(group.earlier[1], nothing, WIDTH)

    # the first tile has no P·V to run beside it, and may need a mask
    tile = listed_tile(0, seen, MASKING)
    first_key = tile_number(tile, MASKING) * BLOCK_N
    ring.wait_filled(0, 0)
    k_tile = ring.k_tiles.index(0).permute((1, 0))
    scores = warpgroup_mma(group.q_codes, k_tile, group.zero, use_acc=False, is_async=True)
    key_scale = load_key_scale(ring.k_scales.index(0), SCALE_PER_KEY, SCORES)
    given = load_row_mask(group.score_rows, first_key, seen, SCORES, BLOCK_N, MASKING)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    p, reference, running_sum, top, rescale = masked_softmax_tile(
        scores, group.row_scale, key_scale, group.score_rows, first_key, seen, given, reference, running_sum,
        top, SCORES, BLOCK_N, MASKING, FORMAT, LAGGED,
    )  # fmt: skip
    if FP8:
        p = packed(p, BLOCK_N)
    slot, phase, tile_scale = _next_tile(0, 0, group.row_scale, ring, KIND, LAYOUTS)
    at = Place(before=tile, tile=tile, slot=slot, phase=phase, tile_scale=tile_scale, zeroings=0)
    sums = Sums(
        acc=acc, p=p, reference=reference, running_sum=running_sum, top=top, earlier_reference=earlier_reference
    )

    # tiles that all rows see completely, then those that need the mask
    at, sums = _walk(1, seen.full, at, sums, group, group_index, KIND, LAYOUTS, MASKED=False)
    partial = gl.maximum(seen.full, 1)
    before = listed_tile(partial - 1, seen, MASKING)
    tile = listed_tile(gl.minimum(partial, seen.visited - 1), seen, MASKING)
    at = Place(before=before, tile=tile, slot=at.slot, phase=at.phase, tile_scale=at.tile_scale, zeroings=0)
    at, sums = _walk(partial, seen.visited, at, sums, group, group_index, KIND, LAYOUTS, MASKED=True)

    # P·V of the last tile
    v_tile = value_operand(ring.v_tiles.index(at.slot), WIDTH, BLOCK_N, FORMAT.pv)
    if not FP8:
        if seen.visited > seen.full:
            zero_hidden_of(
                at.before, at.zeroings, v_tile, seen, group.zeroed, BLOCK_N, WIDTH, MASKING, group_index
            )  # fmt: skip
    p_operand = as_operand(sums.p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
    # with FP8 P acc starts anew: each walk ended by adding it to the sums of earlier tiles
    acc = warpgroup_mma(p_operand, v_tile, sums.acc, use_acc=not FP8, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if FP8:
        acc = with_earlier(
            acc, group.earlier, sums.earlier_reference, sums.reference, WIDTH, OUT, FORMAT.reference
        )  # fmt: skip
    running_sum = gl.convert_layout(gl.sum(sums.running_sum, 1), ROW)
    largest_p = gl.convert_layout(gl.max(sums.top, 1), ROW)
    return Total(acc=acc, reference=sums.reference, running_sum=running_sum, largest_p=largest_p)
