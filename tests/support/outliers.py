"""Outliers that no balance of channels takes away."""

from __future__ import annotations

import torch


def varying_outliers(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x [B, S, H, D] with two channels of every token `factor` times larger: others from token to token."""
    tokens, channels = x.shape[1], x.shape[3]
    factors = torch.ones(tokens, 1, channels)
    for i in range(2):
        factors[torch.arange(tokens), 0, (torch.arange(tokens) * 7 + i * 3) % channels] = factor
    return x * factors
