"""Parts of the Hopper kernel: which key tiles a program visits, their copies, one tile of the softmax, P·V."""

import struct
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .... import recipe
from ...prologue.prepare_values import KEYS
from ..key_tiles import tile_at


def bits_of(number: float) -> int:
    """The fp32 number's bits as an integer."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


class Ring(NamedTuple):
    """Buffers of key and value tiles, the keys' scales, and their barriers.

    A place in the ring holds a key tile and the value tile before it, which are multiplied at the same time.
    """

    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    k_scales: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor


class Seen(NamedTuple):
    """Who sees what: a program visits `visited` key tiles from `first` on, or those of a list, `full` of them seen
    wholly; the rest as in ../key_tiles.py.
    """

    reach: gl.tensor
    tiles_ptr: gl.tensor
    n_tiles: gl.tensor
    first: gl.tensor
    first_full: gl.tensor
    full: gl.tensor
    visited: gl.tensor
    left: gl.tensor
    right: gl.tensor
    offset: gl.tensor
    seq_kv: gl.tensor


class Copied(NamedTuple):
    """What the producer is started with. k_codes, v_tiles and, one a key, k_scales are descriptors; v_head: the number
    of the key/value head among all of the batch.
    """

    k_codes: gl.tensor
    v_tiles: gl.tensor
    k_scales: gl.tensor
    ring: Ring
    seen: Seen
    k_row: gl.tensor
    v_head: gl.tensor
    b: gl.tensor
    h_kv: gl.tensor


class MaskKind(NamedTuple):
    """MASK, HAS_BIAS, HAS_LEFT and HAS_RIGHT of ../kernel.py."""

    mask: gl.constexpr
    has_bias: gl.constexpr
    has_left: gl.constexpr
    has_right: gl.constexpr


class Format(NamedTuple):
    """SCALE_PER_KEY, PV and REFERENCE of ../kernel.py."""

    scale_per_key: gl.constexpr
    pv: gl.constexpr
    reference: gl.constexpr


load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed in Triton 3.9
ROWS = gl.constexpr(64)  # query rows of one warpgroup
_SILENCED_ROWS = gl.constexpr(16)  # values rewritten together: few registers, in the middle of the key loop
_STEP_KEYS = gl.constexpr(KEYS.value)
_P_EXPONENT = gl.constexpr(recipe.P_EXPONENT)
_P_EXPONENT_LIMIT = gl.constexpr(recipe.P_EXPONENT_LIMIT)
_RELAXED = gl.constexpr("relaxed")  # as primitives.RELAXED
_SCORE_LIMIT = gl.constexpr(2.0**27)  # as in primitives.py


@gluon.jit
def wait_for_prologue():
    """What the launch before has written is there from here on: this one's programs may begin before that one ends."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def seen_tile(i, seen, MASKING: gl.constexpr):
    """The i-th visited key tile: the wholly visible ones come first."""
    return tile_at(
        i, seen.tiles_ptr, seen.n_tiles, seen.first, seen.first_full, seen.full, MASKING.mask, MASKING.has_left
    )


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
def copy_values(values, v_head, b, h_kv, tile, seq_kv, landed, v_tile, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr,
                PV: gl.constexpr):  # fmt: skip
    """Start the copy of a value tile. v_head: the head's number among all of the batch, for values laid out by us."""
    if PV == "fp8_e4m3":
        step = v_head * ((seq_kv + _STEP_KEYS - 1) // _STEP_KEYS) + tile * BLOCK_N // _STEP_KEYS
        load_tile(values, [step * WIDTH, tile * BLOCK_N % _STEP_KEYS], landed, v_tile)
    else:
        load_tile(values, [b, tile * BLOCK_N, h_kv, 0], landed, v_tile)


@gluon.jit
def next_place(slot, phase, NUM_BUFFERS: gl.constexpr):
    """The next place in the ring of buffers, and the phase of its barriers: i % NUM_BUFFERS takes a dozen
    instructions."""
    wraps = slot == NUM_BUFFERS - 1
    return gl.where(wraps, 0, slot + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def place_before(slot, NUM_BUFFERS: gl.constexpr):
    """The place in the ring of buffers that `next_place` came from."""
    return gl.where(slot == 0, NUM_BUFFERS, slot) - 1


@gluon.jit
def hand_over(scale, scale_tile):
    """A key tile's one scale to the consumers: read by them from global memory, its latency was in their way."""
    scale_tile.store(gl.full([1], 0.0, gl.float32, gl.BlockedLayout([1], [32], [1], [0])) + scale)


@gluon.jit
def copy_keys_and_values(
    copied, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, NUM_BUFFERS: gl.constexpr, MASKING: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """The producer: fills the ring of buffers as the consumers free them."""
    keys, values, key_scales, ring, seen, k_row, v_head, b, h_kv = copied
    k_tiles, v_tiles, scale_tiles, filled, freed = ring
    SCALE_PER_KEY: gl.constexpr = FORMAT.scale_per_key
    tile = seen_tile(0, seen, MASKING)
    after = seen_tile(gl.minimum(1, seen.visited - 1), seen, MASKING)
    if not SCALE_PER_KEY:
        k_scales = key_scales + v_head * seen.n_tiles
        hand_over(gl.load(k_scales + tile), scale_tiles.index(0))
        scale = gl.load(k_scales + after)
    copy_keys(
        keys, key_scales, k_row, tile, filled.index(0), k_tiles.index(0), scale_tiles.index(0), 0, BLOCK_N,
        SCALE_PER_KEY,
    )  # fmt: skip
    slot, phase = next_place(0, 0, NUM_BUFFERS)
    for i in range(1, seen.visited):
        before = tile
        tile = after
        # the list and the scales are read one tile ahead, before the wait that hides their latency
        after = seen_tile(gl.minimum(i + 1, seen.visited - 1), seen, MASKING)
        if not SCALE_PER_KEY:
            scale_of_tile = scale
            scale = gl.load(k_scales + after)
        mbarrier.wait(freed.index(slot), phase ^ 1)
        if not SCALE_PER_KEY:
            hand_over(scale_of_tile, scale_tiles.index(slot))
        landed = filled.index(slot)
        copy_keys(
            keys, key_scales, k_row, tile, landed, k_tiles.index(slot), scale_tiles.index(slot),
            values.block_type.nbytes, BLOCK_N, SCALE_PER_KEY,
        )  # fmt: skip
        copy_values(
            values, v_head, b, h_kv, before, seen.seq_kv, landed, v_tiles.index(slot), WIDTH, BLOCK_N, FORMAT.pv
        )
        slot, phase = next_place(slot, phase, NUM_BUFFERS)
    mbarrier.wait(freed.index(slot), phase ^ 1)
    landed = filled.index(slot)
    mbarrier.expect(landed, values.block_type.nbytes)
    copy_values(values, v_head, b, h_kv, tile, seen.seq_kv, landed, v_tiles.index(slot), WIDTH, BLOCK_N, FORMAT.pv)


@gluon.jit
def by_lanes(x, BLOCK_N: gl.constexpr):
    """[ROWS, BLOCK_N] scores as [ROWS, 4, BLOCK_N / 4]: what one thread holds of a row is its last axis."""
    return gl.reshape(gl.permute(gl.reshape(x, (ROWS, BLOCK_N // 8, 4, 2)), (0, 2, 1, 3)), (ROWS, 4, BLOCK_N // 4))


@gluon.jit
def sum_in_lanes(p, BLOCK_N: gl.constexpr):
    """[ROWS, 4]: each row's sum over the keys that one thread holds. Its four lanes add theirs up after the loop."""
    return gl.sum(by_lanes(p, BLOCK_N), 2)


@gluon.jit
def max_in_lanes(scores, BLOCK_N: gl.constexpr):
    """As sum_in_lanes."""
    return gl.max(by_lanes(scores, BLOCK_N), 2)


@gluon.jit
def to_lanes(row, lanes):
    """Numbers of rows, to be combined with what sum_in_lanes made."""
    return gl.convert_layout(row, gl.SliceLayout(1, lanes.type.layout))[:, None]


@gluon.jit
def load_key_scale(scale_tile, SCALE_PER_KEY: gl.constexpr, SCORES: gl.constexpr):
    """Scales of a key tile, which came with its codes: [1, BLOCK_N], or the tile's one as [1]."""
    if SCALE_PER_KEY:
        scale = scale_tile.load(SCORES)
    else:
        scale = scale_tile.load(gl.SliceLayout(1, SCORES))
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
def reference_below(top, PV: gl.constexpr):
    """As primitives.reference_below."""
    if PV == "fp8_e4m3":
        top = gl.where(gl.abs(top) < _P_EXPONENT_LIMIT, top - _P_EXPONENT, top)
    return top


@gluon.jit
def softmax_tile(scores, row_scale, key_scale, reference, running_sum, BLOCK_N: gl.constexpr, FORMAT: gl.constexpr):
    """As primitives.online_softmax_step: without a scale per key, the max is taken on the integers."""
    values, tile_scale = scaled(scores, row_scale, key_scale, FORMAT.scale_per_key)
    if FORMAT.scale_per_key:
        top = gl.max(values, 1) * tile_scale
    else:
        top = gl.max(scores, 1).to(gl.float32) * tile_scale
    if FORMAT.pv == "fp8_e4m3":  # no number, rather than a P that saturates beside a sum that does not
        top = gl.where(gl.abs(top) < _SCORE_LIMIT, top, float("inf"))
    new_reference = gl.maximum(reference, reference_below(top, FORMAT.pv))
    rescale = gl.exp2(reference - new_reference)
    p = gl.exp2(gl.fma(values, tile_scale[:, None], -new_reference[:, None]))
    running_sum = gl.fma(running_sum, to_lanes(rescale, running_sum), sum_in_lanes(p, BLOCK_N))
    return p, new_reference, running_sum, rescale


@gluon.jit
def fixed_softmax_tile(scores, row_scale, key_scale, reference, running_sum, top, BLOCK_N: gl.constexpr,
                       FORMAT: gl.constexpr):  # fmt: skip
    """As primitives.fixed_softmax_step; with a reference of the call before, also the bits of the largest P so far."""
    values, tile_scale = scaled(scores, row_scale, key_scale, FORMAT.scale_per_key)
    p = gl.exp2(gl.fma(values, tile_scale[:, None], -reference[:, None]))
    if FORMAT.reference == "lagged":  # of P: the chain of maxima then runs under the exponentials, not before them
        top = gl.maximum(top, max_in_lanes(p.to(gl.int32, bitcast=True), BLOCK_N))
    return p, running_sum + sum_in_lanes(p, BLOCK_N), top


@gluon.jit
def masked_softmax_tile(scores, row_scale, key_scale, rows, first_key, seen, reference, running_sum, top,
                        SCORES: gl.constexpr, BLOCK_N: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr,
                        LAGGED: gl.constexpr):  # fmt: skip
    """As _masked_step of ../kernel.py."""
    keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    values, tile_scale = scaled(scores, row_scale, key_scale, FORMAT.scale_per_key)
    if MASKING.mask == "keys":
        bias = gl.load(seen.reach + keys)
        visible = (bias > float("-inf"))[None, :] & gl.full_like(scores, 1).to(gl.int1)
        if MASKING.has_bias:
            values = gl.fma(values, tile_scale[:, None], bias[None, :])
            tile_scale = tile_scale * 0.0 + 1.0
    else:
        visible = (keys < seen.seq_kv)[None, :] & gl.full_like(scores, 1).to(gl.int1)
        if MASKING.has_left:
            visible = visible & (keys[None, :] >= rows[:, None] + (seen.offset - seen.left))
        if MASKING.has_right:
            visible = visible & (keys[None, :] <= rows[:, None] + (seen.offset + seen.right))
    values = values * tile_scale[:, None]
    seen_values = gl.where(visible, values, gl.full_like(values, float("-inf")))
    if LAGGED:
        p = gl.where(visible, gl.exp2(values - reference[:, None]), 0.0)
        # a score that is seen counts, however small its P
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
def packed(p, BLOCK_N: gl.constexpr):
    """P as e4m3 codes, [ROWS, BLOCK_N / 16, 4] words of four; keys permuted as V's, see primitives.in_operand_order.

    In the basic block of its exponentials, ptxas packs four numbers with two instructions, anywhere else with three.
    Words, as a loop would carry 8-bit numbers in a register each.
    """
    # keys of a tile of the tensor cores: two of eight, in each four lanes of two
    even, odd = gl.split(gl.reshape(p, (ROWS, BLOCK_N // 16, 2, 4, 2)))
    even_low, even_high = gl.split(gl.permute(even, (0, 1, 3, 2)))
    odd_low, odd_high = gl.split(gl.permute(odd, (0, 1, 3, 2)))
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [even_low, odd_low, even_high, odd_high],
        dtype=gl.uint32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def as_operand(p, PV_DTYPE: gl.constexpr, P_OPERAND: gl.constexpr, BLOCK_N: gl.constexpr):
    """P in the format and the layout of P·V; 8-bit P is given as `packed`. Moves nothing between threads."""
    if PV_DTYPE.primitive_bitwidth == 8:
        low = gl.join(p.to(gl.uint8), (p >> 8).to(gl.uint8))
        high = gl.join((p >> 16).to(gl.uint8), (p >> 24).to(gl.uint8))
        codes = gl.permute(gl.join(low, high), (0, 1, 2, 4, 3))
        operand = gl.reshape(codes, (ROWS, BLOCK_N)).to(PV_DTYPE, bitcast=True)
    else:
        operand = p.to(PV_DTYPE)
    return gl.convert_layout(operand, P_OPERAND)


@gluon.jit
def value_operand(v_tile, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, PV: gl.constexpr):
    """A value tile in shared memory as [BLOCK_N, WIDTH]."""
    if PV == "fp8_e4m3":
        rows = v_tile.permute((1, 0))
    else:
        rows = v_tile.reshape((BLOCK_N, WIDTH))
    return rows


@gluon.jit
def allocate_kept(GROUPS: gl.constexpr, WIDTH: gl.constexpr):
    """Place for half of the channels of the sums of earlier tiles, fp32: registers have none for three warpgroups.

    For each warpgroup [ROWS, WIDTH / 2] sums as [WIDTH / 16, 128, 4]: its threads side by side, four numbers of each.
    The halves are allocated one by one: between writing to one and reading the other Triton then needs no barrier.
    """
    return gl.allocate_shared_memory(
        gl.float32, [GROUPS, WIDTH // 16, 128, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )


@gluon.jit
def halves(acc, WIDTH: gl.constexpr):
    """[ROWS, WIDTH] as two of [ROWS, WIDTH / 2]; moves nothing."""
    return gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))


@gluon.jit
def store_kept(place, half, WIDTH: gl.constexpr):
    """Half of the sums to where each thread keeps its own."""
    # rows: warps, two of a thread, eight of lanes; channels: of a thread, four of lanes, two of a thread
    half = gl.permute(gl.reshape(half, (4, 2, 8, WIDTH // 16, 4, 2)), (3, 0, 2, 4, 1, 5))
    place.store(gl.reshape(half, (WIDTH // 16, 128, 4)))


@gluon.jit
def load_kept(place, WIDTH: gl.constexpr, OUT: gl.constexpr):
    """What `store_kept` left there."""
    like, _ = halves(gl.zeros((ROWS, WIDTH), gl.float32, OUT), WIDTH)
    as_stored = gl.reshape(
        gl.permute(gl.reshape(like, (4, 2, 8, WIDTH // 16, 4, 2)), (3, 0, 2, 4, 1, 5)), (WIDTH // 16, 128, 4)
    )
    half = gl.reshape(place.load(as_stored.type.layout), (WIDTH // 16, 4, 8, 4, 2, 2))
    return gl.convert_layout(gl.reshape(gl.permute(half, (1, 4, 2, 0, 3, 5)), (ROWS, WIDTH // 2)), like.type.layout)


@gluon.jit
def on_terms_of(kept, kept_reference, reference, REFERENCE: gl.constexpr):
    """Sums of earlier tiles on the terms of `reference`."""
    if REFERENCE == "running":
        factor = gl.where(kept_reference == float("-inf"), 0.0, gl.exp2(kept_reference - reference))
        kept = kept * gl.convert_layout(factor, gl.SliceLayout(1, kept.type.layout))[:, None]
    return kept


@gluon.jit
def promote(acc, kept, kept_reference, reference, WIDTH: gl.constexpr, OUT: gl.constexpr, REFERENCE: gl.constexpr):
    """Add acc to the sums of earlier tiles in `kept`, the places of the two halves, on the terms of `reference`.

    The tensor cores add 8-bit products to a sum of some 14 bits, cut off: long sums are made of short ones.
    """
    first, second = halves(acc, WIDTH)
    first += on_terms_of(load_kept(kept[0], WIDTH, OUT), kept_reference, reference, REFERENCE)
    second += on_terms_of(load_kept(kept[1], WIDTH, OUT), kept_reference, reference, REFERENCE)
    store_kept(kept[0], first, WIDTH)
    store_kept(kept[1], second, WIDTH)


@gluon.jit
def with_kept(acc, kept, kept_reference, reference, WIDTH: gl.constexpr, OUT: gl.constexpr, REFERENCE: gl.constexpr):
    """acc and the sums of earlier tiles, on the terms of `reference`."""
    first, second = halves(acc, WIDTH)
    first += on_terms_of(load_kept(kept[0], WIDTH, OUT), kept_reference, reference, REFERENCE)
    second += on_terms_of(load_kept(kept[1], WIDTH, OUT), kept_reference, reference, REFERENCE)
    sums = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), (ROWS, WIDTH))
    return gl.convert_layout(sums, OUT)


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
    """`silence_hidden` by the first two warpgroups, half of the tile each; all wait until both are done.

    All arrive, the one that does nothing too: otherwise two could be two turns ahead of it, and it would take the
    phase that it waits for, which is long over, for one to come.

    turn: how many tiles they did so before.
    """
    HALF: gl.constexpr = BLOCK_N // 2
    if GROUP_INDEX < 2:
        silence_hidden(v_tile, reach, first_key, GROUP_INDEX * HALF, (GROUP_INDEX + 1) * HALF, WIDTH)
    mbarrier.arrive(silenced, count=1)
    mbarrier.wait(silenced, turn & 1)


@gluon.jit
def record_amax(stat, amax, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr):
    """As primitives.record_amax. Neighbours in neighbouring lanes: the L2 then takes eight channels at once, where all
    programs of a head meet."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    bits = gl.convert_layout(gl.where(amax == amax, amax, 0.0).to(gl.int32, bitcast=True), LINE)
    channels = gl.arange(0, WIDTH, LINE)
    at = stat.to(gl.pointer_type(gl.int32), bitcast=True) + channels
    gl.atomic_max(at, bits, mask=channels < HEAD_DIM, sem=_RELAXED)


@gluon.jit
def outgrown(acc, running_sum, OUT: gl.constexpr):
    """As primitives.outgrown, for one warpgroup."""
    lost = gl.sum(acc * 0.0, 1) + gl.convert_layout(running_sum * 0.0, gl.SliceLayout(1, OUT))
    return gl.max((lost != 0.0).to(gl.int32), 0) != 0
