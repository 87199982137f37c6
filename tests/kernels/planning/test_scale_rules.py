"""Which statistics plan the next step, rule by rule; and what holds for all of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo.testing
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.utils._python_dispatch import TorchDispatchMode

import sage_kernels
import sage_processors as sp
from sage_kernels.facts.state import PLAN_CENTER
from sage_kernels.planning.rules import Delayed, SigmaPower, Static, Timestep, TimestepAdaptive
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import make_qkv
from sage_processors.evaluation.metrics import sqnr_db
from tests.diffusion.test_compile import Pipe, compiled, denoise
from tests.support.plans import calls_without_a_plan
from tests.support.tiny_models import MODELS


LEVELS = [1.0, 0.9, 0.75, 0.6, 0.4, 0.2, 0.07]


def state_with(rule, margin=1.0):
    return ScaleState([Site("a", 2, 24)], device="cpu", margin=margin, rule=rule)


def call(state, seed=0, *, k_factor=1.0, offset=0.0, family="biased_keys"):
    q, k, v = make_qkv(family, 1, 61, 97, 2, 2, 24, seed=seed)
    k = k * k_factor + offset
    return q, k, v, sage_kernels.sage_attention(q, k, v, state=state.head_state(0))


def run(state, factors, levels=LEVELS, seed=0, family="biased_keys"):
    """One denoising run with K times factors[i] in step i -> (plan, plan_scale) that each step ran with."""
    state.begin_run(levels[0])
    used = []
    for i, (factor, u) in enumerate(zip(factors, levels, strict=True)):
        used.append((state.head_state(0).plan.clone(), state.head_state(0).plan_scale.clone()))
        call(state, seed + i, k_factor=factor, family=family)
        state.advance(u, levels[min(i + 1, len(levels) - 1)])
    return used


def needed(seed, k_factor=1.0):
    """(scale, centre) that one step's K and Q need, by the formula."""
    q, k, _ = make_qkv("biased_keys", 1, 61, 97, 2, 2, 24, seed=seed)
    k = k * k_factor
    high, low = k.amax((0, 1)), k.amin((0, 1))
    return (q.abs().amax((0, 1)) * (high - low) / 2).sqrt().amax(-1) / 127, (high + low) / 2


# --- delayed ---


def test_delayed_plans_for_the_widest_of_its_last_steps():
    state = state_with(Delayed(2))
    factors = [1.0, 3.0, 1.0, 1.0, 1.0]
    scales = [scale for _, scale in run(state, factors, LEVELS[:5])]
    assert torch.equal(scales[0], torch.zeros(2))  # no plan: dynamic
    torch.testing.assert_close(scales[1], needed(0)[0])
    own = [make_qkv("biased_keys", 1, 61, 97, 2, 2, 24, seed=i) for i in range(3)]

    def widest(first, second):
        q = torch.cat([own[first][0], own[second][0]], 1).abs().amax((0, 1))
        k = torch.cat([own[first][1] * factors[first], own[second][1] * factors[second]], 1)
        return (q * (k.amax((0, 1)) - k.amin((0, 1))) / 2).sqrt().amax(-1) / 127

    torch.testing.assert_close(scales[2], widest(0, 1))
    torch.testing.assert_close(scales[3], widest(1, 2))  # the step times 3 is still among the last two
    assert (scales[4] < 0.9 * scales[3]).all()  # and has left now


def test_delayed_starts_every_run_anew():
    state = state_with(Delayed(4))
    first = run(state, [1.0, 1.0, 1.0], LEVELS[:3])
    again = run(state, [1.0, 1.0, 1.0], LEVELS[:3])
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    assert calls_without_a_plan(state.summary()[0]) == 2


def test_delayed_keeps_the_plan_of_a_skipped_layer_and_drops_nan():
    state = state_with(Delayed(1))
    state.begin_run(1.0)
    call(state)
    state.advance(1.0, 0.9)
    plan = state.head_state(0).plan.clone()
    state.advance(0.9, 0.8)  # the layer did not run
    assert torch.equal(state.head_state(0).plan, plan)
    call(state, offset=float("nan"))
    state.advance(0.8, 0.7)
    assert torch.isfinite(state.head_state(0).plan).all() and (state.head_state(0).plan_scale > 0).all()


# --- static ---


def test_static_freezes_the_widest_of_the_first_run():
    state = state_with(Static())
    factors = [1.0, 2.0, 4.0, 2.0, 0.8, 1.0, 1.0]
    first = run(state, factors)
    again = run(state, factors)  # not frozen yet: as the first
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    state.freeze()
    torch.testing.assert_close(first[2][1], needed(1, 2.0)[0])  # the first run plans from the previous step
    second = run(state, [9.0] * 7, seed=50)
    third = run(state, [0.1] * 7, seed=90)
    stats = [make_qkv("biased_keys", 1, 61, 97, 2, 2, 24, seed=i) for i in range(7)]
    q = torch.cat([s[0] for s in stats], 1).abs().amax((0, 1))
    k = torch.cat([s[1] * f for s, f in zip(stats, factors, strict=True)], 1)
    torch.testing.assert_close(second[0][1], (q * (k.amax((0, 1)) - k.amin((0, 1))) / 2).sqrt().amax(-1) / 127)
    torch.testing.assert_close(second[0][0][:, PLAN_CENTER, :24], (k.amax((0, 1)) + k.amin((0, 1))) / 2)
    for plan, scale in (*second, *third):  # whatever the noise level, and whatever those runs saw
        assert torch.equal(scale, second[0][1]) and torch.equal(plan, second[0][0])


def test_static_of_a_loaded_table_needs_no_first_run():
    learnt = state_with(Timestep())
    run(learnt, [1.0] * 7)
    frozen = state_with(Static())
    frozen.restore(learnt.snapshot())
    frozen.freeze()
    plans = run(frozen, [1.0] * 7, seed=30)
    assert all(torch.equal(scale, plans[0][1]) and (scale > 0).all() for _, scale in plans)


# --- sigma_power ---


def bin_of(state, u):
    return int(state._noise_bins.of(u))


@pytest.mark.parametrize("gamma", [1.0, -1.0, 0.5])
def test_sigma_power_scales_with_the_noise_level(gamma):
    state = state_with(SigmaPower(gamma))
    run(state, [1.0] * 7)
    state.freeze()
    scales = torch.stack([scale for _, scale in run(state, [1.0] * 7)])
    sigma = state.bin_levels()[[bin_of(state, u) for u in LEVELS]]
    expected = (sigma / sigma[0]) ** gamma
    torch.testing.assert_close(scales / scales[0], expected[:, None].expand(-1, 2), rtol=1e-4, atol=0)
    # the reference is the centre of the first run's points
    first_run = torch.stack([needed(i)[0] for i in range(7)]).log().mean(0)
    torch.testing.assert_close(scales.log().mean(0), first_run, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gamma", [-0.7, 0.4, 1.0])
def test_sigma_power_finds_the_power_of_each_head(gamma):
    state = state_with(SigmaPower())
    sigma = state.bin_levels()[[bin_of(state, u) for u in LEVELS]]
    factors = (sigma ** (2 * gamma)).tolist()  # s goes with the root of K's range
    run(state, factors)
    state.freeze()
    used = run(state, factors)
    assert state.rule.fit.gamma.tolist() == pytest.approx([gamma] * 2, abs=0.06)
    assert state.rule.fit.good.all() and (state.rule.fit.r2 > 0.9).all()
    for i, (_, scale) in enumerate(used):
        torch.testing.assert_close(scale, needed(i, factors[i])[0], rtol=0.15, atol=0)


# --- all rules ---


def all_rules():
    return [Timestep(), TimestepAdaptive(), Delayed(3), Static(), SigmaPower(), SigmaPower(1.0), SigmaPower(-1.0)]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: f"{type(rule).__name__}{getattr(rule, 'gamma', '')}")
def test_nothing_is_clipped_and_everything_beyond_its_plan_is_counted(rule):
    """K grows fourfold against what was planned. Clipped codes would leave an SQNR below 10 dB."""
    state = state_with(rule, margin=0.9)
    run(state, [1.0] * 7, family="normal")
    if not isinstance(rule, TimestepAdaptive):
        state.freeze()
    state.begin_run(LEVELS[0])
    for i, u in enumerate(LEVELS):
        outside = state.summary()[0]["outside"]
        q, k, v, out = call(state, i, k_factor=4.0, family="normal")
        exact = torch.nn.functional.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in (q, k, v)))
        dynamic = sage_kernels.sage_attention(q, k, v, scaling="per_token")
        # one scale a tile costs up to 6 dB against one a token; 1/σ makes scales too coarse by up to 1/0.11, 19 dB
        slack = 6 + (19 if isinstance(rule, SigmaPower) and rule.gamma == -1 else 0)
        bar = sqnr_db(dynamic.double(), exact.transpose(1, 2)).item() - slack
        assert sqnr_db(out.double(), exact.transpose(1, 2)).item() > bar
        if i == 0 and not isinstance(rule, Delayed):  # whose first step has no plan
            assert state.summary()[0]["outside"] > outside
        state.advance(u, LEVELS[min(i + 1, 6)])


class NoHostRead(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: f"{type(rule).__name__}{getattr(rule, 'gamma', '')}")
def test_planning_never_waits_for_the_device(rule):
    state, levels = state_with(rule), torch.tensor(LEVELS)
    for _ in range(2):
        call(state)
        with NoHostRead():
            state.begin_run(levels[0])
            state.advance(levels[0], levels[1])


@pytest.mark.slow("compiles a model; test_compile.py does with one rule")
@pytest.mark.parametrize("scaling", ["timestep_adaptive", "delayed"])
def test_compiled_pipeline_is_one_graph_and_reports_its_scaling(scaling):
    model, inputs = MODELS["flux"]()
    pipe = Pipe(model, FlowMatchEulerDiscreteScheduler())
    config = sp.SageAttnProcessor(min_tokens=1, scaling=sp.Scaling(scaling, history=2))
    torch._dynamo.reset()
    with sp.apply(pipe, config) as handle, torch._dynamo.config.patch(error_on_recompile=True):
        eager = [denoise(pipe, model, inputs, steps=5) for _ in range(2)]
        handle.reset()
        fast, counter = compiled(model, "aot_eager")
        results = [denoise(pipe, fast, inputs, steps=5) for _ in range(2)]
        assert counter.frame_count == 1
        rows = handle.report().rows
    torch._dynamo.reset()
    torch.testing.assert_close(results, eager, rtol=1e-5, atol=1e-5)
    assert {row["scaling"] for row in rows} == {scaling} and all(row["calls"] == 10 for row in rows)
    # a run's first step has no plan, unless it may start from an earlier run
    assert {row["dynamic_calls"] for row in rows} == {1.0 if scaling == "timestep_adaptive" else 2.0}


def test_compiled_raw_model_with_a_history_does_not_recompile():
    model, inputs = MODELS["flux"]()
    torch._dynamo.reset()
    config = sp.SageAttnProcessor(min_tokens=1, scaling=sp.Scaling("delayed", history=3))
    with torch.no_grad(), sp.apply(model, config) as handle, torch._dynamo.config.patch(error_on_recompile=True):
        fast, _ = compiled(model, "aot_eager")
        for i in range(8):
            fast(**inputs | {"timestep": torch.tensor([1 - i / 8])})
        assert all(row["calls"] == 8 and row["dynamic_calls"] == 1 for row in handle.report().rows)
    torch._dynamo.reset()


@pytest.mark.parametrize("scaling", ["static", "sigma_power"])
def test_frozen_rules_need_runs(scaling):
    model, _ = MODELS["flux"]()
    before = dict(model.attn_processors)
    with pytest.raises(ValueError, match=f'scaling: got "{scaling}" for a model without a pipeline'):
        sp.apply(model, sp.SageAttnProcessor(scaling=scaling))
    assert all(model.attn_processors[name] is processor for name, processor in before.items())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scaling": {"history": 0}}, ValueError, "history: got 0, expected at least 1"),
        ({"scaling": {"history": 2.0}}, TypeError, "history: got float, expected an int"),
        ({"scaling": {"gamma": "fitted"}}, TypeError, 'gamma: got str, expected a number or "fit"'),
        ({"scaling": {"gamma": True}}, TypeError, "gamma: got bool"),
        ({"scaling": {"gamma": math.inf}}, ValueError, "gamma: got inf"),
        ({"scaling": "sigma"}, ValueError, "scaling: got 'sigma'"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        sp.SageAttnProcessor(**options)
