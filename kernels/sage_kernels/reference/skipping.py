"""Reference of skip lists: tiles that a call leaves out, and measurements for the next call."""

from __future__ import annotations

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
    p = torch.nn.functional.pad(torch.exp2(scores - lse), (0, -scores.shape[-1] % block_k))
    return torch.where(lse.isfinite(), p.unflatten(-1, (-1, block_k)).sum(-1), fields.NO_SHARE)


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
