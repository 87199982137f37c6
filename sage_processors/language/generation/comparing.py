"""Comparison of a decode step over static buffers with one over the cache alone."""

from __future__ import annotations

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
