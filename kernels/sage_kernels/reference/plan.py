"""Reference of plans: does a call's plan fit, which scales it gives, and the statistics of the call."""

from __future__ import annotations

import torch

from ..facts import state as fields
from ..facts.numerics import LARGEST_QUERY, fit_tokens, padded_head_dim
from ..facts.recipe import AMAX_FLOOR, FIT_LIMIT, FIT_SAMPLES, INT8_MAX, SHRINK_LIMIT, STEADY_FIT_LIMIT
from ..facts.state import HeadState, shape_key


def known_heads(state: HeadState, batch: int, seq_q: int, seq_kv: int, kv_heads: int, rotation: str) -> torch.Tensor:
    """Return the heads, bool [H_kv], that have a plan for this shape."""
    rows = slice(int(state.row), int(state.row) + kv_heads)
    key, counts = shape_key(batch, seq_q, seq_kv, rotation), state.counts[rows]
    fits = (counts[:, fields.COUNT_PLAN_KEY_A] == key) | (counts[:, fields.COUNT_PLAN_KEY_B] == key)
    return fits & (state.plan_scale[rows] > 0)


def plan_fits(qf, kf, counts, state: HeadState) -> torch.Tensor:
    """Return the heads, bool [B, H_kv], that the plan's centre and balance serve well, by a sample.

    If Q and K have codes of range A_q, A_k and channel ranges x_d, y_d, the scores' squared error is about
    A_k²·Σx² + A_q²·Σy². The best centre and balance leave 2·max(xy)·Σxy of that, y from the middle of K's range.
    A NaN in the sample of K says nothing: it makes the head's output NaN anyway. In Q it counts as LARGEST_QUERY.
    """
    head_dim, kv_heads = kf.shape[3], kf.shape[1]
    rows = slice(int(state.row), int(state.row) + kv_heads)
    plan = state.plan[None, rows, :, :head_dim]
    center, k_weight = plan[:, :, fields.PLAN_CENTER], plan[:, :, fields.PLAN_K_WEIGHT]
    q_weight = plan[:, :, fields.PLAN_Q_WEIGHT]
    extent = torch.tensor([kf.shape[2]], dtype=torch.int64, device=kf.device)
    counted = torch.ones_like(kf[:1, :1, :, 0], dtype=torch.bool) if counts is None else counts
    counted = counted.expand(kf.shape[0], kv_heads, -1)
    if counts is not None:
        extent = (counted * torch.arange(1, kf.shape[2] + 1, device=kf.device)).amax(2, keepdim=True)
    tokens = fit_tokens(extent).expand(kf.shape[0], kv_heads, -1)
    k = kf.gather(2, tokens[..., None].expand(-1, -1, -1, head_dim))
    counted = counted.gather(2, tokens)[..., None]
    heads = torch.arange(FIT_SAMPLES, device=qf.device) * (qf.shape[1] // kv_heads) // FIT_SAMPLES
    length = torch.tensor([qf.shape[2]], dtype=torch.int64, device=qf.device)
    q = qf.unflatten(1, (kv_heads, -1))[:, :, heads, fit_tokens(length)]
    q = q.abs().nan_to_num(LARGEST_QUERY).clamp_max(LARGEST_QUERY) * q_weight[:, :, None]
    q = q / q.sum(-1, keepdim=True).clamp_min(AMAX_FLOOR)  # each row of Q has a scale of its own
    q_size = (q * q).sum(2)
    high, low = (k.masked_fill(~counted, -torch.inf).amax(2), k.masked_fill(~counted, torch.inf).amin(2))
    off = torch.where(high >= low, (high * 0.5 + low * 0.5 - center) * k_weight, 0.0)
    k = torch.where(counted, (k - center[:, :, None]) * k_weight[:, :, None], 0.0)
    k_size = k.square().sum(2)
    best = (k_size + off * (off * counted.sum(2) - k.sum(2) * 2)).clamp_min(0.0)  # sum of squares about the middle
    best = (best * q_size).sqrt()
    k_top, q_top, best_top = (x.amax(-1, keepdim=True) for x in (k_size, q_size, best))
    steady = state.counts[rows, fields.COUNT_STEADY, None] != 0
    twice = torch.where(steady, 2 * STEADY_FIT_LIMIT, 2 * FIT_LIMIT)
    excess = q_size * k_top + k_size * q_top - best * (best_top * twice)
    return ~(excess.sum(-1) > 0)


def planned_vectors(state: HeadState, served, center, k_weight, q_weight):
    """Return scale, centre and weights of a call: planned where `served` bool [B, H_kv], else as given.

    Each [B, H_kv, 1, D or 1]. The scale is 0 for heads that are not served.
    """
    rows = slice(int(state.row), int(state.row) + served.shape[1])
    on = served[..., None, None]
    plan = state.plan[None, rows, :, None, : center.shape[3]]
    given = {fields.PLAN_CENTER: center, fields.PLAN_K_WEIGHT: k_weight, fields.PLAN_Q_WEIGHT: q_weight}
    scale = torch.where(on, state.plan_scale[None, rows, None, None], 0.0)
    return scale, *(torch.where(on, plan[:, :, field], own) for field, own in given.items())


def record_values(state: HeadState, vf, counts, clipped) -> None:
    """Add the statistics of V [B, H, S, D] to those of this step, in place."""
    rows = slice(int(state.row), int(state.row) + vf.shape[1])
    stats = state.stats[rows, fields.STAT_V_AMAX, : vf.shape[3]]
    size = torch.where(torch.isfinite(vf), vf.abs(), 0.0)
    if counts is not None:
        size = torch.where(counts[..., None], size, 0.0)
    stats.copy_(torch.maximum(stats, size.amax((0, 2))))
    state.counts[rows, fields.COUNT_CLIPPED] += clipped.sum((0, 2, 3)).int()


def record_step(state: HeadState, qf, kf, x_k, planned, misfits, kept, rotation: str, block_k: int) -> None:
    """Add a call's statistics to those of this step, in place: the next plan is made of them.

    misfits: heads bool [B, H_kv] that had a plan which did not fit.
    """
    batch, _, seq_q, head_dim = qf.shape
    kv_heads, seq_kv = kf.shape[1], kf.shape[2]
    rows = slice(int(state.row), int(state.row) + kv_heads)
    stats, counts = state.stats[rows, :, :head_dim], state.counts[rows]
    q_amax = qf.unflatten(1, (kv_heads, -1)).abs().amax((0, 2, 3))
    kept = torch.ones_like(kf[..., 0], dtype=torch.bool) if kept is None else kept.expand(batch, kv_heads, -1)
    stats[:, fields.STAT_Q_AMAX] = torch.maximum(stats[:, fields.STAT_Q_AMAX], q_amax)
    stats[:, fields.STAT_K_MAX] = torch.maximum(
        stats[:, fields.STAT_K_MAX], kf.masked_fill(~kept[..., None], -torch.inf).amax((0, 2))
    )
    stats[:, fields.STAT_K_MIN] = torch.minimum(
        stats[:, fields.STAT_K_MIN], kf.masked_fill(~kept[..., None], torch.inf).amin((0, 2))
    )
    counts[:, fields.COUNT_CALLS] += 1
    counts[:, fields.COUNT_DYNAMIC] += (planned[0, :, 0, 0] == 0).int()
    counts[:, fields.COUNT_OUTSIDE] += ((x_k.abs() > INT8_MAX) & (planned > 0)).sum((0, 2, 3)).int()
    keys = torch.nn.functional.pad(kept, (0, -seq_kv % block_k)).unflatten(2, (-1, block_k)).sum(3)  # of each tile
    reach = torch.nn.functional.pad(x_k.abs().amax(3), (0, -seq_kv % block_k)).unflatten(2, (-1, block_k)).amax(3)
    below = (planned[..., 0] > 0) & (reach < SHRINK_LIMIT * INT8_MAX)
    for field, number in (
        (fields.COUNT_KEYS, keys.sum((0, 2))),
        (fields.COUNT_BELOW, (keys * below).sum((0, 2))),
        (fields.COUNT_MISFIT, (keys.sum(2) * misfits).sum(0)),
    ):
        counts[:, field] += number.int() * padded_head_dim(head_dim)
    key = shape_key(batch, seq_q, seq_kv, rotation)
    counts[:, fields.COUNT_KEY_MAX].clamp_(min=key)
    counts[:, fields.COUNT_KEY_MIN].clamp_(max=key)
