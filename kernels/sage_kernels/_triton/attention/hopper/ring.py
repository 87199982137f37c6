"""The ring of buffers between producer warp and consumer warpgroups, and its order of tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat import aggregate
from ..operands import tile_at


@aggregate
class Ring:
    """Buffers of key tiles, value tiles and key scales, with two barriers a slot: `filled` and `freed`.

    A slot holds a key tile and the value tile BEFORE it, because these are multiplied at the same time. Slots are
    filled and freed in turn. The phase of a slot's barriers is 0 in the first round, 1 in the second, 0 in the third.
    """

    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    k_scales: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor
    buffers: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k_tiles, v_tiles, k_scales, filled, freed, buffers):
        self.k_tiles = k_tiles
        self.v_tiles = v_tiles
        self.k_scales = k_scales
        self.filled = filled
        self.freed = freed
        self.buffers = gl.constexpr(buffers)

    @gluon.jit
    def following(self, slot, phase):
        """Return the next slot and its barriers' phase; i % buffers would take a dozen instructions."""
        wraps = slot == self.buffers - 1
        return gl.where(wraps, 0, slot + 1), phase ^ wraps.to(gl.int32)

    @gluon.jit
    def acquire(self, slot, phase):
        """Producer: wait until all warpgroups have freed a slot. In the first round nobody has to."""
        mbarrier.wait(self.freed.index(slot), phase ^ 1)

    @gluon.jit
    def wait_filled(self, slot, phase):
        """Consumer: wait until all copies into a slot have arrived."""
        mbarrier.wait(self.filled.index(slot), phase)

    @gluon.jit
    def release_before(self, slot, pred=True):
        """Consumer: free the slot before this one. pred: False if there was none."""
        mbarrier.arrive(self.freed.index(gl.where(slot == 0, self.buffers, slot) - 1), count=1, pred=pred)


@gluon.jit
def seen_tile(i, seen, MASKING: gl.constexpr):
    """Return the i-th key tile to visit; those that all rows see completely come first."""
    if MASKING.mask == "tiles":  # programs may share a list, so `i` counts from the beginning of the piece
        tile = tile_at(
            seen.first + i, seen.tiles_ptr, seen.n_tiles, 0, 0, seen.first_full, MASKING.mask, MASKING.has_left
        )  # fmt: skip
    else:
        tile = tile_at(
            i, seen.tiles_ptr, seen.n_tiles, seen.first, seen.first_full, seen.full, MASKING.mask, MASKING.has_left
        )  # fmt: skip
    return tile
