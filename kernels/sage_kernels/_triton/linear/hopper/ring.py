"""The ring of buffers between the warp that copies and the two warpgroups that multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat import aggregate


@aggregate
class Ring:
    """Buffers of codes, and two barriers a slot: `filled` and `freed`.

    A slot holds codes of both warpgroups' rows, x[2 · slot] and x[2 · slot + 1], and of the weight's. Slots are filled
    and freed in turn; the phase of a slot's barriers is 0 in the first round, 1 in the second, 0 in the third.
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

    @gluon.jit
    def following(self, slot, phase):
        """The next slot, and the phase of its barriers: i % slots would take a dozen instructions."""
        wraps = slot == self.slots - 1
        return gl.where(wraps, 0, slot + 1), phase ^ wraps.to(gl.int32)

    @gluon.jit
    def acquire(self, slot, phase):
        """The producer waits until both warpgroups have freed a slot. In the first round nobody has to."""
        mbarrier.wait(self.freed.index(slot), phase ^ 1)

    @gluon.jit
    def wait_filled(self, slot, phase):
        """A warpgroup waits until all copies into a slot have arrived."""
        mbarrier.wait(self.filled.index(slot), phase)

    @gluon.jit
    def release(self, slot):
        """One warpgroup is done with a slot."""
        mbarrier.arrive(self.freed.index(slot), count=1)
