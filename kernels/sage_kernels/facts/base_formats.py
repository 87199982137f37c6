"""Number formats of Q and K in the cheap blocks of mixed attention, rounded where the kernels round.

A format is codes, numbers that a matrix unit multiplies exactly, and one fp32 scale a token: x ≈ codes · scale. In FP4
the codes include the scales of their groups: at most 6 significant bits, which fit fp16 and bf16.
"""

from __future__ import annotations

import torch

from .numerics import divide, round_to_e4m3
from .recipe import AMAX_FLOOR, E2M1_MAX, E4M3_MAX, FP4_GROUPS, INT4_MAX, INT8_MAX, MXFP4_LOWEST


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to 0, ±0.5, ±1, ±1.5, ±2, ±3, ±4 or ±6: ties to even mantissas, saturating."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    size = x.abs()
    half = torch.full_like(size, 0.5)
    step = torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, half))
    return torch.round(x / step) * step


def base_codes(x: torch.Tensor, base: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes fp32 [..., D] and scale [..., 1] of x fp32 [..., D], in one of recipe.BASES."""
    amax = x.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR)
    if base in ("int8", "int4"):
        most = INT8_MAX if base == "int8" else INT4_MAX
        return torch.round(x * divide(most, amax)), amax / most
    group = FP4_GROUPS[base]
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    largest = padded.abs().amax(-1, keepdim=True)
    if base == "nvfp4":
        scale = amax / (E2M1_MAX * E4M3_MAX)
        groups = round_to_e4m3(largest * divide(E4M3_MAX, amax)[..., None])
    else:
        scale = _power_above(amax / E2M1_MAX)
        groups = (_power_above((largest / E2M1_MAX).clamp_min(AMAX_FLOOR)) / scale[..., None]).clamp_min(MXFP4_LOWEST)
    step = groups * scale[..., None]
    inverse = torch.where(step > 0, divide(1.0, torch.where(step > 0, step, 1.0)), 0.0)
    codes = (round_to_e2m1(padded * inverse) * groups).flatten(-2)[..., : x.shape[-1]]
    return codes, scale


def _power_above(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= x, for x > 0."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
