"""From the statistics that a rule chose to the plan that the kernels read: the formulas at the head of state.py."""

from __future__ import annotations

import torch

from ..facts.recipe import INT8_MAX, V_AMAX_FLOOR, V_CODE
from ..facts.state import PLAN_CENTER, PLAN_K_WEIGHT, PLAN_Q_WEIGHT, PLAN_V_SCALE, STAT_V_AMAX, HeadState
from .rules import Source, ranges


# A channel of V that is this much smaller than the head's largest gets room to grow to it: e4m3 has 12 binades below
# the planned amax before it loses bits, so 6 of them may be given away.
V_CHANNEL_FLOOR = 2.0**-6


def write_plan(
    state: HeadState, is_channel: torch.Tensor, source: Source, margin: float, kept: torch.Tensor | None = None
) -> None:
    """Write the plan of every known head of `source`, in place; of R heads in all, bool [R, D] are channels.

    Of the other heads, those in `kept` bool [R] (None: none) keep the plan they have; the rest run dynamic.
    """
    kept = torch.zeros_like(source.known) if kept is None else kept
    q_amax, center, k_amax = ranges(source.stats, is_channel)
    balance = (q_amax / k_amax).sqrt()
    reach = q_amax.sqrt() * k_amax.sqrt()  # what both |q / b| and |(k - c)·b| reach
    scale = margin * reach.amax(-1, keepdim=True) / INT8_MAX
    if source.gain is not None:
        scale = scale * source.gain[:, None]
    k_weight, q_weight = balance / scale, 1.0 / balance
    # a head of zeros or of extreme range has no usable balance: it stays unknown and runs dynamic
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
