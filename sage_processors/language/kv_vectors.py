"""The two vectors of a head that an Int8KVCache stores its keys with: a centre and a balance of channels.

Attention is exact with any vectors: the choice only decides how much 8 bits round away. They are chosen by a layer's
first tokens. Where its first call has fewer than FIRST_TOKENS, they are chosen anew when there are CHOSEN_AT, and the tokens
held are stored again, from 16 bit: as if all had come together. From then on nothing that was written
changes, and codes depend on no token but their own and the first ones: pages of a shared prefix may be shared.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from sage_kernels.facts.numerics import CENTER_SAMPLES, sample_tokens


OUTLIER = 2.0  # channels up to so many times as large or small as the median one share a scale with it as they are
BALANCE_LIMIT = 2.0**12
FIRST_TOKENS = 64  # tokens after which the vectors of a layer stay as they are
ENOUGH = 8  # different tokens that say how large a channel is
CHOSEN_AT = (ENOUGH, 16, 32, FIRST_TOKENS)
SAME_TOKEN = 1 / 16  # values whose distance is less, relative to the sum of their sizes, are of the same token
SINK_SHARE = 1 / 4  # part of the way to the first token's key that a centre is drawn,
MAX_SHIFT = 2.0  # but in no channel by more than so many times its size


def must_choose_again(held: Any, new: int, window: int) -> Any:
    """Whether the vectors are to be chosen when `new` tokens follow `held`, of which the layer waits for `window`.

    held: a number, or an integer tensor [] on a device; then the answer is a bool tensor [] there.
    """
    crossed = [(held < number) & (held + new >= number) for number in (*CHOSEN_AT, window)]
    return functools.reduce(operator.or_, crossed)


def choose_vectors(
    keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None = None, *, first_stays: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centre and balance, fp32 [B, H_kv, D] each, by a layer's first tokens: keys and values [B, H_kv, S, D].

    A sample of the tokens is looked at. Each sequence of a batch decides by itself, and nothing waits for the device.

    Args:
        valid: bool [S], S <= FIRST_TOKENS: which of the tokens there are; None: all.
        first_stays: no sliding window leaves the first token behind.
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
    """fp32 [B, S]: 1 for a token that differs from the one before, 0 for another copy of it. values: [B, H_kv, S, D].

    Padding, and a text of one word, are one token over and over. Their keys differ nevertheless: rotary embedding
    turns each by its position. Values are not turned. Those of copies are the same to a hundredth in all layers of the
    models tried (SmolLM2 135M, Gemma 3 270M), those of a text's neighbours differ by a fifth and more.
    """
    size = values.abs().sum((1, 3))
    change = values.diff(dim=2).abs().sum((1, 3))
    differs = change > SAME_TOKEN * (size[:, 1:] + size[:, :-1])
    return torch.cat([torch.ones_like(size[:, :1]), differs.float()], 1)


def key_centre(keys: torch.Tensor, weight: torch.Tensor, number: Any) -> torch.Tensor:
    """Vector that is subtracted from all keys of a head, fp32 [B, H_kv, D]: their mean, drawn to zero.

    One token says little about those to come, so it counts for a half; a channel that is not finite is left alone.
    keys: fp32 [B, H_kv, S, D]. weight: [B, S], 0 for tokens that don't count. number: of all tokens, copies too.
    """
    total = _weighted_sum(keys, weight) / weight.sum(1)[:, None, None] * (number / (number + 1))
    return torch.where(total.isfinite(), total, 0.0)


def moved_to_first_key(keys: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The centre moved towards the first key, or the first behind padding, which most attention goes to.

    That key is often far from all others, and what is rounded away of it weighs most. The others have room for some
    shift: MAX_SHIFT bounds it. Sequences of fewer than ENOUGH different tokens keep their mean.
    """
    number, order = weight.sum(1, keepdim=True), weight.cumsum(1)
    behind_copies = ((order == 1).sum(1, keepdim=True) > 1) & (number > 1)  # the first token comes again: padding
    first = torch.where(behind_copies, order == 2, order == 1) & (weight > 0)
    way = SINK_SHARE * (_weighted_sum(keys, first.float()) - mean)
    reach = MAX_SHIFT * _sizes(keys, weight, mean)[0]
    moved = mean + way.clamp(-reach, reach)
    return torch.where((number[:, None] >= ENOUGH) & moved.isfinite(), moved, mean)


def channel_balance(keys: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Factors of a head's keys minus `mean`, fp32 [B, H_kv, D], powers of two, with which no channel stands out.

    A token has one scale, and a channel far larger than the others takes it for itself. Queries are divided by the
    same, so any positive number leaves the scores exact. A channel's size is its mean distance from `mean`: the scale
    is each token's own, so what a single token has does not matter.

    Fewer than ENOUGH different tokens say nothing of a channel: one that is small in them by chance would be enlarged,
    and take the scale of all tokens to come. Sequences with fewer get ones.

    Numbers above 1 are for channels that stay small. One that rotary embedding turns grows with the position, as far
    as the mean of its pair: so it counts as large as the means of both, whatever it was in these tokens.
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
    """Mean distance from `mean` of each channel [B, H_kv, D], and that of the median channel [B, H_kv, 1]."""
    size = _weighted_sum((keys - mean[:, :, None]).abs(), weight) / weight.sum(1)[:, None, None]
    return size, size.sort(-1).values[..., mean.shape[-1] // 2, None]


def _weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens of x [B, H_kv, S, D]: [B, H_kv, D]. A token that does not count may hold anything."""
    return torch.where(weight[:, None, :, None] > 0, x * weight[:, None, :, None], 0.0).sum(2)
