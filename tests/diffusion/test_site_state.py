"""Scales of attention calls that are out of use for a while."""

from __future__ import annotations

import torch

from sage_kernels.facts.state import COUNT_STEADY
from sage_kernels.planning.state import ScaleState, Site
from sage_processors.diffusion.site_state import Parked


def test_a_call_that_comes_back_has_its_plan_but_has_to_show_again_that_it_fits():
    """Runs may have begun since: nothing says that its last step was the one before."""
    sites = [Site("a", 2, 32), Site("a#1", 2, 32)]
    before, after = (ScaleState(sites, device="cpu") for _ in range(2))
    before._shared.plan_scale.fill_(0.5)
    before._shared.counts[:, COUNT_STEADY] = torch.ones((), dtype=torch.int32)
    parked = Parked()
    parked.park(before)
    assert parked.move_into(after)
    assert after._shared.plan_scale.tolist() == [0.5] * 4
    assert not after._shared.counts[:, COUNT_STEADY].any()
