"""While a CUDA graph is captured nothing is computed yet: what is made now must not be kept for other calls."""

from __future__ import annotations

import torch


def is_captured(device: torch.device | None = None) -> bool:
    """Whether what is launched there now is recorded, to be launched again at every replay. None: on the current GPU.

    A tensor that is made meanwhile has no numbers before the first replay, and what it is made from is read again at
    every one: an operand that nobody keeps would be somebody else's memory by then. So a weight that is stored in
    another order, a bias that is laid out anew and the like are made by eager calls alone.
    """
    on_gpu = torch.cuda.is_initialized() if device is None else device.type == "cuda"
    return on_gpu and torch.cuda.is_current_stream_capturing()
