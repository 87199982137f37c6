"""Limits the GPU memory of 8-bit weights beside the 16-bit ones: a model that fits still fits."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes that are free on a GPU, and by how much this process once had more than now.

    None for other devices: nobody counts there.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    return free + cached, torch.cuda.max_memory_allocated(device) - allocated


class Room:
    """The memory that 8-bit weights of one swap leave free on each GPU.

    That is half of what was free before the first one, for activations and whatever else runs, and at least as much
    as the process has needed so far. Graphs come later: they take at most half of what is left then. The GPU is asked
    again once a part of the rest was taken, not for each of hundreds of layers.
    """

    PART = 16

    def __init__(self) -> None:
        self._reserves: dict[torch.device, int] = {}
        self._unasked: dict[torch.device, int] = {}  # bytes that may be taken before the GPU is asked again

    def has(self, size: int, device: torch.device) -> bool:
        """Return True if so many bytes may be taken on a device."""
        left = self._unasked.get(device, 0) - size
        if left < 0:
            found = free_bytes(device)
            if found is None:
                return True
            free, needed = found
            spare = free - self._reserves.setdefault(device, max(free // 2, needed))
            if spare < size:
                return False
            left = (spare - size) // self.PART
        self._unasked[device] = left
        return True
