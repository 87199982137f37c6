"""Comparison of a replayed decode step with an eager one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...patching.nested import tensors_of


# Relative L2 distance of results up to which two ways to run a step count as the same. Both do the same arithmetic,
# with sums in another order; a wrong mask or position is far beyond.
MOST_APART = {torch.float32: 1e-3, torch.float64: 1e-3}
MOST_APART_16 = 0.05


def agree(wanted: Any, found: Any) -> bool:
    """True if nested results agree but for rounding. Waits for the device."""
    pairs = list(zip(tensors_of(wanted), tensors_of(found), strict=True))
    return all(x.shape == y.shape for x, y in pairs) and all(bool(_are_near(x, y)) for x, y in pairs)


def _are_near(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return (x == y).all()
    most = MOST_APART.get(x.dtype, MOST_APART_16)
    x, y = x.float(), y.float()
    both = (x.isfinite() == y.isfinite()).all()
    x, y = (torch.where(z.isfinite(), z, 0.0) for z in (x, y))
    return both & ((x - y).norm() <= most * x.norm())


def bits_differ(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return, as bool [] on the device, if any pair of tensors of one shape and dtype has different bits."""
    return torch.stack([(_bits(x) != _bits(y)).any() for x, y in pairs]).any()


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return (x if x.dim() else x[None]).view(torch.uint8)


class Verdicts:
    """Comparisons under way. Each is read when the GPU has come that far."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, Any, Callable[[], None]]] = []

    def add(self, differs: torch.Tensor, drop: Callable[[], None]) -> None:
        """Note a comparison. differs: bool [] on the device. drop(): called if it says so."""
        event = None
        if differs.is_cuda:
            differs = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(differs, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((differs, event, drop))

    def settle(self, *, wait: bool = False) -> None:
        """Read the comparisons that are done. wait: for all of them."""
        while self._waiting:
            differs, event, drop = self._waiting[0]
            if event is not None and wait:
                event.synchronize()
            elif event is not None and not event.query():
                return
            del self._waiting[0]
            if bool(differs):
                drop()
