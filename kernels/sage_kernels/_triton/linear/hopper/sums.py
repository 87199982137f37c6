"""Sums of products of codes in one warpgroup, over the slots of one tile or part of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .types import BLOCK_K


_HALF = gl.constexpr(64)  # rows of one instruction


@gluon.jit
def int8_sums(ring, slot, phase, depth, HALF: gl.constexpr, KIND: gl.constexpr, SUMS: gl.constexpr):
    """Multiply INT8 codes over the slots of one unit; sums are exact, int32 [rows, columns].

    Products of a slot run while those of the next one are started, so a slot is freed one turn later.
    HALF: which of the two warpgroups. Returns: the sums, the next slot and its phase.
    """
    acc = gl.zeros((KIND.rows, KIND.block_n), gl.int32, SUMS)
    ring.wait_filled(slot, phase)
    w = ring.w.index(slot).permute((1, 0))
    acc = warpgroup_mma(ring.x.index(2 * slot + HALF), w, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    before = slot
    slot, phase = ring.following(slot, phase)
    for _ in range(BLOCK_K, depth, BLOCK_K):
        ring.wait_filled(slot, phase)
        w = ring.w.index(slot).permute((1, 0))
        acc = warpgroup_mma(ring.x.index(2 * slot + HALF), w, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        ring.release(before)
        before = slot
        slot, phase = ring.following(slot, phase)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    ring.release(before)
    return acc, slot, phase


@gluon.jit
def _two_slots(ring, slot, after, zero, FIRST: gl.constexpr, HALF: gl.constexpr, LAST: gl.constexpr):
    """Return the sums of 64 rows, from FIRST on, over two filled slots.

    LAST: no other rows need the slots, so free each as soon as possible.
    """
    x = ring.x.index(2 * slot + HALF).slice(FIRST, _HALF, 0)
    part = warpgroup_mma(x, ring.w.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(num_outstanding=1, deps=(part,))
    x = ring.x.index(2 * after + HALF).slice(FIRST, _HALF, 0)
    part = warpgroup_mma(x, ring.w.index(after).permute((1, 0)), part, is_async=True)
    if LAST:
        part = warpgroup_mma_wait(num_outstanding=1, deps=(part,))
        ring.release(slot)
    part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
    if LAST:
        ring.release(after)
    return part


@gluon.jit
def _one_slot(ring, slot, zero, FIRST: gl.constexpr, HALF: gl.constexpr):
    x = ring.x.index(2 * slot + HALF).slice(FIRST, _HALF, 0)
    part = warpgroup_mma(x, ring.w.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(part,))


@gluon.jit
def fp8_sums(ring, slot, phase, depth, HALF: gl.constexpr, KIND: gl.constexpr, SUMS: gl.constexpr):
    """Multiply FP8 codes over the slots of one unit, like `int8_sums`; sums are fp32 [rows, columns].

    FP8 tensor cores truncate terms of a long sum. So they sum two slots at most, and these sums are added in fp32.
    That needs registers for both sums, so a warpgroup multiplies 64 of its rows at a time; meanwhile the other
    warpgroup keeps the tensor cores busy.
    """
    zero = gl.zeros((_HALF, KIND.block_n), gl.float32, SUMS)
    upper = zero
    lower = zero
    for _ in range(BLOCK_K, depth, 2 * BLOCK_K):
        ring.wait_filled(slot, phase)
        after, phase_after = ring.following(slot, phase)
        ring.wait_filled(after, phase_after)
        upper += _two_slots(ring, slot, after, zero, 0, HALF, KIND.rows == _HALF)
        if KIND.rows > _HALF:
            lower += _two_slots(ring, slot, after, zero, _HALF, HALF, True)
        slot, phase = ring.following(after, phase_after)
    if (depth + BLOCK_K - 1) // BLOCK_K % 2 == 1:
        ring.wait_filled(slot, phase)
        upper += _one_slot(ring, slot, zero, 0, HALF)
        if KIND.rows > _HALF:
            lower += _one_slot(ring, slot, zero, _HALF, HALF)
        ring.release(slot)
        slot, phase = ring.following(slot, phase)
    acc = upper
    if KIND.rows > _HALF:  # no data moves between threads
        both = gl.permute(gl.join(upper, lower), (2, 0, 1))
        acc = gl.convert_layout(gl.reshape(both, (KIND.rows, KIND.block_n)), SUMS)
    return acc, slot, phase


@gluon.jit
def keep_sums(acc, unit, operands, HALF: gl.constexpr, KIND: gl.constexpr):
    """Write a warpgroup's sums of a part of a tile to sums_ptr [parts of tiles, rows of a tile, columns]."""
    SUMS: gl.constexpr = acc.type.layout
    m = HALF * KIND.rows + gl.arange(0, KIND.rows, gl.SliceLayout(1, SUMS))
    n = gl.arange(0, KIND.block_n, gl.SliceLayout(0, SUMS))
    first = (unit - operands.sizes.whole).to(gl.int64) * (2 * KIND.rows * KIND.block_n)
    # converted to 64 bits before `first` is added: otherwise the loop before this spills registers
    at = (m[:, None] * KIND.block_n + n[None, :]).to(gl.int64) + first
    gl.store(operands.sums_ptr + at, acc)
