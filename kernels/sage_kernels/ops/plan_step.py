"""The op `plan_step`: close a denoising step and plan the next, on a GPU in one launch."""

from __future__ import annotations

import torch

from ..facts.state import HeadState
from .dispatch import register


_NUMBERS = ("margin", "full", "growth", "outlier", "move", "steady", "v_floor", "adapts")
_OF_STATE = len(HeadState._fields)


def plan_step(state: HeadState, *tensors: torch.Tensor, **numbers: float) -> None:
    """Record a step's statistics under its noise level, plan the next step, and clear the statistics.

    In place, for CUDA tensors. Arguments as of `launch_plan_step` in _triton/prologue/plan_step.py.
    """
    torch.ops.sage_kernels.plan_step(*state, *tensors, *(numbers[name] for name in _NUMBERS))


def _plan_step(*arguments):
    from .._triton.prologue.plan_step import launch_plan_step

    tensors, numbers = arguments[_OF_STATE : -len(_NUMBERS)], arguments[-len(_NUMBERS) :]
    launch_plan_step(HeadState(*arguments[:_OF_STATE]), *tensors, **dict(zip(_NUMBERS, numbers, strict=True)))


register(
    "plan_step(Tensor(a!) plan, Tensor(b!) plan_scale, Tensor(c!) stats, Tensor(d!) counts, Tensor row, "
    "Tensor row_max, Tensor row_max_next, Tensor(e!) table, Tensor(f!) table_run, Tensor run, Tensor(g!) totals, "
    "Tensor is_channel, Tensor finished, Tensor following, Tensor frozen, Tensor frozen_keys, Tensor begins, "
    "float margin, float full, float growth, float outlier, float move, float steady, float v_floor, "
    "bool adapts) -> ()",
    _plan_step, lambda *_: None, ("CUDA",),
)  # fmt: skip
