"""How many rows of scores the references hold at a time."""

from __future__ import annotations

import torch


# fp32 scores: on a CPU they stay in its cache through every pass, a GPU gets few launches
_LIMITS = {"cpu": 1 << 19, "cuda": 1 << 25}


def rows_at_a_time(device: torch.device, keys: int) -> int:
    """Of scores with so many columns; at least 1."""
    return max(1, _LIMITS.get(device.type, _LIMITS["cuda"]) // max(1, keys))
