"""Noise levels told apart: what a step learnt is kept for later steps at about its own level."""

from __future__ import annotations

import ctypes
import math
from bisect import bisect_right

import torch


class NoiseBins:
    """`number` bins of the noise level u in [0, 1], uniform in asin(u). edges: fp32 [number - 1] on `device`."""

    def __init__(self, number: int, device: torch.device):
        self.number, self.device = number, device
        # as fp32: a level is in one bin however it is given
        edges = (torch.arange(1, number, dtype=torch.float64, device="cpu") * (math.pi / 2 / number)).sin().float()
        self.edges, self._on_host = edges.to(device), edges.tolist()

    def of(self, u: float | torch.Tensor) -> torch.Tensor:
        """Bin of noise level u, int64 [1] on the device, without a host sync."""
        if isinstance(u, torch.Tensor):
            level = u.detach().to(self.device, torch.float32).reshape(1)
            return torch.bucketize(level, self.edges, right=True)
        bin_ = bisect_right(self._on_host, ctypes.c_float(u).value)  # in fp32, as a tensor would be
        return torch.full((1,), bin_, dtype=torch.int64, device=self.device)

    def levels(self) -> torch.Tensor:
        """Noise level u at the middle of every bin, fp32 [number]."""
        middle = (torch.arange(self.number, device=self.device, dtype=torch.float32) + 0.5) / self.number
        return (middle * (math.pi / 2)).sin()
