"""The op that closes a denoising step and plans the next, on a GPU in one launch."""

from __future__ import annotations

import torch

from .state import HeadState


_library = torch.library.Library("sage_kernels", "FRAGMENT")
_library.define(
    "plan_step(Tensor(a!) plan, Tensor(b!) plan_scale, Tensor(c!) stats, Tensor(d!) counts, Tensor row, "
    "Tensor row_max, Tensor row_max_next, Tensor(e!) table, Tensor(f!) table_run, Tensor run, Tensor(g!) totals, "
    "Tensor is_channel, Tensor finished, Tensor following, float margin, float growth, float v_floor) -> ()"
)
_OF_STATE, _TENSORS = len(HeadState._fields), 14  # arguments: of the state, before the numbers


def plan_step(state: HeadState, *tensors: torch.Tensor, margin: float, growth: float, v_floor: float) -> None:
    """Keep a step's statistics under its noise level, plan the next step and clear what it records, all in place.

    For CUDA tensors. Arguments as _triton/plan_step.py's `launch_plan_step`, which has their shapes.
    """
    torch.ops.sage_kernels.plan_step(*state, *tensors, margin, growth, v_floor)


def _plan_step(*arguments):
    from ._triton.plan_step import launch_plan_step

    tensors, (margin, growth, v_floor) = arguments[_OF_STATE:_TENSORS], arguments[_TENSORS:]
    launch_plan_step(HeadState(*arguments[:_OF_STATE]), *tensors, margin=margin, growth=growth, v_floor=v_floor)


_library.impl("plan_step", _plan_step, "CUDA")
torch.library.register_fake("sage_kernels::plan_step", lambda *_: None, lib=_library)
