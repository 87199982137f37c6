"""What a call launches and allocates, written down while a thread records it."""

import threading

import torch


# .tape: of the call that this thread is recording; .call: the op's call that it is at (ahead.py)
recording = threading.local()


class Tape:
    """What one call did, in its order.

    Attributes:
        launches: (parameters, compiled kernel, what starts it, programs, arguments, constants) each, from `launch`.
        scratch, returned: tensors from `buffer`.
        complete: whether all of it can be done again.
        found: None; a dict where launches are written down in place of being made (ahead.py).
    """

    found = None

    def __init__(self):
        self.launches, self.scratch, self.returned, self.complete = [], [], [], True


def buffer(*shape: int, dtype: torch.dtype = torch.float32, device, returned: bool = False) -> torch.Tensor:
    """torch.empty(shape), for what the launches of one call hand on to each other, or what the call returns.

    Such memory is allocated anew when a written-down call is made again; any other tensor ends the recording.
    """
    x = torch.empty(shape, dtype=dtype, device=device)
    tape = getattr(recording, "tape", None)
    if tape is not None:
        (tape.returned if returned else tape.scratch).append(x)
    return x
