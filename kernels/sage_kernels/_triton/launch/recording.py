"""What a call launches and allocates, written down while a thread records it."""

import threading

import torch


# .tape: of the call that this thread is recording; .call: the op's call that it is at (ahead.py)
recording = threading.local()


class Tape:
    """What one call did: its launches and buffers. complete: nothing that can't be done again.

    found: None; a dict where launches are written down in place of being made (ahead.py).
    """

    found = None

    def __init__(self):
        self.launches, self.scratch, self.returned, self.complete = [], [], [], True


def buffer(*shape: int, dtype: torch.dtype = torch.float32, device, returned: bool = False) -> torch.Tensor:
    """torch.empty for what launches of one call hand on to each other, or `returned` by the call."""
    x = torch.empty(shape, dtype=dtype, device=device)
    tape = getattr(recording, "tape", None)
    if tape is not None:
        (tape.returned if returned else tape.scratch).append(x)
    return x
