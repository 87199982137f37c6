"""What a ScaleState launches by itself, for kernels that are compiled ahead."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..ops.plan_step import plan_step
from .rules import Timestep
from .state import ScaleState, Site


def closing_call(state: ScaleState, device: torch.device) -> Callable | None:
    """The launch that closes a step of a state like this on a device, for `sage_kernels.ops.warm_up.compile_ahead`.

    None where a step is closed by PyTorch's operations.
    """
    if device.type != "cuda" or type(state.rule).following is not Timestep.following:
        return None
    if state.device != device:  # the kernel is the same for all numbers of heads
        widest = max(site.head_dim for site in state.sites)
        sites = [Site("warm-up", 1, widest)]
        state = ScaleState(sites, device=device, margin=state.margin, bins=state.bins, rule=type(state.rule)())
    level = state._noise_bins.of(1.0)
    return functools.partial(plan_step, *state._launch_tensors(level, level), **state._launch_numbers())
