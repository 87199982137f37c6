"""What the reference and the launchers of the kernels share: number formats, the sampled smoothing vector, padding."""

from __future__ import annotations

import math

import torch

from .recipe import AMAX_FLOOR


LOG2_E = math.log2(math.e)
CENTER_SAMPLES = 128  # tokens that the smoothing vector of an unplanned head is averaged over
CENTER_STEPS = 2.0**22  # integer steps from 0 to the sample's largest element; 128 of them fit int32


def pv_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of P and V: the input's own 16-bit type; bf16 for fp32 inputs, whose range fp16 would lose."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def padded_head_dim(head_dim: int) -> int:
    """Channels that the kernels work on: a multiple of 8, so that rows of 16-bit numbers are aligned to 16 bytes."""
    return -(-head_dim // 8) * 8


def sample_tokens(seq: int, device) -> torch.Tensor:
    """The tokens that an unplanned head is sampled at: evenly spread, sheared so that image rows don't alias."""
    i = torch.arange(CENTER_SAMPLES, device=device)
    return (i * seq // CENTER_SAMPLES + i % max(seq // CENTER_SAMPLES, 1)) % seq


def divide(number: float, x: torch.Tensor) -> torch.Tensor:
    """number / x, rounded once as by div_rn: PyTorch computes a Python number / x as reciprocal(x)·number."""
    return torch.full_like(x, number) / x


def sampled_center(k: torch.Tensor) -> torch.Tensor:
    """Smoothing vector of an unplanned head: the mean of a sample of its keys. k [B, H, S, D] fp32 -> [B, H, 1, D].

    Any vector shared by all keys of a head leaves softmax exact, so a sample serves as well as the full mean
    and costs no pass over K. Summed as integers (units of the sample's largest element / 2^22): the same bits in
    whatever order the terms are added, so the kernel's codes are the reference's.
    """
    sample = k[:, :, sample_tokens(k.shape[2], k.device)]
    amax = sample.abs().amax((2, 3), keepdim=True).clamp_min(AMAX_FLOOR)
    total = torch.round(sample * divide(CENTER_STEPS, amax)).double().sum(2, keepdim=True).float()
    return total * (amax / (CENTER_STEPS * CENTER_SAMPLES))
