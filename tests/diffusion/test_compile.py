"""torch.compile(fullgraph=True) of a swapped model: no graph break, no recompilation per step, the eager result."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.testing
from diffusers import FlowMatchEulerDiscreteScheduler

import sage_processors as sp
from tests.support.tiny_models import MODELS, OLDEST


STEPS = 8


class Pipe:
    """The least that is a pipeline: components and a scheduler."""

    def __init__(self, transformer, scheduler):
        self.transformer, self.scheduler = transformer, scheduler

    @property
    def components(self):
        return {"transformer": self.transformer, "scheduler": self.scheduler}


@torch.no_grad()
def denoise(pipe, model, inputs, steps=STEPS):
    """The loop of a flow-matching pipeline; `model` is pipe.transformer, compiled or not."""
    pipe.scheduler.set_timesteps(steps, device=inputs["hidden_states"].device)
    latents = inputs["hidden_states"]
    for t in pipe.scheduler.timesteps:
        noise = model(**inputs | {"hidden_states": latents, "timestep": t.reshape(1) / 1000}).sample
        latents = pipe.scheduler.step(noise, t, latents).prev_sample
    return latents


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize(
    ("scaling", "follows"),
    [
        ("timestep", "scheduler"),
        pytest.param("dynamic", "timestep argument", marks=pytest.mark.slow("as timestep")),
        pytest.param("timestep", "timestep argument", marks=pytest.mark.slow("as timestep")),
    ],
)
def test_T04_compile_whole_model_is_one_graph_for_all_steps(scaling, follows):
    model, inputs = MODELS["flux"]()
    pipe = Pipe(model, FlowMatchEulerDiscreteScheduler())
    target = pipe if follows == "scheduler" else model
    config = sp.SageAttnProcessor(min_tokens=1, scaling=scaling)
    with sp.apply(target, config) as handle:
        eager = denoise(pipe, model, inputs)
        eager_report = handle.report()
    with sp.apply(target, config) as handle, torch._dynamo.config.patch(error_on_recompile=True):
        fast, counter = compiled(model, "aot_eager")
        result = denoise(pipe, fast, inputs)
        report = handle.report()
        # a hook with tensor operations is a frame of its own, with every torch.compile
        assert counter.frame_count == (2 if target is model and scaling == "timestep" else 1)
    torch.testing.assert_close(result, eager, rtol=1e-5, atol=1e-5)
    assert report.calls == eager_report.calls == 2 * STEPS
    assert report.bytes_saved == eager_report.bytes_saved > 0
    dynamic = [row["dynamic_calls"] for row in report.rows]
    assert dynamic == [row["dynamic_calls"] for row in eager_report.rows]
    assert all(d == (STEPS if scaling == "dynamic" else 1) for d in dynamic), str(report)


@pytest.mark.slow("test_T04 has the usual way")
@pytest.mark.parametrize("how", ["whole", "blocks", "whole, by its timestep"])
def test_compiled_calls_keep_row_maxima_from_step_to_step(how):
    """As eager ones do; unless the hook that follows the steps is compiled, for then the host sees none of them."""
    results = {}
    for way in ("eager", how):
        torch._dynamo.reset()
        model, inputs = MODELS["flux"]()
        pipe = Pipe(model, FlowMatchEulerDiscreteScheduler())
        target = model if how == "whole, by its timestep" else pipe
        config = sp.SageAttnProcessor(min_tokens=1, recipe="qk_int8_pv_fp8")
        with sp.apply(target, config) as handle, torch._dynamo.config.patch(error_on_recompile=True):
            fast = model
            if way == "blocks":
                if OLDEST:
                    pytest.skip("this version of diffusers names no repeated blocks of the model")
                model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
            elif way != "eager":
                fast, _ = compiled(model, "aot_eager")
            if target is model:
                handle.new_run()  # else rows are not kept: where a run begins is known on the device alone
            result = denoise(pipe, fast, inputs, steps=8)
            state = handle._denoisers[0].state
            sites = [(site["calls"], site["lagged"]) for site in state.summary()]
            results[way] = result, sites, state.kept.row_maxima.nbytes
    (expected, eager_sites, eager_bytes), (result, sites, nbytes) = results.values()
    assert all(lagged > 0 for _, lagged in eager_sites) and eager_bytes > 0
    if how == "whole, by its timestep":
        assert sites == [(calls, 0) for calls, _ in eager_sites] and nbytes == 0
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)  # another reference, other rounding
    else:
        assert sites == eager_sites and nbytes == eager_bytes
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow("test_T04 has the usual way")
@pytest.mark.parametrize("name", ["sd3", "unet_sd15", "cogvideox"])
def test_compile_models_that_call_torch_attention_directly(name):
    model, inputs = MODELS[name]()
    with torch.no_grad(), sp.apply(model, sp.SageAttnProcessor(min_tokens=1, scaling="dynamic")) as handle:
        eager = model(**inputs).sample
        fast, counter = compiled(model, "aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(2):
                result = fast(**inputs).sample
        assert counter.frame_count == 1
        assert all(row["calls"] == 3 for row in handle.report().rows)
    torch.testing.assert_close(result, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.slow("test_T04 has the usual way")
def test_compile_counts_fallbacks_inside_the_graph():
    model, inputs = MODELS["qwen_image_padded"]()
    with torch.no_grad():
        stock = model(**inputs).sample
        with sp.apply(model, sp.SageAttnProcessor(min_tokens=10_000, scaling="dynamic")) as handle:
            fast, counter = compiled(model, "aot_eager")
            for _ in range(3):
                result = fast(**inputs).sample
            assert handle.report().fallbacks == {"short": 3}
            assert counter.frame_count == 1
    torch.testing.assert_close(result, stock)


@pytest.mark.slow("test_T04 has the usual way")
def test_compile_in_a_thread_that_never_ran_eagerly():
    model, inputs = MODELS["flux"]()

    @torch.no_grad()
    def work():
        fast, counter = compiled(model, "aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                fast(**inputs)
        return counter.frame_count

    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1)) as handle, ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == 2  # the hook and the model
        assert handle.report().calls == 6


def test_compile_repeated_blocks_do_not_recompile_per_layer():
    model, inputs = MODELS["wan_vace"]()  # two blocks of one kind, with self- and cross-attention
    if OLDEST:
        pytest.skip("this version of diffusers names no repeated blocks of the model")
    pipe = Pipe(model, FlowMatchEulerDiscreteScheduler())
    pipe.scheduler.set_timesteps(4)
    with torch.no_grad(), sp.apply(pipe, sp.SageAttnProcessor(min_tokens=1)) as handle:
        eager = model(**inputs).sample
        handle.reset()
        pipe.scheduler.set_timesteps(4)
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        results = []
        with torch._dynamo.config.patch(error_on_recompile=True):
            for t in pipe.scheduler.timesteps:
                results.append(model(**inputs).sample)
                pipe.scheduler.step(results[-1], t, results[-1])
        result, report = results[0], handle.report()
        assert report.calls == 4 * len(report.rows)
        assert all(row["dynamic_calls"] == 1 for row in report.rows), str(report)
    torch.testing.assert_close(result, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.slow("compiles C++")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on the CPU needs g++")
def test_compile_with_inductor_agrees_with_eager():
    model, inputs = MODELS["flux"]()
    pipe = Pipe(model, FlowMatchEulerDiscreteScheduler())
    config = sp.SageAttnProcessor(min_tokens=1)
    with sp.apply(pipe, config):
        eager = denoise(pipe, model, inputs, steps=3)
    with sp.apply(pipe, config) as handle, torch._dynamo.config.patch(error_on_recompile=True):
        fast, counter = compiled(model, "inductor")
        result = denoise(pipe, fast, inputs, steps=3)
        assert counter.frame_count == 1
        assert handle.report().calls == 6
    torch.testing.assert_close(result, eager, rtol=1e-3, atol=1e-3)
