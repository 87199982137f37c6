"""Centre and balance of keys, two vectors per head, for an Int8KVCache.

Keys are stored as codes of (key - centre) * balance. In exact arithmetic attention does not depend on the two vectors.
They only decide how large the rounding error of 8 bits is.

They are chosen from a layer's first tokens. If the layer's first call has fewer than FIRST_TOKENS tokens, they are
chosen again when the number of tokens reaches each of CHOSEN_AT. The tokens so far are then quantised again from 16
bit, so the result is the same as if all had come in one call. After FIRST_TOKENS nothing that was written changes.
Codes depend on their own token and the first ones alone, so pages of a common prefix can be shared.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from sage_kernels.facts.numerics import CENTER_SAMPLES, sample_tokens


OUTLIER = 2.0  # channels within this factor of the median channel's size need no balance
BALANCE_LIMIT = 2.0**12
FIRST_TOKENS = 64  # tokens after which a layer's centre and balance stay fixed
ENOUGH = 8  # fewest different tokens from which a channel's size can be told
CHOSEN_AT = (ENOUGH, 16, 32, FIRST_TOKENS)  # numbers of tokens at which they are chosen again
SAME_TOKEN = 1 / 16  # values are of the same token if their distance is less than this part of the sum of their sizes
SINK_SHARE = 1 / 4  # the centre moves this part of the way to the first token's key,
MAX_SHIFT = 2.0  # but in no channel by more than this multiple of its size


def must_choose_again(held: Any, new: int, last: int) -> Any:
    """True if `new` tokens after `held` ones reach a number at which centre and balance are chosen again.

    Args:
        held: an int, or an integer tensor [] on a device. The result is then a bool tensor [] there.
        last: the layer's last such number, beside CHOSEN_AT.
    """
    crossed = [(held < number) & (held + new >= number) for number in (*CHOSEN_AT, last)]
    return functools.reduce(operator.or_, crossed)


def choose_vectors(
    keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None = None, *, first_stays: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose centre and balance from a layer's first tokens.

    Looks at a sample of the tokens. Each sequence of a batch gets its own vectors. Does not wait for the device.

    Args:
        keys, values: [B, H_kv, S, D].
        valid: bool [S] with S <= FIRST_TOKENS, False for slots without a token. None: all are tokens.
        first_stays: True if no sliding window will hide the first token.
    Returns: centre and balance, fp32 [B, H_kv, D] each.
    """
    number = keys.shape[2]
    if number == 0:
        mean = torch.zeros_like(keys.detach().sum(2, dtype=torch.float32))
        return mean, torch.ones_like(mean)
    tokens = sample_tokens(number, keys.device) if number > CENTER_SAMPLES else slice(None)
    sample = keys.detach()[:, :, tokens].float()
    weight = different_tokens(values.detach()[:, :, tokens].float())
    if valid is not None:
        weight = weight * valid
    mean = key_centre(sample, weight, number if valid is None else valid.sum())
    if number < ENOUGH:
        return mean, torch.ones_like(mean)
    if first_stays:
        mean = moved_to_first_key(sample, weight, mean)
    return mean, channel_balance(sample, weight, mean)


def different_tokens(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 [B, S], 1 for a token that differs from the one before it and 0 for a copy of it.

    Padding, or a text of one word, repeats one token. Its keys still differ, as the rotary embedding turns them by
    position. So the values [B, H_kv, S, D] are compared. In all layers of SmolLM2 135M and Gemma 3 270M, values of
    copies agreed to 1/100, and those of neighbouring tokens in a text differed by 1/5 or more.
    """
    size = values.abs().sum((1, 3))
    change = values.diff(dim=2).abs().sum((1, 3))
    differs = change > SAME_TOKEN * (size[:, 1:] + size[:, :-1])
    return torch.cat([torch.ones_like(size[:, :1]), differs.float()], 1)


def key_centre(keys: torch.Tensor, weight: torch.Tensor, number: Any) -> torch.Tensor:
    """Return the centre of each head's keys, fp32 [B, H_kv, D]: their mean times number / (number + 1).

    With few tokens the mean says little about later ones, so it is shrunk towards 0: one token counts for a half. The
    centre is 0 in a channel that is not finite.

    Args:
        keys: fp32 [B, H_kv, S, D].
        weight: [B, S], 0 for tokens that don't count.
        number: number of all tokens, copies included.
    """
    total = _weighted_sum(keys, weight) / weight.sum(1)[:, None, None] * (number / (number + 1))
    return torch.where(total.isfinite(), total, 0.0)


def moved_to_first_key(keys: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return the centre moved towards the first token's key, or the first one after padding.

    Most attention goes to this key (an attention sink), so its rounding error weighs most, and it is often far from
    all others. The other keys tolerate some shift, up to MAX_SHIFT. Sequences of fewer than ENOUGH different tokens
    keep their mean.
    """
    number, order = weight.sum(1, keepdim=True), weight.cumsum(1)
    behind_copies = ((order == 1).sum(1, keepdim=True) > 1) & (number > 1)  # the first token repeats, so it is padding
    first = torch.where(behind_copies, order == 2, order == 1) & (weight > 0)
    way = SINK_SHARE * (_weighted_sum(keys, first.float()) - mean)
    reach = MAX_SHIFT * _sizes(keys, weight, mean)[0]
    moved = mean + way.clamp(-reach, reach)
    return torch.where((number[:, None] >= ENOUGH) & moved.isfinite(), moved, mean)


def channel_balance(keys: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return the balance fp32 [B, H_kv, D], per-channel powers of two that make channels of similar size.

    Keys minus `mean` are multiplied by it. Each token has one scale, which a single very large channel would use up.
    Queries are divided by the balance, so the scores are exact with any positive numbers.

    The size of a channel is its mean distance from `mean`. Each token has its own scale, so an outlier in one token
    alone needs no balance.

    A sequence of fewer than ENOUGH different tokens gets ones. A channel that is small in them by chance would be
    enlarged, and use up the scale of later tokens.

    Factors above 1 are for channels that stay small. The rotary embedding turns a pair of channels by the position, so
    a channel can grow up to the mean of either. It counts as at least that large, up to the median channel's size.
    """
    size, usual = _sizes(keys, weight, mean)
    half, number = mean.shape[-1] // 2, weight.sum(1)[:, None, None]
    known = size.isfinite() & (size > 0) & usual.isfinite() & (usual > 0) & (number >= ENOUGH)
    size = torch.maximum(size, torch.maximum(mean.abs(), mean.roll(half, -1).abs()).minimum(usual))
    ratio = size / usual
    ratio = torch.where(ratio > 1, (ratio / OUTLIER).clamp_min(1), (ratio * OUTLIER).clamp_max(1))
    balance = torch.exp2(-torch.round(torch.log2(ratio))).clamp(1 / BALANCE_LIMIT, BALANCE_LIMIT)
    return torch.where(known, balance, 1.0)


def _sizes(keys: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each channel's mean distance from `mean` [B, H_kv, D], and the median of them [B, H_kv, 1]."""
    size = _weighted_sum((keys - mean[:, :, None]).abs(), weight) / weight.sum(1)[:, None, None]
    return size, size.sort(-1).values[..., mean.shape[-1] // 2, None]


def _weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of x [B, H_kv, S, D] over tokens. Tokens of weight 0 may hold NaN."""
    return torch.where(weight[:, None, :, None] > 0, x * weight[:, None, :, None], 0.0).sum(2)
