"""The producer warp: it fills the ring, as many tiles ahead of the warpgroups as there are slots."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...hopper_primitives import load_tile
from ...prologue.prepare_values import KEYS
from .operands import seen_tile


_STEP_KEYS = gl.constexpr(KEYS.value)


@gluon.jit
def copy_keys(keys, key_scales, k_row, tile, landed, k_tile, scale_tile, OTHER_BYTES: gl.constexpr,
              BLOCK_N: gl.constexpr, SCALE_PER_KEY: gl.constexpr):  # fmt: skip
    """Start the copy of a key tile, with its quantisation scales if there is one per key.

    The barrier `landed` then waits for these bytes, and for OTHER_BYTES that the caller copies.
    """
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
    """Start the copy of a value tile.

    v_head: number of the key/value head among all of the batch, for 8-bit values that the prologue laid out.
    """
    if PV != "16bit":
        step = v_head * ((seq_kv + _STEP_KEYS - 1) // _STEP_KEYS) + tile * BLOCK_N // _STEP_KEYS
        load_tile(values, [step * WIDTH, tile * BLOCK_N % _STEP_KEYS], landed, v_tile)
    else:
        load_tile(values, [b, tile * BLOCK_N, h_kv, 0], landed, v_tile)


@gluon.jit
def hand_over(scale, scale_tile):
    """Pass a key tile's one scale to the warpgroups, through shared memory.

    When they read it from global memory themselves, they waited for it.
    """
    scale_tile.store(gl.full([1], 0.0, gl.float32, gl.BlockedLayout([1], [32], [1], [0])) + scale)


@gluon.jit
def copy_keys_and_values(
    copied, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr
):
    """Fill slot after slot as warpgroups free them, each with a key tile and the value tile before."""
    if MASKING.mask == "tiles":
        if copied.seen.visited > 0:
            _copy_all(copied, WIDTH, BLOCK_N, MASKING, FORMAT)
    else:
        _copy_all(copied, WIDTH, BLOCK_N, MASKING, FORMAT)


@gluon.jit
def _copy_all(copied, WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, MASKING: gl.constexpr, FORMAT: gl.constexpr):
    """`copy_keys_and_values` for at least one key tile."""
    keys = copied.k_codes
    values = copied.v_tiles
    key_scales = copied.k_scales
    ring = copied.ring
    seen = copied.seen
    k_row = copied.k_row
    v_head = copied.v_head
    b = copied.b
    h_kv = copied.h_kv
    SCALE_PER_KEY: gl.constexpr = FORMAT.scale_per_key
    tile = seen_tile(0, seen, MASKING)
    after = seen_tile(gl.minimum(1, seen.visited - 1), seen, MASKING)
    LIST: gl.constexpr = MASKING.mask == "tiles"
    if LIST:
        later = seen_tile(gl.minimum(2, seen.visited - 1), seen, MASKING)
    if not SCALE_PER_KEY:
        k_scales = key_scales + v_head * seen.n_tiles
        hand_over(gl.load(k_scales + tile), ring.k_scales.index(0))
        scale = gl.load(k_scales + after)
    copy_keys(
        keys, key_scales, k_row, tile, ring.filled.index(0), ring.k_tiles.index(0), ring.k_scales.index(0), 0,
        BLOCK_N, SCALE_PER_KEY,
    )  # fmt: skip
    slot, phase = ring.following(0, 0)
    for i in range(1, seen.visited):
        before = tile
        tile = after
        # The list and the scales are read one tile ahead, before the wait that hides their latency. A list of each
        # query tile has a longer latency and is read two tiles ahead, so that neither load waits for the other.
        if LIST:
            after = later
            later = seen_tile(gl.minimum(i + 2, seen.visited - 1), seen, MASKING)
        else:
            after = seen_tile(gl.minimum(i + 1, seen.visited - 1), seen, MASKING)
        if not SCALE_PER_KEY:
            scale_of_tile = scale
            scale = gl.load(k_scales + after)
        ring.acquire(slot, phase)
        if not SCALE_PER_KEY:
            hand_over(scale_of_tile, ring.k_scales.index(slot))
        landed = ring.filled.index(slot)
        copy_keys(
            keys, key_scales, k_row, tile, landed, ring.k_tiles.index(slot), ring.k_scales.index(slot),
            values.block_type.nbytes, BLOCK_N, SCALE_PER_KEY,
        )  # fmt: skip
        copy_values(
            values, v_head, b, h_kv, before, seen.seq_kv, landed, ring.v_tiles.index(slot), WIDTH, BLOCK_N, FORMAT.pv
        )
        slot, phase = ring.following(slot, phase)
    # the last value tile has a slot to itself
    ring.acquire(slot, phase)
    landed = ring.filled.index(slot)
    mbarrier.expect(landed, values.block_type.nbytes)
    copy_values(
        values, v_head, b, h_kv, tile, seen.seq_kv, landed, ring.v_tiles.index(slot), WIDTH, BLOCK_N, FORMAT.pv
    )
