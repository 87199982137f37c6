"""Compute query rows again, with a running max, if their softmax reference did not fit.

One warpgroup does so for itself, tile after tile. It copies the tiles itself, into slots of the ring that no warpgroup
needs any more.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...hopper_primitives import barrier
from .fp8_sums import packed
from .int8_loop import masked_tile_softmax
from .int8_sums import add_lacking, add_product, code_product, less_128, packed_codes, sum_of_codes, value_sums
from .operands import as_operand, seen_tile, value_operand, zero_hidden
from .producer import copy_keys, copy_values
from .softmax import load_key_scale, load_row_mask, masked_softmax_tile, softmax_tile, sum_in_lanes, to_lanes
from .types import ROWS, Seen


class Places(NamedTuple):
    """Memory that one warpgroup copies into (key tile, value tile, scales), and its barriers."""

    k_tile: gl.shared_memory_descriptor
    v_tile: gl.shared_memory_descriptor
    scale_tile: gl.shared_memory_descriptor
    keys_landed: gl.shared_memory_descriptor
    values_landed: gl.shared_memory_descriptor


class Redone(NamedTuple):
    """State of the loop: the next tile, and the sums so far."""

    tile: gl.tensor
    acc: gl.tensor
    reference: gl.tensor
    running_sum: gl.tensor


@gluon.jit
def _copy_again(tile, places, program, KIND: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr):
    """Start the copy of a tile's keys, of its values, or of both.

    For both, keys_landed is the barrier. All that this warpgroup did with the memory must be done.
    """
    inputs = program.inputs
    rows = program.tile
    h_kv = rows.h // rows.group
    v_head = rows.b * (rows.heads // rows.group) + h_kv
    V_BYTES: gl.constexpr = inputs.v_tiles.block_type.nbytes
    values_landed = places.keys_landed if KEYS else places.values_landed
    # the copy engine may overwrite what this warpgroup has read and zeroed
    fence_async_shared()
    barrier()
    if KEYS:
        copy_keys(
            inputs.k_codes, inputs.k_scales, rows.k_row, tile, places.keys_landed, places.k_tile, places.scale_tile,
            V_BYTES if VALUES else 0, KIND.block_n, KIND.format.scale_per_key,
        )  # fmt: skip
    else:
        mbarrier.expect(values_landed, V_BYTES)
    if VALUES:
        copy_values(
            inputs.v_tiles, v_head, rows.b, h_kv, tile, program.seen.seq_kv, values_landed, places.v_tile, KIND.width,
            KIND.block_n, KIND.format.pv,
        )  # fmt: skip


@gluon.jit
def _redo_tiles(
    first, end, redone, places, program, group, seen, KIND: gl.constexpr, LAYOUTS: gl.constexpr, MASKED: gl.constexpr
):
    """Add the tiles from the first-th to before the end-th, with a running max.

    With FP8 P, copies run one tile ahead. With other P, rows are seldom computed again, and copies ahead made the loop
    over the ring slower.
    """
    BLOCK_N: gl.constexpr = KIND.block_n
    FORMAT: gl.constexpr = KIND.format
    SCORES: gl.constexpr = LAYOUTS.scores
    FP8: gl.constexpr = FORMAT.pv == "fp8_e4m3"
    rows = program.tile
    kv_head = rows.b * (rows.heads // rows.group) + rows.h // rows.group
    v_rows = value_operand(places.v_tile, KIND.width, BLOCK_N, FORMAT.pv)
    for i in range(first, end):
        tile = redone.tile
        acc = redone.acc
        reference = redone.reference
        running_sum = redone.running_sum
        if FP8:
            after = seen_tile(gl.minimum(i + 1, seen.visited - 1), seen, KIND.masking)
        else:
            tile = seen_tile(i, seen, KIND.masking)
            after = tile
            _copy_again(tile, places, program, KIND, KEYS=True, VALUES=True)
        mbarrier.wait(places.keys_landed, i & 1)
        scores = warpgroup_mma(group.q_codes, places.k_tile.permute((1, 0)), group.zero, use_acc=False, is_async=True)
        if FORMAT.scale_per_key:
            key_scale = load_key_scale(places.scale_tile, FORMAT.scale_per_key, SCORES)
        else:
            key_scale = gl.load(program.inputs.k_scales + kv_head * seen.n_tiles + tile)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        if FP8:
            if i + 1 < seen.visited:
                _copy_again(after, places, program, KIND, KEYS=True, VALUES=False)
        if FORMAT.pv == "int8":
            p, own = masked_tile_softmax(
                scores, group.row_scale, key_scale, group.score_rows, tile * BLOCK_N, seen, SCORES, BLOCK_N,
                KIND.masking, FORMAT,
            )  # fmt: skip
            finite = gl.maximum(reference, own)
            finite = gl.where(finite == float("-inf"), 0.0, finite)
            rescale = gl.exp2(reference - finite)
            weight = gl.exp2(own - finite)
            reference = gl.maximum(reference, own)
            p = packed_codes(p, SCORES, BLOCK_N)
            of_tile = sum_of_codes(p, running_sum, BLOCK_N) * to_lanes(weight, running_sum)
            running_sum = gl.fma(running_sum, to_lanes(rescale, running_sum), of_tile)
        elif MASKED:
            given = load_row_mask(group.score_rows, tile * BLOCK_N, seen, SCORES, BLOCK_N, KIND.masking)
            p, reference, running_sum, _, rescale = masked_softmax_tile(
                scores, group.row_scale, key_scale, group.score_rows, tile * BLOCK_N, seen, given, reference,
                running_sum, running_sum, SCORES, BLOCK_N, KIND.masking, FORMAT, False,
            )  # fmt: skip
        else:
            p, reference, running_sum, rescale = softmax_tile(
                scores, group.row_scale, key_scale, reference, running_sum, BLOCK_N, FORMAT
            )  # fmt: skip
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, LAYOUTS.out))[:, None]
        if FP8:
            p = packed(p, BLOCK_N)
        p_operand = as_operand(p, KIND.pv_dtype, LAYOUTS.p_operand, BLOCK_N)
        if FP8:
            mbarrier.wait(places.values_landed, i & 1)
        HIDES: gl.constexpr = KIND.masking.mask == "keys" or KIND.masking.mask == "rows"
        if MASKED and HIDES and FORMAT.pv == "16bit":
            zero_hidden(v_rows, seen.reach, tile * BLOCK_N, 0, BLOCK_N, KIND.width)
            barrier()
        if FP8:  # each tile has a sum of its own: slow, but no low bits are cut off here
            product = warpgroup_mma(p_operand, v_rows, gl.zeros_like(acc), use_acc=False, is_async=True)
            acc += warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        elif FORMAT.pv == "int8":
            product = code_product(less_128(p), v_rows, KIND, LAYOUTS)
            product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
            acc = add_product(acc, product, weight, LAYOUTS)
            acc = add_lacking(acc, weight, value_sums(program, KIND), tile, KIND, LAYOUTS)
        else:
            acc = warpgroup_mma(p_operand, v_rows, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if FP8:
            if i + 1 < seen.visited:
                _copy_again(after, places, program, KIND, KEYS=False, VALUES=True)
        redone = Redone(tile=after, acc=acc, reference=reference, running_sum=running_sum)
    return redone


@gluon.jit
def redo(program, group, group_index, KIND: gl.constexpr, LAYOUTS: gl.constexpr):
    """Compute one warpgroup's sums over all key tiles, one tile after the other.

    Returns acc, the softmax reference [ROWS] and the sum of P [ROWS].
    """
    BLOCK_N: gl.constexpr = KIND.block_n
    SCORES: gl.constexpr = LAYOUTS.scores
    FP8: gl.constexpr = KIND.format.pv == "fp8_e4m3"
    of_ring = program.seen
    rows = program.tile
    seen = Seen(
        reach=of_ring.reach, tiles_ptr=of_ring.tiles_ptr, n_tiles=of_ring.n_tiles, first=rows.first,
        first_full=of_ring.first_full, full=rows.full, visited=rows.visited,
        left=of_ring.left, right=of_ring.right, offset=of_ring.offset, seq_kv=of_ring.seq_kv,
        mask_ptr=of_ring.mask_ptr, stride_mq=of_ring.stride_mq, last_row=of_ring.last_row,
    )  # fmt: skip
    landed = program.shared.landed
    places = Places(
        k_tile=program.ring.k_tiles.index(group_index),
        v_tile=program.ring.v_tiles.index(group_index),
        scale_tile=program.ring.k_scales.index(group_index),
        keys_landed=landed.index(group_index * 2),
        values_landed=landed.index(group_index * 2 + 1),
    )
    redone = Redone(
        tile=seen_tile(0, seen, KIND.masking),
        acc=gl.zeros((ROWS, KIND.width), gl.float32, LAYOUTS.out),
        reference=gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES)),
        running_sum=sum_in_lanes(gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES), BLOCK_N),
    )
    whole = 0
    if FP8:
        _copy_again(redone.tile, places, program, KIND, KEYS=False, VALUES=True)
        _copy_again(redone.tile, places, program, KIND, KEYS=True, VALUES=False)
        if KIND.masking.mask == "none":  # with a mask of keys, one more loop made the others spill registers
            whole = seen.full
            redone = _redo_tiles(0, whole, redone, places, program, group, seen, KIND, LAYOUTS, MASKED=False)
    redone = _redo_tiles(whole, seen.visited, redone, places, program, group, seen, KIND, LAYOUTS, MASKED=True)
    row_sum = gl.convert_layout(gl.sum(redone.running_sum, 1), gl.SliceLayout(1, SCORES))
    return redone.acc, redone.reference, row_sum
