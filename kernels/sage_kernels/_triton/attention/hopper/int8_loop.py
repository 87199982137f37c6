"""A warpgroup's loop over the key tiles with P and V in INT8.

Other than in main_loop.py, each key tile's P has a softmax reference of its own, so that P has all of its 255 levels
in every tile. The product of a tile is a sum of its own (int8_sums.py). It is added to the earlier ones with a weight:
the exponential of the tile's reference less the first tile's.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ....facts import recipe
from ...hopper_primitives import barrier
from .int8_sums import (
    KEPT_TILES,
    add_all_lacking,
    add_product,
    code_product,
    keep_weight,
    less_128,
    packed_codes,
    sum_of_codes,
)
from .operands import seen_tile, value_operand
from .softmax import SCORE_LIMIT, load_key_scale, masked_values, scaled, sum_in_lanes, to_lanes
from .types import ROWS, Place, Total


_P_CODE_EXPONENT = gl.constexpr(recipe.P_CODE_EXPONENT)
_P_CODE_LIMIT = gl.constexpr(recipe.P_CODE_LIMIT)
_ROOM = gl.constexpr(22.0)
# for scores: codes of P hold no NaN, so the softmax reference has to
_ALL_NAN = gl.constexpr(tl.PropagateNan.ALL)


class CodeSums(NamedTuple):
    """One warpgroup's sums so far.

    acc: P·V, without the corrections of tiles whose weights are still kept (int8_sums.py). p: codes of the tile
    before, packed, whose product is still to come; weight: that tile's weight [R]. reference: the softmax reference
    that weights are relative to, log2 [R]. running_sum: sum of P's codes, by lanes.
    """

    acc: gl.tensor
    p: gl.tensor
    weight: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor


@gluon.jit
def _larger(x, y):
    return gl.maximum(x, y, propagate_nan=_ALL_NAN)


@gluon.jit
def reference_of(top):
    """Return a tile's softmax reference, given the rows' largest scores.

    It is `reference_below` of ../softmax.py for Gluon.
    """
    top = gl.where(top < SCORE_LIMIT, top, float("inf"))  # NaN in the output, rather than meaningless codes
    return gl.where(gl.abs(top) < _P_CODE_LIMIT, top - _P_CODE_EXPONENT, top)


@gluon.jit
def tile_softmax(scores, row_scale, key_scale, FORMAT: gl.constexpr):
    """Softmax over one completely visible key tile: P and the tile's own reference."""
    values, tile_scale = scaled(scores, row_scale, key_scale, FORMAT.scale_per_key)
    if FORMAT.scale_per_key:
        top = gl.reduce(values, 1, _larger) * tile_scale
    else:
        top = gl.max(scores, 1).to(gl.float32) * tile_scale
    own = reference_of(top)
    return gl.exp2(gl.fma(values, tile_scale[:, None], -own[:, None])), own


@gluon.jit
def masked_tile_softmax(scores, row_scale, key_scale, rows, first_key, seen, SCORES: gl.constexpr,
                        BLOCK_N: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr):  # fmt: skip
    """Softmax over one key tile that may hide keys: P and the tile's own reference.

    The reference of a row that sees none of its keys is -inf.
    """
    values, visible = masked_values(
        scores, row_scale, key_scale, rows, first_key, seen, 0, SCORES, BLOCK_N, MASKING, FORMAT
    )
    values = gl.where(visible, values, gl.full_like(values, float("-inf")))
    own = reference_of(gl.reduce(values, 1, _larger))
    return gl.exp2(values - gl.where(own == float("-inf"), 0.0, own)[:, None]), own


@gluon.jit
def _key_step(i, place, at, sums, group_index, group, KIND: gl.constexpr, LAYOUTS: gl.constexpr, MASKED: gl.constexpr):
    """Scores and P of the i-th key tile, while P·V of the tile before runs.

    place: where the tile's weight is kept, among KEPT_TILES.
    """
    BLOCK_N: gl.constexpr = KIND.block_n
    FORMAT: gl.constexpr = KIND.format
    SCORES: gl.constexpr = LAYOUTS.scores
    ring = group.ring
    seen = group.seen
    tile = at.tile
    slot = at.slot
    if MASKED:  # a list is read one tile ahead
        after = seen_tile(gl.minimum(i + 1, seen.visited - 1), seen, KIND.masking)
    scores = warpgroup_mma(
        group.q_codes, ring.k_tiles.index(slot).permute((1, 0)), group.zero, use_acc=False, is_async=True
    )
    v_tile = value_operand(ring.v_tiles.index(slot), KIND.width, BLOCK_N, FORMAT.pv)
    product = code_product(sums.p, v_tile, KIND, LAYOUTS)
    ring.release_before(slot, i > 0)
    barrier()
    key_scale = load_key_scale(ring.k_scales.index(slot), FORMAT.scale_per_key, SCORES)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
    # Warpgroups take turns, so that one's exponentials run beside the sums of another. All visit equally many tiles.
    mbarrier.wait(group.turns.index(group_index), i & 1)
    if MASKED:
        p, own = masked_tile_softmax(
            scores, group.row_scale, key_scale, group.score_rows, tile * BLOCK_N, seen, SCORES, BLOCK_N, KIND.masking,
            FORMAT,
        )  # fmt: skip
        tile = after
    else:
        p, own = tile_softmax(scores, group.row_scale, key_scale, FORMAT)
    # By the first tile. Raised by _ROOM, as products reach 2^22: so sums are about 1, far from fp32's largest number.
    reference = gl.where(sums.reference == float("-inf"), own + _ROOM, sums.reference)
    if MASKED:
        weight = gl.exp2(own - gl.where(reference == float("-inf"), 0.0, reference))
    else:
        weight = gl.exp2(own - reference)
    keep_weight(weight, place, group_index, group)
    # packed before the wait for P·V: otherwise the compiler moves the exponentials behind it
    words = packed_codes(p, SCORES, BLOCK_N)
    mbarrier.arrive(group.turns.index((group_index + 1) % KIND.groups), count=1)
    running_sum = gl.fma(
        sum_of_codes(words, sums.running_sum, BLOCK_N), to_lanes(weight, sums.running_sum), sums.running_sum
    )
    product, words = warpgroup_mma_wait(num_outstanding=0, deps=(product, words))
    acc = add_product(sums.acc, product, sums.weight, LAYOUTS)
    slot, phase = ring.following(slot, at.phase)
    ring.wait_filled(slot, phase)
    at = Place(before=tile, tile=tile, slot=slot, phase=phase, tile_scale=at.tile_scale, zeroings=0)
    return at, CodeSums(acc=acc, p=less_128(words), weight=weight, reference=reference, running_sum=running_sum)


@gluon.jit
def sum_up_codes(value_sums, group_index, group, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Return one warpgroup's sums over the key tiles in the ring; `sum_up` for P and V in INT8.

    The softmax reference is by the first tile with a visible key. value_sums: the head's `sums_of`.
    """
    WIDTH: gl.constexpr = KIND.width
    BLOCK_N: gl.constexpr = KIND.block_n
    SCORES: gl.constexpr = LAYOUTS.scores
    ring = group.ring
    seen = group.seen

    # the first tile's scores run beside a product with a weight of 0: whatever the slot holds does not count
    at = Place(
        before=0, tile=0, slot=0, phase=0, tile_scale=group.row_scale, zeroings=0
    )  # the last two are not used here
    sums = CodeSums(
        acc=gl.zeros((ROWS, WIDTH), gl.float32, LAYOUTS.out),
        p=less_128(packed_codes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), SCORES, BLOCK_N)),
        weight=gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES)),
        reference=gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES)),
        running_sum=sum_in_lanes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), BLOCK_N),
    )  # fmt: skip
    ring.wait_filled(0, 0)
    for start in range(0, seen.visited, KEPT_TILES):
        end = gl.minimum(start + KEPT_TILES, seen.visited)
        # tiles that all rows see completely, then those that need the mask
        partial = gl.minimum(gl.maximum(seen.full, start), end)
        for i in range(start, partial):
            at, sums = _key_step(i, i - start, at, sums, group_index, group, KIND, LAYOUTS, MASKED=False)
        tile = seen_tile(gl.minimum(partial, seen.visited - 1), seen, KIND.masking)
        at = Place(before=tile, tile=tile, slot=at.slot, phase=at.phase, tile_scale=at.tile_scale, zeroings=0)
        for i in range(partial, end):
            at, sums = _key_step(i, i - start, at, sums, group_index, group, KIND, LAYOUTS, MASKED=True)
        acc = add_all_lacking(sums.acc, start, end - start, value_sums, group_index, group, KIND, LAYOUTS)
        sums = CodeSums(acc=acc, p=sums.p, weight=sums.weight, reference=sums.reference, running_sum=sums.running_sum)

    # P·V of the last tile
    v_tile = value_operand(ring.v_tiles.index(at.slot), WIDTH, BLOCK_N, KIND.format.pv)
    product = code_product(sums.p, v_tile, KIND, LAYOUTS)
    product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
    acc = add_product(sums.acc, product, sums.weight, LAYOUTS)
    running_sum = gl.convert_layout(gl.sum(sums.running_sum, 1), gl.SliceLayout(1, SCORES))
    return Total(
        acc=acc, reference=sums.reference, running_sum=running_sum, largest_p=(running_sum * 0.0).to(gl.int32)
    )
