"""How the statistics of one step become the plan of the next."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels.facts.state import PLAN_CENTER, PLAN_K_WEIGHT, PLAN_Q_WEIGHT
from sage_kernels.planning.rules import Timestep, TimestepAdaptive
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import make_qkv


def step(state, seed, *, u, u_next, factor=1.0, site=0, family="biased_keys"):
    q, k, v = make_qkv(family, 1, 64, 96, 2, 2, 32, seed=seed)
    out = sage_kernels.sage_attention(q * factor, k, v, state=state.head_state(site))
    state.advance(u, u_next)
    return out, q * factor, k


def two_head_state(**options):
    return ScaleState([Site("a", 2, 32)], device="cpu", **options)


def test_plan_is_the_documented_formula():
    state = two_head_state(margin=1.25)
    _, q, k = step(state, 0, u=1.0, u_next=0.9)
    plan, scale = state.head_state(0).plan, state.head_state(0).plan_scale
    high, low = k.amax((0, 1)), k.amin((0, 1))
    q_amax, k_amax = q.abs().amax((0, 1)), (high - low) / 2
    balance = (q_amax / k_amax).sqrt()
    expected = 1.25 * (q_amax * k_amax).sqrt().amax(-1) / 127
    assert torch.allclose(plan[:, PLAN_CENTER], (high + low) / 2, atol=1e-6)
    assert torch.allclose(scale, expected, rtol=1e-5)
    assert torch.allclose(plan[:, PLAN_K_WEIGHT], balance / expected[:, None], rtol=1e-5)
    assert torch.allclose(plan[:, PLAN_Q_WEIGHT], 1 / balance, rtol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_second_run_starts_from_the_first_runs_table(frozen):
    """Frozen, or adaptive by name."""
    state = two_head_state(rule=Timestep() if frozen else TimestepAdaptive())
    state.begin_run(1.0)
    step(state, 0, u=1.0, u_next=0.5)
    first_plan = state.head_state(0).plan.clone()
    step(state, 1, u=0.5, u_next=0.0, factor=2.0)
    second_plan = state.head_state(0).plan.clone()  # u = 0.0 was never seen: this is the plan of the step just done
    if frozen:
        state.freeze()
    state.begin_run(1.0)
    assert torch.equal(state.head_state(0).plan, first_plan)  # the table of u = 1.0, not the last step
    assert state.summary()[0]["known"]
    step(state, 0, u=1.0, u_next=0.5)
    assert torch.equal(state.head_state(0).plan, second_plan)  # the table of u = 0.5, not this run's last step


def test_first_run_and_unseen_levels_are_unknown():
    state = two_head_state()
    state.begin_run(1.0)
    assert not state.summary()[0]["known"]
    step(state, 0, u=1.0, u_next=0.5)
    state.begin_run(0.2)
    assert not state.summary()[0]["known"]


def test_a_head_far_outside_its_table_follows_the_running_steps_instead():
    state = two_head_state(rule=TimestepAdaptive())
    for factor in (1.0, 1.0):
        state.begin_run(1.0)
        for i, (u, after) in enumerate(((1.0, 0.5), (0.5, 0.2))):
            step(state, i, u=u, u_next=after, factor=factor)
    state.begin_run(1.0)
    q, k, v = make_qkv("biased_keys", 1, 64, 96, 2, 2, 32, seed=0)
    sage_kernels.sage_attention(q, k * 10, v, state=state.head_state(0))
    state.advance(1.0, 0.5)  # the table knows u = 0.5, but with keys a tenth as large
    assert torch.allclose(state.head_state(0).plan[:, PLAN_CENTER], 5 * (k.amax((0, 1)) + k.amin((0, 1))), rtol=1e-5)


def test_a_run_does_not_learn_from_its_own_table():
    """Steps of one run that share a noise level: the plan follows the last of them, not the widest."""
    state = two_head_state()
    state.begin_run(1.0)
    step(state, 0, u=1.0, u_next=1.0, factor=3.0)
    _, q, _ = step(state, 1, u=1.0, u_next=1.0)
    state_of_one = two_head_state()
    step(state_of_one, 1, u=1.0, u_next=1.0)
    assert torch.equal(state.head_state(0).plan, state_of_one.head_state(0).plan)


def test_sites_of_other_shapes_do_not_touch_each_other():
    state = ScaleState([Site("a", 2, 32), Site("b", 1, 64)], device="cpu")
    step(state, 0, u=1.0, u_next=0.9)
    known = [row["known"] for row in state.summary()]
    assert known == [True, False]
    assert [row["calls"] for row in state.summary()] == [1, 0]
    assert state.head_state(0).plan[2].abs().max() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_with_nan_leaves_no_plan_behind(value):
    state = two_head_state()
    q, k, v = make_qkv("normal", 1, 64, 96, 2, 2, 32)
    k[0, 5, 1, 3] = value
    sage_kernels.sage_attention(q, k, v, state=state.head_state(0))
    state.advance(1.0, 0.9)
    assert (state.head_state(0).plan_scale > 0).tolist() == [True, False]
    assert torch.isfinite(state.head_state(0).plan).all()
    step(state, 1, u=0.9, u_next=0.8)
    assert state.summary()[0]["known"]


def test_reset_gives_the_first_run_again_bit_for_bit():
    state = two_head_state(rule=TimestepAdaptive())

    def run():
        state.begin_run(1.0)
        return [step(state, i, u=1 - i / 4, u_next=1 - (i + 1) / 4)[0] for i in range(4)]

    first = run()
    again = run()
    assert not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # the second run knows its table
    state.reset()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_tensors_keep_their_identity_through_steps_and_resets():
    state = two_head_state()
    kept = state.head_state(0)
    pointers = [x.data_ptr() for x in kept]
    step(state, 0, u=1.0, u_next=0.9)
    state.reset()
    assert [x.data_ptr() for x in state.head_state(0)] == pointers and all(
        a is b for a, b in zip(kept, state.head_state(0), strict=True)
    )


def test_a_site_that_was_not_called_in_a_step_keeps_its_plan():
    """Attention caches and layer-skip guidance leave layers out of some steps."""
    state = ScaleState([Site("a", 1, 32), Site("b", 1, 32)], device="cpu")
    q, k, v = make_qkv("normal", 1, 64, 64, 1, 1, 32)
    for step in range(4):
        for site in (0, 1) if step % 2 == 0 else (0,):
            sage_kernels.sage_attention(q, k, v, state=state.head_state(site))
        state.advance(1 - step / 4, 1 - (step + 1) / 4)
    assert [(row["calls"], row["dynamic_calls"]) for row in state.summary()] == [(4, 1), (2, 1)]


def test_a_noise_level_is_in_one_bin_however_it_is_given():
    state = two_head_state(bins=16)
    edges = state._noise_bins.edges
    below = torch.nextafter(edges, torch.zeros(()))
    for u, expected in [(0.0, 0), (1.0, 15), (-0.5, 0), (1.5, 15)] + [
        (float(level), i + first) for first, levels in ((0, below), (1, edges)) for i, level in enumerate(levels)
    ]:
        assert int(state._noise_bins.of(u)) == int(state._noise_bins.of(torch.tensor(u))) == expected
    middles = state.bin_levels()  # uniform in asin(u)
    assert [int(state._noise_bins.of(u)) for u in middles] == list(range(16))
