"""Parts of the Hopper kernel: which key tiles a program visits, their copies, one tile of the softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.9
_SILENCED_ROWS = gl.constexpr(16)  # values rewritten together: few registers, in the middle of the key loop


@gluon.jit
def band_tiles(first_row, rows, seq_q, seq_kv, left, right, offset, BLOCK_N: gl.constexpr,
                HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):  # fmt: skip
    """As attention_fwd._band_tiles, for `rows` query rows from first_row on."""
    last_row = gl.minimum(first_row + rows, seq_q) - 1
    any_first = 0
    all_first = 0
    any_last = seq_kv
    all_last = seq_kv
    if HAS_LEFT:
        any_first = gl.maximum(first_row + offset - left, 0)
        all_first = gl.maximum(last_row + offset - left, 0)
    if HAS_RIGHT:
        any_last = gl.maximum(gl.minimum(last_row + offset + right + 1, seq_kv), 0)
        all_last = gl.maximum(gl.minimum(first_row + offset + right + 1, seq_kv), 0)
    first = any_first // BLOCK_N
    visited = gl.maximum((any_last + BLOCK_N - 1) // BLOCK_N - first, 0)
    first_full = (all_first + BLOCK_N - 1) // BLOCK_N
    full = gl.maximum(all_last // BLOCK_N - first_full, 0)
    return gl.where(visited > 0, first, 0), first_full, full, visited


@gluon.jit
def tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK: gl.constexpr, HAS_LEFT: gl.constexpr):
    """The i-th visited key tile: the wholly visible ones come first."""
    if MASK != "none":
        tile = gl.load(tiles_ptr + gl.where(i < full, i, n_tiles - 1 - (i - full)))
    elif HAS_LEFT:
        edge = first + i - full
        tile = gl.where(i < full, first_full + i, gl.where(edge >= first_full, edge + full, edge))
    else:
        tile = i
    return tile


@gluon.jit
def copy_keys(keys, key_scales, k_row, tile, landed, k_tile, scale_tile, OTHER_BYTES: gl.constexpr,
               BLOCK_N: gl.constexpr, SCALE_PER_KEY: gl.constexpr):  # fmt: skip
    """Start the copy of a key tile, with its scales where there is one a key. `landed` then waits for these, and for
    OTHER_BYTES that the caller copies."""
    if SCALE_PER_KEY:
        mbarrier.expect(landed, OTHER_BYTES + keys.block_type.nbytes + key_scales.block_type.nbytes)
    else:
        mbarrier.expect(landed, OTHER_BYTES + keys.block_type.nbytes)
    load_tile(keys, [k_row + tile * BLOCK_N, 0], landed, k_tile)
    if SCALE_PER_KEY:
        load_tile(key_scales, [k_row // BLOCK_N + tile, 0], landed, scale_tile)


@gluon.jit
def copy_keys_and_values(
    keys, values, key_scales, k_smem, v_smem, scale_smem, k_full, k_empty, v_full, v_empty, k_row, b, h_kv,
    tiles_ptr, n_tiles, first, first_full, full, visited,
    BLOCK_N: gl.constexpr, NUM_BUFFERS: gl.constexpr, MASK: gl.constexpr, HAS_LEFT: gl.constexpr,
    SCALE_PER_KEY: gl.constexpr,
):  # fmt: skip
    """The producer: fills the ring of buffers as the consumers free them."""
    for i in range(visited):
        tile = tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        slot = i % NUM_BUFFERS
        phase = (i // NUM_BUFFERS) & 1
        mbarrier.wait(k_empty.index(slot), phase ^ 1)
        copy_keys(
            keys, key_scales, k_row, tile, k_full.index(slot), k_smem.index(slot), scale_smem.index(slot),
            0, BLOCK_N, SCALE_PER_KEY,
        )  # fmt: skip
        mbarrier.wait(v_empty.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), values.block_type.nbytes)
        load_tile(values, [b, tile * BLOCK_N, h_kv, 0], v_full.index(slot), v_smem.index(slot))


@gluon.jit
def load_key_scale(k_scales, scale_tile, tile, SCALE_PER_KEY: gl.constexpr, SCORES: gl.constexpr):
    """Scales of a key tile: [1, BLOCK_N], copied beside its codes, or the one number of the tile."""
    if SCALE_PER_KEY:
        scale = scale_tile.load(SCORES)
    else:
        scale = gl.load(k_scales + tile)
    return scale


@gluon.jit
def scaled(scores, row_scale, key_scale, SCALE_PER_KEY: gl.constexpr):
    """fp32 scores and the factor of each row that is left to apply."""
    values = scores.to(gl.float32)
    if SCALE_PER_KEY:
        values = values * key_scale
    else:
        row_scale = row_scale * key_scale
    return values, row_scale


@gluon.jit
def softmax_tile(scores, row_scale, key_scale, running_max, running_sum, SCALE_PER_KEY: gl.constexpr):
    """As primitives.online_softmax_step: without a scale per key, the max is taken on the integers."""
    values, tile_scale = scaled(scores, row_scale, key_scale, SCALE_PER_KEY)
    if SCALE_PER_KEY:
        top = gl.max(values, 1)
    else:
        top = gl.max(scores, 1).to(gl.float32)
    new_max = gl.maximum(running_max, top * tile_scale)
    rescale = gl.exp2(running_max - new_max)
    p = gl.exp2(gl.fma(values, tile_scale[:, None], -new_max[:, None]))
    return p, new_max, gl.fma(running_sum, rescale, gl.sum(p, 1)), rescale


@gluon.jit
def fixed_softmax_tile(scores, row_scale, key_scale, reference, running_sum, SCALE_PER_KEY: gl.constexpr):
    """As primitives.fixed_softmax_step."""
    values, tile_scale = scaled(scores, row_scale, key_scale, SCALE_PER_KEY)
    p = gl.exp2(gl.fma(values, tile_scale[:, None], -reference[:, None]))
    return p, running_sum + gl.sum(p, 1)


@gluon.jit
def masked_softmax_tile(scores, row_scale, key_scale, reach, rows, first_key, left, right, offset, seq_kv,
                         running_max, running_sum, BLOCK_N: gl.constexpr, SCORES: gl.constexpr, MASK: gl.constexpr,
                         HAS_BIAS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
                         SCALE_PER_KEY: gl.constexpr):  # fmt: skip
    """As `softmax_tile` where not all keys are visible; as primitives.masked_softmax_step."""
    keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    values, tile_scale = scaled(scores, row_scale, key_scale, SCALE_PER_KEY)
    if MASK == "keys":
        bias = gl.load(reach + keys)
        visible = (bias > float("-inf"))[None, :] & gl.full_like(scores, 1).to(gl.int1)
        if HAS_BIAS:
            values = gl.fma(values, tile_scale[:, None], bias[None, :])
            tile_scale = tile_scale * 0.0 + 1.0
    else:
        visible = (keys < seq_kv)[None, :] & gl.full_like(scores, 1).to(gl.int1)
        if HAS_LEFT:
            visible = visible & (keys[None, :] >= rows[:, None] + (offset - left))
        if HAS_RIGHT:
            visible = visible & (keys[None, :] <= rows[:, None] + (offset + right))
    values = values * tile_scale[:, None]
    new_max = gl.maximum(running_max, gl.max(gl.where(visible, values, gl.full_like(values, float("-inf"))), 1))
    reference = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.where(visible, gl.exp2(values - reference[:, None]), 0.0)
    rescale = gl.exp2(running_max - reference)
    return p, new_max, gl.fma(running_sum, rescale, gl.sum(p, 1)), rescale


@gluon.jit
def silence_hidden(v_tile, reach, first_key, FIRST: gl.constexpr, END: gl.constexpr, WIDTH: gl.constexpr):
    """Zero the values of keys that no row sees, in shared memory: a probability of 0 would not silence a NaN."""
    IO: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    for start in gl.static_range(FIRST, END, _SILENCED_ROWS):
        rows = start + gl.arange(0, _SILENCED_ROWS, gl.SliceLayout(1, IO))
        v_rows = v_tile.slice(start, _SILENCED_ROWS, 0)
        v = v_rows.load(IO)
        v_rows.store(gl.where((gl.load(reach + first_key + rows) > float("-inf"))[:, None], v, gl.full_like(v, 0.0)))
    fence_async_shared()


@gluon.jit
def silence_together(v_tile, reach, first_key, silenced, turn, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr,
                      GROUP_INDEX: gl.constexpr):  # fmt: skip
    """`silence_hidden` by both warpgroups: half of the tile each, then wait for the other's half.

    turn: how many tiles they did so before.
    """
    HALF: gl.constexpr = BLOCK_N // 2
    silence_hidden(v_tile, reach, first_key, GROUP_INDEX * HALF, (GROUP_INDEX + 1) * HALF, WIDTH)
    mbarrier.arrive(silenced, count=1)
    mbarrier.wait(silenced, turn & 1)


@gluon.jit
def outgrown(acc, running_sum, OUT: gl.constexpr):
    """As primitives.outgrown, for one warpgroup."""
    lost = gl.sum(acc * 0.0, 1) + gl.convert_layout(running_sum * 0.0, gl.SliceLayout(1, OUT))
    return gl.max((lost != 0.0).to(gl.int32), 0) != 0
