"""Ring buffers in shared memory between the producer warp and the consumer warpgroups (Hopper).

A ring has slots, filled and freed in turn. Two barriers a slot, `filled` and `freed`, say who may use it. The phase of
a slot's barriers is 0 in the first round over the ring, 1 in the second, 0 in the third, and so on.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import aggregate


# The methods of both rings. They are assigned in each class: Triton 3.9 refuses a base class that is no aggregate.


@gluon.jit
def following(self, slot, phase):
    """Return the next slot and the phase of its barriers; i % slots would take a dozen instructions."""
    wraps = slot == self.slots - 1
    return gl.where(wraps, 0, slot + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def acquire(self, slot, phase):
    """Wait, in the producer, until all warpgroups have freed a slot. Returns at once in the first round."""
    mbarrier.wait(self.freed.index(slot), phase ^ 1)


@gluon.jit
def wait_filled(self, slot, phase):
    """Wait, in a warpgroup, until all copies into a slot have arrived."""
    mbarrier.wait(self.filled.index(slot), phase)


@aggregate
class KeyValueRing:
    """The ring of the attention kernel: key tiles, value tiles, and scales of keys.

    A slot holds a key tile and the value tile BEFORE it, because the two are multiplied at the same time.

    Attributes:
        filled, freed: the barriers of each slot.
        slots: how many there are.
    """

    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    k_scales: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k_tiles, v_tiles, k_scales, filled, freed, slots):
        self.k_tiles = k_tiles
        self.v_tiles = v_tiles
        self.k_scales = k_scales
        self.filled = filled
        self.freed = freed
        self.slots = gl.constexpr(slots)

    following = following
    acquire = acquire
    wait_filled = wait_filled

    @gluon.jit
    def release_before(self, slot, pred=True):
        """Mark the slot before this one as no longer needed by the calling warpgroup. pred: do so at all."""
        mbarrier.arrive(self.freed.index(gl.where(slot == 0, self.slots, slot) - 1), count=1, pred=pred)


@aggregate
class CodeRing:
    """The ring of the 8-bit matmul: codes of x and of the weight w.

    Slot s holds the codes of both warpgroups' rows, x[2 · s] and x[2 · s + 1], and those of the weight, w[s].
    """

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    freed: gl.shared_memory_descriptor
    slots: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, x, w, filled, freed, slots):
        self.x = x
        self.w = w
        self.filled = filled
        self.freed = freed
        self.slots = gl.constexpr(slots)

    following = following
    acquire = acquire
    wait_filled = wait_filled

    @gluon.jit
    def release(self, slot):
        """Mark a slot as no longer needed by the calling warpgroup."""
        mbarrier.arrive(self.freed.index(slot), count=1)
