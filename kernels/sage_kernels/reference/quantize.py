"""Reference of rotation and 8-bit codes of Q and K, rounded where the kernels round."""

from __future__ import annotations

import torch

from ..facts.numerics import (
    WIDEST_BALANCE,
    divide,
    padded_head_dim,
    rotation_block,
    round_to_e4m3,
    sampled_balance,
    sampled_center,
)
from ..facts.recipe import AMAX_FLOOR, E4M3_OF_INT8, INT8_MAX, SHRINK_LIMIT


def ref_pre_balance(q, k, counts, centered: bool, dtype: torch.dtype | None = None):
    """Return Q / b and (K - c) · b [B, S, H, D]: K centred, and its channels balanced against Q's.

    A rotation would spread what that takes away. c and b are sampled in each head of K; results are rounded to `dtype`
    (q's if None). counts: as in `sample_keys`. centered: False leaves c at 0, where more than a softmax over the keys
    reads the scores.
    """
    qf, kf = (x.transpose(1, 2).float() for x in (q, k))
    center = sampled_center(kf, counts)
    balance = sampled_balance(qf, kf, center, counts).clamp(1 / WIDEST_BALANCE, WIDEST_BALANCE)
    q_factor = divide(1.0, balance).repeat_interleave(q.shape[2] // k.shape[2], 1)
    kf = (kf - center if centered else kf) * balance
    return tuple(x.transpose(1, 2).to(dtype or q.dtype) for x in (qf * q_factor, kf))


def ref_rotate(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply x [B, S, H, D] by the block-diagonal Hadamard matrix: [B, S, H, padded_head_dim(D)].

    Blocks of n = rotation_block(D) channels with entries (-1)^popcount(i & j) / sqrt(n): symmetric and orthogonal.
    Summed and scaled in fp32, rounded once, to `dtype` (x's if None).
    """
    block, channels = rotation_block(x.shape[3]), padded_head_dim(x.shape[3])
    y = torch.nn.functional.pad(x.detach().float(), (0, channels - x.shape[3])).unflatten(3, (-1, block))
    width = 1
    while width < block:  # a butterfly for each bit of the channel's number
        low, high = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        width *= 2
    return (y * block**-0.5).flatten(3).to(dtype or x.dtype)


def ref_quantize(x: torch.Tensor, group: int | None, planned: torch.Tensor | None = None, qk: str = "int8"):
    """Quantise x [B, H, S, D] (fp32) symmetrically, with one scale per `group` tokens (None: per head).

    Args:
        planned: [B or 1, H, 1, 1], a dequantisation scale that x was divided by already; 0 for a head without a plan.
            A group of a planned head keeps that scale while its largest code is between SHRINK_LIMIT · 127 and 127.
            Any other group takes its own: nothing is clipped, and nothing loses its resolution.
        qk: "int8", or "fp8_e4m3": codes are numbers of e4m3, of which the largest is 128.
    Returns: codes [B, H, S, D] fp32, scale [B, H, S, 1] fp32.
    """
    batch, heads, seq, _ = x.shape
    amax = x.abs().amax(-1)
    if group is None:
        amax = amax.amax(-1, keepdim=True).expand(-1, -1, seq)
    elif group > 1:
        padded = torch.nn.functional.pad(amax, (0, -seq % group)).unflatten(-1, (-1, group))
        amax = padded.amax(-1).repeat_interleave(group, -1)[..., :seq]
    amax = amax.clamp_min(AMAX_FLOOR)[..., None]
    scale, inverse = amax / INT8_MAX, divide(INT8_MAX, amax)
    if planned is not None:
        as_planned = (planned > 0) & (amax <= INT8_MAX) & (amax >= SHRINK_LIMIT * INT8_MAX)
        scale = torch.where(planned > 0, planned * torch.where(as_planned, 1.0, scale), scale)
        inverse = torch.where(as_planned, 1.0, inverse)
    if qk == "fp8_e4m3":
        return round_to_e4m3(x * inverse * E4M3_OF_INT8), scale * (1 / E4M3_OF_INT8)
    return torch.round(x * inverse), scale
