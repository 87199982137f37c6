"""Centre and balance of Q and K before a rotation, for attention that rotates channels.

A Hadamard rotation spreads what is large in single channels of a token over all of them. Where all keys share a large
mean, or a channel is large in every token, it spreads that, too, and the centre and balance that the kernels choose
afterwards can't take it back. So both are taken out first, by the kernels' own rules.
"""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels.facts.numerics import sample_tokens, sampled_balance, sampled_center


WIDEST = 2.0**12  # balance of a channel, which fp16 can hold


def is_invariant(call: Any) -> bool:
    """True if nothing but a softmax over the keys reads the scores, so that a centre changes no result."""
    return not call.softcap and call.sinks is None


def balanced(query: torch.Tensor, key: torch.Tensor, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q / b and (K - c) · b, with centre c and balance b of each sequence and key head.

    Q·Kᵀ stays the same except for rounding, and for a constant in each row where there is a centre. Does not sync.

    Args:
        query, key: [B, S, H, D] and [B, S_kv, H_kv, D], any strides.
        centered: subtract the centre.
    """
    if 0 in query.shape or 0 in key.shape:
        return query, key
    q, k = (_sample(x.detach()) for x in (query, key))
    center = sampled_center(k)
    # its few bits are numbers of 16-bit types, too; a head without any range, such as of padding, would have no bound
    balance = sampled_balance(q, k, center).clamp(1 / WIDEST, WIDEST)
    center, balance = (x.transpose(1, 2).to(key.dtype) for x in (center, balance))
    key = key - center if centered else key
    return query / balance.repeat_interleave(query.shape[2] // key.shape[2], 2), key * balance


def _sample(x: torch.Tensor) -> torch.Tensor:
    """Return some tokens of x [B, S, H, D] in fp32 [B, H, samples, D]. A NaN, as in padding, is 0."""
    tokens = sample_tokens(x.shape[1], x.device)
    return x.index_select(1, tokens).transpose(1, 2).float().nan_to_num(0.0, 0.0, 0.0)
