"""Reference of skip lists: tiles that a call leaves out, and measurements for the next call."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..facts import skipping as fields
from ..facts.skipping import SkipState, pack, unpack


def ref_skip_tiles(q_int, row_scale, k_int, k_scale, skip: SkipState) -> torch.Tensor:
    """Renew a call's lists, and return the key tiles it leaves out, bool [B, H, query tiles, key tiles].

    Args:
        q_int, k_int: codes [B, H, S_q, D] and [B, H_kv, S_kv, D].
        row_scale, k_scale: [B, H, S_q, 1] and [B, H_kv, S_kv, 1]: factors from products of codes to base-2 scores.
        skip: read and written.
    """
    batch, heads, seq_q, _ = q_int.shape
    repeat, seq_kv = heads // k_int.shape[1], k_int.shape[2]
    n_tiles, m_tiles = -(-seq_kv // skip.block_k), skip.lists.shape[2]
    now, limit = int(skip.now), float(skip.limit)
    gap, call = now - int(skip.clock[fields.CLOCK_LAST]), int(skip.clock[fields.CLOCK_CALLS]) + 1
    void = gap >= skip.every
    turns, step = min(skip.every, m_tiles), now - int(skip.clock[fields.CLOCK_BEGAN])
    skipped = unpack(skip.lists, n_tiles)
    if void:
        skipped = torch.zeros_like(skipped)
    for b in range(batch):
        for h in range(heads):
            everything, alarm = void or bool(skip.alarms[1, b, h]), False
            measured = torch.zeros(m_tiles, dtype=torch.bool, device=q_int.device)
            for m in range(m_tiles):
                if not limit > 0 or not (everything or (m + step) % turns < gap):
                    continue
                measured[m] = True
                rows = slice(m * skip.block_q, (m + 1) * skip.block_q)
                scores = q_int[b, h, rows] @ k_int[b, h // repeat].T
                scores = scores * (row_scale[b, h, rows] * k_scale[b, h // repeat].T)
                shares = ref_shares(scores, skip.block_k)
                if not void:
                    alarm |= _measure(shares, skipped[b, h, m], limit, skip.totals)
                skipped[b, h, m], skip.bound[b, h, m] = ref_list(shares, limit)
            if alarm:
                skip.alarms[0, b, h] = call
                skipped[b, h] &= measured[:, None]
            skip.alarms[1, b, h] = int(alarm)
    skip.lists.copy_(pack(skipped))
    skip.clock[fields.CLOCK_GAP], skip.clock[fields.CLOCK_CALLS], skip.clock[fields.CLOCK_RUNNING] = gap, call, call
    if limit > 0:
        skip.clock[fields.CLOCK_LAST] = now
        if void:
            skip.clock[fields.CLOCK_BEGAN] = now
    else:
        skipped = torch.zeros_like(skipped)
    skip.totals[fields.TOTAL_TILES] += skipped.numel()
    skip.totals[fields.TOTAL_VISITED] += (~skipped).sum()
    return skipped


def ref_shares(scores: torch.Tensor, block_k: int) -> torch.Tensor:
    """Share of a row's probability in each key tile, fp32 [R, tiles]. scores [R, S_kv], base 2."""
    top = scores.amax(-1, keepdim=True)
    lse = top + torch.log2(torch.exp2(scores - top).sum(-1, keepdim=True))
    share = by_tile(torch.exp2(scores - lse), block_k).sum(-1)
    return torch.where(lse.isfinite(), share, fields.NO_SHARE)


def by_tile(x: torch.Tensor, block_k: int) -> torch.Tensor:
    """Split [..., S_kv] to [..., tiles, block_k], zeros behind the last key."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block_k)).unflatten(-1, (-1, block_k))


class Pooled(NamedTuple):
    """Key tiles of a head as one key each: mean codes and values [tiles, D], scales, key counts."""

    codes: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    keys: torch.Tensor


def ref_pool(k_int, k_scale, v, block_k: int, round_to: torch.dtype | None) -> Pooled:
    """Average a head's codes [S_kv, D] and values [S_kv, D] by tile of keys.

    k_scale: [S_kv, 1]. round_to: type of the mean values, those of the codes are then fp16; None: all in fp32.
    """
    keys = by_tile(torch.ones_like(k_scale[:, 0]), block_k).sum(-1)
    codes, values = (by_tile(x.float().T, block_k).sum(-1).T / keys[:, None] for x in (k_int, v))
    if round_to is not None:
        codes, values = codes.half().float(), values.to(round_to).float()
    return Pooled(codes, values, k_scale[::block_k, 0], keys)


def ref_compensate(out, lse, q_int, row_scale, pooled: Pooled, skipped, round_to: torch.dtype | None):
    """Add the pooled keys of skipped tiles to the finished rows of a head. Returns out, lse.

    Args:
        out, lse: fp32 [R, D] and [R, 1], base 2, of the visited tiles.
        q_int, row_scale: [R, D] and [R, 1] as of `ref_skip_tiles`.
        skipped: bool [R, tiles].
        round_to: type of P; None: fp32.
    """
    scores = (q_int @ pooled.codes.T) * (row_scale * pooled.scales) + torch.log2(pooled.keys)
    scores = torch.where(skipped, scores, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    new_top = torch.maximum(top, lse)
    safe = torch.where(new_top == -torch.inf, 0.0, new_top)
    p = torch.exp2(scores - torch.where(top == -torch.inf, 0.0, top))
    rescale, weight = torch.exp2(top - safe), torch.exp2(lse - safe)
    total = p.sum(-1, keepdim=True) * rescale + weight
    p = p if round_to is None else p.to(round_to).float()
    # values of tiles that are visited may hold anything
    values = torch.where(skipped.any(0)[:, None], pooled.values, 0.0)
    out = torch.where(total == 0, 0.0, ((p @ values) * rescale + out * weight) / total)
    return out, new_top + torch.log2(total)


def ref_levels(shares: torch.Tensor) -> torch.Tensor:
    """Level of each tile's largest share of any row, int64 [tiles]. shares [R, tiles].

    The share is at most 2^(-level / fields.LEVELS).
    """
    level = torch.floor(-fields.LEVELS * torch.log2(shares.amax(0) * fields.SHARE_SLACK))
    return level.clamp(0, fields.LARGEST_LEVEL).long()


def ref_list(shares: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the key tiles to skip by the rows' shares [R, tiles]: bool [tiles], and the largest loss."""
    level = ref_levels(shares)
    of_level = torch.exp2(torch.arange(fields.LARGEST_LEVEL, -1, -1, device=level.device) / -fields.LEVELS)
    number = level.bincount(minlength=fields.LARGEST_LEVEL + 1).flip(0)
    lost = (number * of_level).cumsum(0)  # from the smallest shares on
    fitting = int((lost <= limit * fields.FILL).sum())  # number of levels whose tiles fit together
    bound = lost[fitting - 1] if fitting else lost.new_zeros(())
    return level > fields.LARGEST_LEVEL - fitting, bound


def _measure(shares, skipped, limit: float, totals) -> bool:
    """Count the loss of rows with these shares by their list; return True if it is above the limit.

    shares [R, tiles], skipped bool [tiles]. The loss is that of the worst row.
    """
    lost = torch.where(skipped, shares, 0.0).sum(-1).amax()
    totals[fields.TOTAL_MEASURED] += 1
    totals[fields.TOTAL_BEYOND] += int(lost > limit)
    totals[fields.TOTAL_LOST] += int(lost / fields.LOSS_UNIT)
    totals[fields.TOTAL_LARGEST] = max(int(totals[fields.TOTAL_LARGEST]), int(lost.view(torch.int32)))
    return bool(lost > limit)
