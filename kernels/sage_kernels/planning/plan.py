"""Write the plan for the kernels, from the statistics of a rule's choice. Formulas: head of state.py."""

from __future__ import annotations

import torch

from ..facts.recipe import INT8_MAX, V_AMAX_FLOOR, V_CODE
from ..facts.state import PLAN_CENTER, PLAN_K_WEIGHT, PLAN_Q_WEIGHT, PLAN_V_SCALE, STAT_V_AMAX, HeadState
from .rules import Source, ranges


# A channel of V is planned as if its amax were at least this share of the head's largest, which leaves it room to
# grow. e4m3 has 12 binades below the planned amax before it loses bits, and this gives away 6 of them.
V_CHANNEL_FLOOR = 2.0**-6


def write_plan(
    state: HeadState, is_channel: torch.Tensor, source: Source, margin: float, kept: torch.Tensor | None = None
) -> None:
    """Write the plan of every known head of `source`, in place.

    Of the other heads, those in `kept` bool [R] (None: none) keep the plan that they have; the rest run without one.
    is_channel: bool [R, D], the channels in use of all R heads.
    """
    kept = torch.zeros_like(source.known) if kept is None else kept
    q_amax, center, k_amax = ranges(source.stats, is_channel)
    balance = (q_amax / k_amax).sqrt()
    reach = q_amax.sqrt() * k_amax.sqrt()  # the largest |q / b|, and the largest |(k - c)·b|
    scale = margin * reach.amax(-1, keepdim=True) / INT8_MAX
    if source.gain is not None:
        scale = scale * source.gain[:, None]
    k_weight, q_weight = balance / scale, 1.0 / balance
    # a head of zeros or of extreme range has no usable balance: it stays unknown and runs without a plan
    good = (
        source.known
        & torch.isfinite(k_weight).all(-1)
        & torch.isfinite(q_weight).all(-1)
        & torch.isfinite(center).all(-1)
    )
    good &= (scale[:, 0] > 0) & torch.isfinite(scale[:, 0])
    v_amax = torch.where(is_channel, source.stats[:, STAT_V_AMAX], 0.0)
    v_largest = v_amax.amax(-1, keepdim=True)
    v_scale = v_amax.maximum(v_largest * V_CHANNEL_FLOOR).clamp_min(V_AMAX_FLOOR) / V_CODE
    v_scale = torch.where(v_largest > 0, v_scale, 0.0)  # not recorded, or all zeros: no plan for V
    plan, plan_scale = state.plan, state.plan_scale
    fields = (PLAN_CENTER, PLAN_K_WEIGHT, PLAN_Q_WEIGHT, PLAN_V_SCALE)
    for field, value in zip(fields, (center, k_weight, q_weight, v_scale), strict=True):
        planned = torch.where(good[:, None] & is_channel, value, 0.0)
        plan[:, field] = torch.where(kept[:, None], plan[:, field], planned)
    plan_scale.copy_(torch.where(kept, plan_scale, torch.where(good, scale[:, 0], 0.0)))
