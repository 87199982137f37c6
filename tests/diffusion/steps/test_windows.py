"""Precision by step, by noise level and by layer: the right calls stay exact, counted; two versions at most."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

import sage_processors as sp
from sage_processors.diffusion.steps.noise_level import noise_levels
from sage_processors.diffusion.steps.windows import Steps
from tests.diffusion.test_compile import Pipe, compiled, denoise
from tests.support.tiny_models import MODELS


def flux_pipe(scheduler=None):
    model, inputs = MODELS["flux"]()
    return Pipe(model, scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0)), model, inputs


def options(**kwargs):
    return sp.SageAttnProcessor(min_tokens=1, **kwargs)


def counts(handle):
    """{(INT8 calls, calls kept by a window)} over the layers."""
    return {(row["calls"], row["fallbacks"].get("window", 0)) for row in handle.report().rows}


# --- steps ---


@pytest.mark.parametrize("scaling", ["timestep", "dynamic"])
@pytest.mark.parametrize(
    ("window", "kept"),
    [({"keep": {"first_steps": 3}}, 3), ({"keep": {"last_steps": 2}}, 2), ({"keep": {"first_steps": 99}}, 10)],
)
def test_windows_keep_so_many_steps_of_every_run(window, kept, scaling):
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(scaling=scaling, **window)) as handle:
        for runs in (1, 2):
            denoise(pipe, model, inputs, steps=10)
            assert counts(handle) == {(runs * (10 - kept), runs * kept)}


def test_windows_leave_the_first_and_last_steps_to_the_models_own_attention():
    """Where every step is kept the result is stock; with some kept, those steps are stock bit for bit."""
    pipe, model, inputs = flux_pipe()
    stock = denoise(pipe, model, inputs, steps=6)
    with sp.apply(pipe, options(keep={"first_steps": 3, "last_steps": 3})):
        assert torch.equal(denoise(pipe, model, inputs, steps=6), stock)
    seen = []
    pipe.scheduler.set_timesteps(6)
    with torch.no_grad(), sp.apply(pipe, options(scaling="dynamic", keep={"first_steps": 2, "last_steps": 1})):
        pipe.scheduler.set_timesteps(6)
        for t in pipe.scheduler.timesteps:
            seen.append(model(**inputs | {"timestep": t.reshape(1) / 1000}).sample)
            pipe.scheduler.step(seen[-1], t, inputs["hidden_states"])
    with torch.no_grad():
        same = [
            torch.equal(x, model(**inputs | {"timestep": t.reshape(1) / 1000}).sample)
            for x, t in zip(seen, pipe.scheduler.timesteps, strict=True)
        ]
    assert same == [True, True, False, False, False, True]


def test_keep_below_noise_follows_the_noise_level_not_the_step():
    for scheduler in (FlowMatchEulerDiscreteScheduler(shift=1.0), FlowMatchEulerDiscreteScheduler(shift=6.0)):
        pipe, model, inputs = flux_pipe(scheduler)
        with sp.apply(pipe, options(keep={"noise": (0.0, 0.5)})) as handle:
            denoise(pipe, model, inputs, steps=12)
            kept = int((noise_levels(pipe.scheduler) < 0.5).sum())
            assert 0 < kept < 12 and counts(handle) == {(12 - kept, kept)}


def test_windows_count_from_where_an_image_to_image_run_starts():
    """FlowMatch schedulers are told the place; DDIM is only stepped from the middle of its timesteps."""
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(keep={"first_steps": 1, "last_steps": 2})) as handle:
        pipe.scheduler.set_timesteps(10)
        pipe.scheduler.set_begin_index(4)
        run_from(pipe, model, inputs, 4)
        assert counts(handle) == {(3, 3)}
    pipe, model, inputs = flux_pipe(DDIMScheduler())
    with sp.apply(pipe, options(keep={"last_steps": 2, "first_steps": 1})) as handle:
        pipe.scheduler.set_timesteps(10)
        run_from(pipe, model, inputs, 4)
        assert counts(handle) == {(3, 3)}
        assert handle.steps.place == 9


@torch.no_grad()
def run_from(pipe, model, inputs, start):
    for t in pipe.scheduler.timesteps[start:]:
        noise = model(**inputs | {"timestep": t.reshape(1) / 1000}).sample
        pipe.scheduler.step(noise, t, inputs["hidden_states"])


def test_steps_without_windows_never_read_a_level():
    class Unreadable(torch.Tensor):
        def tolist(self):
            raise AssertionError("read on the host")

        def __float__(self):
            raise AssertionError("read on the host")

    steps = Steps(options())
    steps.progress.begin(torch.ones(4).as_subclass(Unreadable), 0)
    steps.progress.finish(torch.ones(()).as_subclass(Unreadable))
    steps.enter(steps.progress)
    assert steps.place == 1 and not steps.in_16bit


def test_strict_policy_accepts_what_was_asked_for(caplog):
    pipe, model, inputs = flux_pipe()
    with sp.apply(
        pipe, options(on_unsupported="raise", keep={"first_steps": 1}, layers={"*single*": {"recipe": "16bit"}})
    ) as handle:
        denoise(pipe, model, inputs, steps=3)
        rows = {row["layer"]: (row["calls"], row["fallbacks"]) for row in handle.report().rows}
    assert rows == {
        "transformer.transformer_blocks.0.attn": (2, {"window": 1}),
        "transformer.single_transformer_blocks.0.attn": (0, {"kept": 3}),
    }
    assert not caplog.records


# --- compiled ---


@pytest.mark.slow("compiles two versions")
@pytest.mark.parametrize("scaling", ["timestep", "dynamic"])
def test_compiled_windows_make_two_versions_however_often_they_switch(scaling):
    pipe, model, inputs = flux_pipe()
    config = options(scaling=scaling, keep={"first_steps": 2, "last_steps": 3})
    torch._dynamo.reset()
    with sp.apply(pipe, config) as handle:
        eager = [denoise(pipe, model, inputs, steps=8) for _ in range(3)]
        handle.reset()
        fast, counter = compiled(model, "aot_eager")
        results = [denoise(pipe, fast, inputs, steps=8)]
        assert counter.frame_count == 2  # one for each precision
        with torch._dynamo.config.patch(error_on_recompile=True):
            results += [denoise(pipe, fast, inputs, steps=8) for _ in range(2)]
        assert counter.frame_count == 2
        assert counts(handle) == {(9, 15)}
    torch._dynamo.reset()
    torch.testing.assert_close(results, eager, rtol=1e-5, atol=1e-5)


# --- layers ---


def test_layer_patterns_choose_layers_and_their_scaling():
    pipe, model, inputs = flux_pipe()
    double, single = "transformer.transformer_blocks.0.attn", "transformer.single_transformer_blocks.0.attn"
    with sp.apply(
        pipe, options(layers={"*.transformer_blocks.*": {"recipe": "qk_int8_pv_bf16"}, "*": {"recipe": "16bit"}})
    ) as handle:
        denoise(pipe, model, inputs, steps=2)
        assert {row["layer"]: row["fallbacks"] for row in handle.report().rows} == {double: {}, single: {"kept": 2}}
    with sp.apply(pipe, options(layers={single: {"scaling": "per_token"}, "*": {"scaling": "per_block"}})) as handle:
        denoise(pipe, model, inputs, steps=2)
        rows = {row["layer"]: (row["scaling"], row["calls"]) for row in handle.report().rows}
        assert rows == {double: ("per_block", 2), single: ("per_token", 2)}
    with sp.apply(pipe, options(layers={single: {"scaling": "per_token"}})) as handle:
        denoise(pipe, model, inputs, steps=4)
        rows = {row["layer"]: (row["scaling"], row["dynamic_calls"]) for row in handle.report().rows}
        assert rows == {double: ("timestep", 1.0), single: ("per_token", 4)}


def test_a_kept_layer_is_stock_bit_for_bit():
    pipe, model, inputs = flux_pipe()
    stock = denoise(pipe, model, inputs, steps=2)
    with sp.apply(pipe, options(layers={"*": {"recipe": "16bit"}})) as handle:
        assert torch.equal(denoise(pipe, model, inputs, steps=2), stock)
        assert handle.report().fallbacks == {"kept": 4}


@pytest.mark.parametrize("own", [{"recipe": "16bit"}, {"recipe": "qk_int8_pv_fp8"}, {"scaling": "per_token"}])
def test_a_pattern_without_a_layer_names_the_closest(own):
    pipe, model, _ = flux_pipe()
    before = list(model.attn_processors.values())
    wrong = "transformer.transformer_block.0.attn"
    with pytest.raises(ValueError) as caught:
        sp.apply(pipe, options(layers={"*": {"recipe": "16bit"}, wrong: own}))
    assert f"layers: got {wrong!r}, which matches no layer" in str(caught.value)
    assert "the closest is 'transformer.transformer_blocks.0.attn'" in str(caught.value)
    assert all(a is b for a, b in zip(model.attn_processors.values(), before, strict=True))


@pytest.mark.parametrize(
    "window", [{"keep": {"first_steps": 1}}, {"keep": {"last_steps": 1}}, {"keep": {"noise": (0.0, 0.1)}}]
)
def test_windows_need_a_scheduler(window):
    model, _ = MODELS["flux"]()
    with pytest.raises(ValueError, match=f"{next(iter(window))}: got .* for a model without a pipeline"):
        sp.apply(model, options(**window))
    with pytest.raises(ValueError, match="for a pipeline without a scheduler"):
        sp.apply(Pipe(model, None), options(**window))
