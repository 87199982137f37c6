"""What the kernels counted of a call site, as the numbers that a report shows."""

from __future__ import annotations

import torch

from ..facts.state import (
    COUNT_BELOW,
    COUNT_CALLS,
    COUNT_CLIPPED,
    COUNT_DYNAMIC,
    COUNT_KEYS,
    COUNT_MISFIT,
    COUNT_OUTSIDE,
    COUNT_REDONE,
    COUNT_TRIED,
)


def fractions(counts: torch.Tensor) -> dict:
    """A site's row of `ScaleState.summary`, of the counts [H_kv, COUNT_KEY_MAX] of its heads, on the CPU."""
    part = counts.double()
    elements = part[:, COUNT_KEYS].sum().clamp_min(1)
    return {
        "calls": int(part[:, COUNT_CALLS].max()),
        # of the heads that were called: under context parallelism others are another device's
        "dynamic_calls": float(part[:, COUNT_DYNAMIC].sum() / (part[:, COUNT_CALLS] > 0).sum().clamp_min(1)),
        "outside": float(part[:, COUNT_OUTSIDE].sum() / elements),
        "below": float(part[:, COUNT_BELOW].sum() / elements),
        "misfit": float(part[:, COUNT_MISFIT].sum() / elements),
        "clipped": float(part[:, COUNT_CLIPPED].sum() / elements),
        "lagged": int(part[:, COUNT_TRIED].sum()),
        "redone": float(part[:, COUNT_REDONE].sum() / part[:, COUNT_TRIED].sum().clamp_min(1)),
    }
