"""One warpgroup over the key tiles that come through the ring: scores, softmax, and P·V one tile behind."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ...hopper_primitives import barrier
from .fp8_sums import halves, packed, promote, store_earlier, with_earlier
from .key_tiles import seen_tile
from .operands import as_operand, value_operand, zero_hidden_together
from .promoted import block_step, promoted_step
from .softmax import fixed_softmax_tile, load_key_scale, masked_softmax_tile, softmax_tile, sum_in_lanes
from .types import ROWS, Place, Sums, Total


# Keys whose 8-bit products are summed in the tensor cores, which cut sums off: fewer take time, and with more the
# results come out too short (kernels/README.md)
_PROMOTED_KEYS = gl.constexpr(640)


@gluon.jit
def _next_tile(slot, phase, tile_scale, ring, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Wait for the next tile. Returns its slot, its phase, and its scale where that is read at once."""
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
    """Scores of the i-th key tile, and under its softmax P·V of the one before.

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
    # of keys the loop spills registers
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
    acc = sums.acc
    p = sums.p
    reference = sums.reference
    running_sum = sums.running_sum
    top = sums.top
    if MASKED:  # a list is read one tile ahead
        after = seen_tile(gl.minimum(i + 1, seen.visited - 1), seen, MASKING)
    if KIND.scale_early and not SCALE_PER_KEY:
        key_scale = tile_scale
    elif not SCALE_PER_KEY:
        key_scale = load_key_scale(ring.k_scales.index(slot), SCALE_PER_KEY, SCORES)
    k_tile = ring.k_tiles.index(slot).permute((1, 0))
    scores = warpgroup_mma(group.q_codes, k_tile, group.zero, use_acc=False, is_async=True)
    v_tile = value_operand(ring.v_tiles.index(slot), WIDTH, BLOCK_N, FORMAT.pv)
    if MASKED and MASKING.mask == "keys" and not FP8:
        turn = i - gl.maximum(seen.full, 1)
        zero_hidden_together(v_tile, seen.reach, before * BLOCK_N, group.zeroed, turn, BLOCK_N, WIDTH, group_index)
    p_operand = as_operand(p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
    acc = warpgroup_mma(p_operand, v_tile, acc, use_acc=adds, is_async=True)
    # Nothing has read the slot before since the last wait for P·V. The warps meet at a barrier on both sides of an
    # arrival: here, where all of them wait for the scores, that is cheap.
    ring.release_before(slot)
    barrier()
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    if SCALE_PER_KEY:
        key_scale = load_key_scale(ring.k_scales.index(slot), SCALE_PER_KEY, SCORES)
    if MASKED:
        p, reference, running_sum, top, rescale = masked_softmax_tile(
            scores, row_scale, key_scale, group.score_rows, tile * BLOCK_N, seen, reference, running_sum, top,
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
    if WAITS_EARLY:  # that ends a basic block: without it ptxas sinks the exponentials below the wait for P·V
        slot, phase, tile_scale = _next_tile(slot, phase, tile_scale, ring, KIND, LAYOUTS)
    if FP8:  # an 8-bit operand can't be waited for; p is packed where its exponentials were, see `packed`
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
    at = Place(before=before, tile=tile, slot=slot, phase=phase, tile_scale=tile_scale)
    return at, Sums(
        acc=acc, p=p, reference=reference, running_sum=running_sum, top=top, earlier_reference=sums.earlier_reference
    )


@gluon.jit
def _walk(
    first, end, at, sums, group, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """`_key_step` of the tiles from the first-th to before the end-th.

    With 8-bit P, acc is added to the sums of earlier tiles after _PROMOTED_KEYS keys, and at the end.
    """
    if KIND.format.pv == "fp8_e4m3":
        STEPS: gl.constexpr = _PROMOTED_KEYS // KIND.block_n
        for start in range(first, end, STEPS):
            for i in range(start, gl.minimum(start + STEPS, end)):
                at, sums = _key_step(i, i > start, at, sums, group, group_index, KIND, LAYOUTS, MASKED)
            promote(
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

    # the first tile, which has no P·V to run beside, and may need a mask
    tile = seen_tile(0, seen, MASKING)
    ring.wait_filled(0, 0)
    if MASKING.mask == "blocks":
        nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
        at = Place(before=tile, tile=tile, slot=0, phase=0, tile_scale=group.row_scale)
        sums = Sums(
            acc=acc, p=nothing, reference=reference, running_sum=running_sum, top=top,
            earlier_reference=earlier_reference,
        )  # fmt: skip
        at, sums = block_step(0, at, sums, group, KIND, LAYOUTS, FIRST=True)
    else:
        k_tile = ring.k_tiles.index(0).permute((1, 0))
        scores = warpgroup_mma(group.q_codes, k_tile, group.zero, use_acc=False, is_async=True)
        key_scale = load_key_scale(ring.k_scales.index(0), SCALE_PER_KEY, SCORES)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        p, reference, running_sum, top, rescale = masked_softmax_tile(
            scores, group.row_scale, key_scale, group.score_rows, tile * BLOCK_N, seen, reference, running_sum, top,
            SCORES, BLOCK_N, MASKING, FORMAT, LAGGED,
        )  # fmt: skip
        if FP8:
            p = packed(p, BLOCK_N)
        slot, phase, tile_scale = _next_tile(0, 0, group.row_scale, ring, KIND, LAYOUTS)
        at = Place(before=tile, tile=tile, slot=slot, phase=phase, tile_scale=tile_scale)
        sums = Sums(
            acc=acc, p=p, reference=reference, running_sum=running_sum, top=top, earlier_reference=earlier_reference
        )

    # tiles that all rows see wholly, then those that need the mask, or are promoted
    at, sums = _walk(1, seen.full, at, sums, group, group_index, KIND, LAYOUTS, MASKED=False)
    partial = gl.maximum(seen.full, 1)
    if MASKING.mask == "blocks":
        promoted = gl.minimum(seen.promoted - seen.first, seen.visited)
        for _ in range(partial, promoted):
            at, sums = promoted_step(at, sums, group, KIND, LAYOUTS)
        partial = gl.maximum(promoted, 1)
    before = seen_tile(partial - 1, seen, MASKING)
    tile = seen_tile(gl.minimum(partial, seen.visited - 1), seen, MASKING)
    at = Place(before=before, tile=tile, slot=at.slot, phase=at.phase, tile_scale=at.tile_scale)
    if MASKING.mask == "blocks":
        for i in range(partial, seen.visited):
            at, sums = block_step(i, at, sums, group, KIND, LAYOUTS, FIRST=False)
    else:
        at, sums = _walk(partial, seen.visited, at, sums, group, group_index, KIND, LAYOUTS, MASKED=True)

    # P·V of the last tile
    v_tile = value_operand(ring.v_tiles.index(at.slot), WIDTH, BLOCK_N, FORMAT.pv)
    if MASKING.mask == "keys" and not FP8:
        if seen.visited > seen.full:
            turn = seen.visited - partial
            zero_hidden_together(
                v_tile, seen.reach, at.before * BLOCK_N, group.zeroed, turn, BLOCK_N, WIDTH, group_index
            )
    p_operand = as_operand(sums.p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
    # with 8-bit P, each walk ends with a promotion
    acc = warpgroup_mma(p_operand, v_tile, sums.acc, use_acc=not FP8, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    if FP8:
        acc = with_earlier(
            acc, group.earlier, sums.earlier_reference, sums.reference, WIDTH, OUT, FORMAT.reference
        )  # fmt: skip
    running_sum = gl.convert_layout(gl.sum(sums.running_sum, 1), ROW)
    largest_p = gl.convert_layout(gl.max(sums.top, 1), ROW)
    return Total(acc=acc, reference=sums.reference, running_sum=running_sum, largest_p=largest_p)
