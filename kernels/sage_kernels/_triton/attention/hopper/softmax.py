"""The softmax of one key tile in one warpgroup: P, and the factor that rescales earlier sums.

The functions are those of ../softmax.py for Gluon. A row of scores lies in four threads. Their shares of a row's sum
and maximum stay apart until the loop is over, as tensors "by lanes", [ROWS, 4].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....facts import recipe
from ....facts.numerics import LOG2_E
from .types import ROWS


_P_EXPONENT = gl.constexpr(recipe.P_EXPONENT)
_P_EXPONENT_LIMIT = gl.constexpr(recipe.P_EXPONENT_LIMIT)
SCORE_LIMIT = gl.constexpr(2.0**27)  # as in ../softmax.py
_LOG2_E = gl.constexpr(LOG2_E)
_LOWEST = gl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)  # of fp32


@gluon.jit
def by_lanes(x, BLOCK_N: gl.constexpr):
    """Reshape scores [ROWS, BLOCK_N] to [ROWS, 4, BLOCK_N / 4]; the last axis is in one thread."""
    return gl.reshape(gl.permute(gl.reshape(x, (ROWS, BLOCK_N // 8, 4, 2)), (0, 2, 1, 3)), (ROWS, 4, BLOCK_N // 4))


@gluon.jit
def sum_in_lanes(p, BLOCK_N: gl.constexpr):
    """Return each row's sum over the keys of one thread, [ROWS, 4]."""
    return gl.sum(by_lanes(p, BLOCK_N), 2)


@gluon.jit
def max_in_lanes(scores, BLOCK_N: gl.constexpr):
    """Return each row's maximum over the keys of one thread, [ROWS, 4]."""
    return gl.max(by_lanes(scores, BLOCK_N), 2)


@gluon.jit
def to_lanes(row, lanes):
    """Convert a number for each row to the layout of a tensor by lanes."""
    return gl.convert_layout(row, gl.SliceLayout(1, lanes.type.layout))[:, None]


@gluon.jit
def load_key_scale(scale_tile, SCALE_PER_KEY: gl.constexpr, SCORES: gl.constexpr):
    """Load the scales of a key tile from the ring: [1, BLOCK_N], or [1] with one for the tile."""
    if SCALE_PER_KEY:
        scale = scale_tile.load(SCORES)
    else:
        scale = scale_tile.load(gl.SliceLayout(1, SCORES))
    return scale


@gluon.jit
def scaled(scores, row_scale, key_scale, SCALE_PER_KEY: gl.constexpr):
    """Return fp32 scores, and the factor of each row that is still to be applied."""
    values = scores.to(gl.float32)
    if SCALE_PER_KEY:
        values = values * key_scale
    else:
        row_scale = row_scale * key_scale
    return values, row_scale


@gluon.jit
def reference_below(top, PV: gl.constexpr):
    """Return the softmax reference of rows with largest score `top`; see ../softmax.py."""
    if PV == "fp8_e4m3":
        top = gl.where(gl.abs(top) < _P_EXPONENT_LIMIT, top - _P_EXPONENT, top)
    return top


@gluon.jit
def softmax_tile(scores, row_scale, key_scale, reference, running_sum, BLOCK_N: gl.constexpr, FORMAT: gl.constexpr):
    """Online softmax over one completely visible key tile: `online_softmax_step` of ../softmax.py.

    Without a scale per key, the max is taken on integers.
    """
    values, tile_scale = scaled(scores, row_scale, key_scale, FORMAT.scale_per_key)
    if FORMAT.scale_per_key:
        top = gl.max(values, 1) * tile_scale
    else:
        top = gl.max(scores, 1).to(gl.float32) * tile_scale
    if FORMAT.pv == "fp8_e4m3":  # NaN in the output, rather than a P that saturates beside a sum that does not
        top = gl.where(gl.abs(top) < SCORE_LIMIT, top, float("inf"))
    new_reference = gl.maximum(reference, reference_below(top, FORMAT.pv))
    rescale = gl.exp2(reference - new_reference)
    p = gl.exp2(gl.fma(values, tile_scale[:, None], -new_reference[:, None]))
    running_sum = gl.fma(running_sum, to_lanes(rescale, running_sum), sum_in_lanes(p, BLOCK_N))
    return p, new_reference, running_sum, rescale


@gluon.jit
def fixed_softmax_tile(scores, row_scale, key_scale, reference, running_sum, top, BLOCK_N: gl.constexpr,
                       FORMAT: gl.constexpr):  # fmt: skip
    """Softmax over one completely visible key tile with a fixed reference: `fixed_softmax_step`.

    With the reference "lagged" it also returns the bits of the largest P so far.
    """
    values, tile_scale = scaled(scores, row_scale, key_scale, FORMAT.scale_per_key)
    p = gl.exp2(gl.fma(values, tile_scale[:, None], -reference[:, None]))
    if FORMAT.reference == "lagged":  # of P, not of scores: this runs beside the exponentials, not before them
        top = gl.maximum(top, max_in_lanes(p.to(gl.int32, bitcast=True), BLOCK_N))
    return p, running_sum + sum_in_lanes(p, BLOCK_N), top


@gluon.jit
def load_row_mask(rows, first_key, seen, SCORES: gl.constexpr, BLOCK_N: gl.constexpr, MASKING: gl.constexpr):
    """Load the elements [ROWS, BLOCK_N] of a mask that differs by row; 0 for other masks.

    They are loaded while the scores are computed. Rows beyond the last one read its mask, and are not stored.
    """
    given = 0
    if MASKING.mask == "rows":
        keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
        at = seen.mask_ptr + gl.minimum(rows, seen.last_row).to(gl.int64)[:, None] * seen.stride_mq + keys[None, :]
        given = gl.load(at, mask=(keys < seen.seq_kv)[None, :], other=0)
    return given


@gluon.jit
def masked_values(scores, row_scale, key_scale, rows, first_key, seen, given, SCORES: gl.constexpr,
                  BLOCK_N: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr):  # fmt: skip
    """Return scores in base 2, fp32 [ROWS, BLOCK_N], hidden keys included, and which of them are visible.

    given: of `load_row_mask`.
    """
    keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    values, tile_scale = scaled(scores, row_scale, key_scale, FORMAT.scale_per_key)
    if MASKING.mask == "keys":
        bias = gl.load(seen.reach + keys)
        visible = (bias > float("-inf"))[None, :] & gl.full_like(scores, 1).to(gl.int1)
        if MASKING.has_bias:
            values = gl.fma(values, tile_scale[:, None], bias[None, :])
            tile_scale = tile_scale * 0.0 + 1.0
    elif MASKING.mask == "rows":
        visible = (keys < seen.seq_kv)[None, :] & gl.full_like(scores, 1).to(gl.int1)
        if MASKING.has_bias:
            bias = given.to(gl.float32)
            visible = visible & (bias > float("-inf"))
            bias = gl.maximum(bias * _LOG2_E, _LOWEST)  # as `load_bias` of ../../primitives.py
            values = gl.fma(values, tile_scale[:, None], bias)
            tile_scale = tile_scale * 0.0 + 1.0
        else:
            visible = visible & (given != 0)
    else:
        visible = (keys < seen.seq_kv)[None, :] & gl.full_like(scores, 1).to(gl.int1)
        if MASKING.has_left:
            visible = visible & (keys[None, :] >= rows[:, None] + (seen.offset - seen.left))
        if MASKING.has_right:
            visible = visible & (keys[None, :] <= rows[:, None] + (seen.offset + seen.right))
    return values * tile_scale[:, None], visible


@gluon.jit
def masked_softmax_tile(scores, row_scale, key_scale, rows, first_key, seen, given, reference, running_sum, top,
                        SCORES: gl.constexpr, BLOCK_N: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr,
                        LAGGED: gl.constexpr):  # fmt: skip
    """Softmax over one key tile that may hide keys: `masked_step` of ../softmax.py."""
    values, visible = masked_values(
        scores, row_scale, key_scale, rows, first_key, seen, given, SCORES, BLOCK_N, MASKING, FORMAT
    )
    seen_values = gl.where(visible, values, gl.full_like(values, float("-inf")))
    if LAGGED:
        p = gl.where(visible, gl.exp2(values - reference[:, None]), 0.0)
        # at least 1: a visible score counts as seen, however small its P
        bits = gl.where(visible, gl.maximum(p.to(gl.int32, bitcast=True), 1), 0)
        top = gl.maximum(top, max_in_lanes(bits, BLOCK_N))
        running_sum += sum_in_lanes(p, BLOCK_N)
        rescale = reference  # not used
    else:
        new_reference = gl.maximum(reference, reference_below(gl.max(seen_values, 1), FORMAT.pv))
        finite = gl.where(new_reference == float("-inf"), 0.0, new_reference)
        p = gl.where(visible, gl.exp2(values - finite[:, None]), 0.0)
        rescale = gl.exp2(reference - finite)
        running_sum = gl.fma(running_sum, to_lanes(rescale, running_sum), sum_in_lanes(p, BLOCK_N))
        reference = new_reference
    return p, reference, running_sum, top, rescale


@gluon.jit
def outgrown(acc, running_sum, OUT: gl.constexpr):
    """Return True if sums of any row of the warpgroup are inf or NaN; see ../softmax.py."""
    lost = gl.sum(acc * 0.0, 1) + gl.convert_layout(running_sum * 0.0, gl.SliceLayout(1, OUT))
    return gl.max((lost != 0.0).to(gl.int32), 0) != 0
