"""The tape on which a thread notes the launches and allocations of a call.

A file of its own because launcher.py, ahead.py and replay.py all need it and import each other one way only.
"""

import threading

import torch


# By thread. .tape: where launches are noted now, or None. .call: the op's call under way, a function (ahead.py)
recording = threading.local()


class Tape:
    """The launches and allocations of one call, in order.

    Attributes:
        launches: one tuple for each `launch`: (compat.parameters of the kernel, compiled kernel, compat.starter of it,
            programs, arguments, constants).
        scratch, returned: tensors from `buffer`.
        complete: True as long as every launch can be replayed.
        found: None. A dict in `ahead._Collector`: launches are then noted in it, and not made.
    """

    found = None

    def __init__(self):
        self.launches, self.scratch, self.returned, self.complete = [], [], [], True


def buffer(*shape: int, dtype: torch.dtype = torch.float32, device, returned: bool = False) -> torch.Tensor:
    """Return torch.empty(shape), noted on the tape: a replay allocates this tensor anew.

    Use it for each tensor that launches of one call pass on, and with returned=True for each that the call returns. A
    call that hands its kernels a tensor from elsewhere can't be replayed (except its inputs).
    """
    x = torch.empty(shape, dtype=dtype, device=device)
    tape = getattr(recording, "tape", None)
    if tape is not None:
        (tape.returned if returned else tape.scratch).append(x)
    return x
