"""Ulysses context parallelism with INT8 codes on the wire, in half the bytes of 16 bit.

Each token of a head is quantised with a scale of its own, which is sent along. So devices need not agree on scales
first. The mean of this device's keys is subtracted from them before, because a part that all tokens share would use up
the range of the codes. The mean is sent once, in the keys' own dtype, and added again. Attention then quantises the
received tensors as always. A token with a largest code of 127 gets the same codes again, so Q is rounded only once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


_SCALE = torch.bfloat16
_MAX = 127.0


def pack(x: torch.Tensor) -> torch.Tensor:
    """Quantise x [..., D] to int8 [..., D + 2]: the codes, then the bf16 scale as two bytes.

    One scale for each row of D values. A row with NaN or infinity becomes NaN when it is unpacked.
    """
    wide = x.float()
    top = wide.abs().amax(-1, keepdim=True)
    scale = (top / _MAX).to(_SCALE)  # within 2^-9: the largest code is 126.75 to 127.25, and rounds to 127
    inverse = torch.where(scale > 0, scale.float().reciprocal(), 0.0)
    codes = (wide * inverse).round().nan_to_num(0.0).clamp(-_MAX, _MAX).to(torch.int8)
    return torch.cat([codes, scale.contiguous().view(torch.int8)], -1)


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise the result of `pack` to [..., D] in dtype."""
    scale = packed[..., -2:].contiguous().view(_SCALE)
    return (packed[..., :-2].float() * scale.float()).to(dtype)


def _by_head(x: torch.Tensor, world: int) -> torch.Tensor:
    """Split heads between devices: [B, S, H, ...] to [device, B, S, H / devices, ...]."""
    return x.unflatten(2, (world, -1)).movedim(2, 0)


def _sent(parts: list[torch.Tensor], group: Any) -> tuple[list[torch.Tensor], int]:
    """Exchange tensors [device, ...] of bytes with all devices. Returns (received tensors, bytes sent)."""
    world = parts[0].shape[0]
    flat = torch.cat([x.reshape(world, -1) for x in parts], 1)
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    found = received.split([x[0].numel() for x in parts], 1)
    return [y.reshape(x.shape) for x, y in zip(parts, found, strict=True)], flat.numel() // world * (world - 1)


def run_ulysses(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """Run attention of this device's tokens to those of all devices of a group.

    Args: query [B, S_q, H, D], key and value [B, S_kv, H, D], of this device. Every device has the same shapes, and H
        is a multiple of the number of devices. attend: runs attention of all tokens in H / devices heads.
    Returns: out [B, S_q, H, D], and the bytes that this device sent.
    """
    world, dtype = dist.get_world_size(group), query.dtype
    mean = key.float().mean(1, keepdim=True).to(dtype)
    packed = [pack(query), pack(key.float() - mean.float()), pack(value)]
    parts = [_by_head(x, world) for x in packed] + [_by_head(mean.contiguous().view(torch.int8), world)]
    (q, k, v, means), sent = _sent(parts, group)
    whole_k = (unpack(k, torch.float32) + means.contiguous().view(dtype).float()).to(dtype)
    whole = [_all_tokens(x) for x in (unpack(q, dtype), whole_k, unpack(v, dtype))]
    out = attend(*whole)
    (back,), sent_back = _sent([pack(out).unflatten(1, (world, -1)).movedim(1, 0)], group)
    return unpack(back, dtype).movedim(0, 2).flatten(2, 3).contiguous(), sent + sent_back


def _all_tokens(x: torch.Tensor) -> torch.Tensor:
    """Join the tokens of all devices: [device, B, S, H, D] to [B, devices · S, H, D]."""
    return x.movedim(0, 1).flatten(1, 2)
