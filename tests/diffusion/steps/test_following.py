"""Which scheduler a shared model follows, and forwards that belong to no step of any: exact, counted, named."""

from __future__ import annotations

import gc
import logging

import diffusers
import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.steps.noise_level import noise_levels
from sage_processors.diffusion.steps.windows import inside
from tests.diffusion.test_compile import Pipe, compiled, denoise
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import sd_pipe


SD, IMG2IMG = diffusers.StableDiffusionPipeline, diffusers.StableDiffusionImg2ImgPipeline
WINDOWS = [{"keep": {"first_steps": 4}}, {"keep": {"last_steps": 1}}, {"keep": {"noise": (0.0, 0.5)}}]


def options(**kwargs):
    return sp.SageAttnProcessor(min_tokens=1, **{"scaling": "dynamic", **kwargs})


def ddim():
    return diffusers.DDIMScheduler(timestep_spacing="trailing")


def draw(pipe, steps=8, size=16, **inputs):
    torch.manual_seed(0)
    text = {"prompt_embeds": torch.randn(1, 7, 32), "negative_prompt_embeds": torch.randn(1, 7, 32)}
    if isinstance(pipe, IMG2IMG):
        inputs = {"image": torch.rand(1, 3, size, size), **inputs}
    else:
        inputs |= {"height": size, "width": size}
    generator = torch.Generator().manual_seed(0)
    return pipe(num_inference_steps=steps, generator=generator, output_type="latent", **text, **inputs).images


class Precisions:
    """What each forward of a model ran: "int8", "window", "unfollowed"; of the first layer, as the report counts."""

    def __init__(self, handle, model):
        self._handle, self._before, self.ran = handle, self._counts(handle), []
        self._hook = model.register_forward_hook(lambda *_: self._note())

    def _counts(self, handle):
        row = handle.report().rows[0]
        return {"int8": row["calls"], **row["fallbacks"]}

    def _note(self):
        now = self._counts(self._handle)
        self.ran += [name for name, count in now.items() for _ in range(count - self._before.get(name, 0))]
        self._before = now

    def take(self):
        self.ran, ran = [], self.ran
        return ran

    def remove(self):
        self._hook.remove()


def expected(window, scheduler, start=0):
    """What the steps of a run from timesteps[start] should run."""
    levels, keep = noise_levels(scheduler).tolist()[start:], options(**window).keep
    kept = [
        i < keep.first_steps or len(levels) - i <= keep.last_steps or inside(keep.noise, level)
        for i, level in enumerate(levels)
    ]
    return ["window" if is_kept else "int8" for is_kept in kept]


# --- several pipelines ---


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: next(iter(window)))
@pytest.mark.parametrize("order", ["before the swap", "after the swap"])
def test_P20_a_second_pipeline_is_followed_by_its_own_scheduler(order, window):
    pipe, _ = sd_pipe()
    other_scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    if order == "before the swap":
        other = SD.from_pipe(pipe, scheduler=other_scheduler)
        other.set_progress_bar_config(disable=True)
        draw(other, 3)  # as if it had been in use: prepared, with other timesteps
    handle = pipe.set_attn_processor(options(**window))
    if order == "after the swap":
        other = SD.from_pipe(pipe, scheduler=other_scheduler)
    assert other.scheduler is other_scheduler and other.unet is pipe.unet
    seen = Precisions(handle, pipe.unet)
    for each, steps in ((other, 8), (pipe, 6), (other, 7), (other, 8), (pipe, 8)):
        draw(each, steps)
        assert seen.take() == expected(window, each.scheduler), (each.scheduler, steps)
    report = str(handle.report())
    assert "unfollowed" not in report
    assert type(pipe.scheduler) is not diffusers.EulerDiscreteScheduler  # it is followed, as is the other
    seen.remove()
    handle.remove()
    assert type(pipe.scheduler) is diffusers.EulerDiscreteScheduler
    assert type(other_scheduler) is diffusers.EulerAncestralDiscreteScheduler


def test_P20_schedulers_of_pipelines_that_are_gone_are_not_kept():
    pipe, _ = sd_pipe()
    handle = pipe.set_attn_processor(options(keep={"first_steps": 2}))
    for _ in range(3):  # as a server does: a pipeline with a scheduler of its own for each request
        other = SD.from_pipe(pipe, scheduler=ddim())
        draw(other, 4)
    del other
    gc.collect()
    assert "DDIM" not in str(handle.report()) and len(handle.following.followed) == 1
    draw(pipe, 4)
    assert handle.report().fallbacks["window"] == 4 * 2 * len(handle.report().rows)


def test_P20_a_run_inside_of_another_run_changes_nothing_there():
    pipe, _ = sd_pipe()
    window = {"keep": {"first_steps": 2, "last_steps": 2}}
    handle = pipe.set_attn_processor(options(**window))
    other = SD.from_pipe(pipe, scheduler=ddim())
    seen = Precisions(handle, pipe.unet)

    def preview(_, step, timestep, tensors):
        if step == 3:
            draw(other, 5)
        return tensors

    draw(pipe, 8, callback_on_step_end=preview)
    outer, inner = expected(window, pipe.scheduler), expected(window, other.scheduler)
    assert seen.take() == outer[:4] + inner + outer[4:]


def test_P20_several_schedulers_of_one_pipeline():
    """Inversion and generation step different schedulers of the same pipeline."""
    model, inputs = MODELS["unet_sd15"]()
    pipe = Pipe(model, ddim())
    pipe.inverse_scheduler = diffusers.DDIMInverseScheduler()
    with torch.no_grad(), sp.apply(pipe, options(keep={"first_steps": 2})) as handle:
        seen = Precisions(handle, model)
        for scheduler in (pipe.inverse_scheduler, pipe.scheduler, pipe.inverse_scheduler):
            scheduler.set_timesteps(5)
            for t in scheduler.timesteps:
                noise = model(**inputs | {"timestep": t}).sample
                scheduler.step(noise, t, inputs["sample"])
            assert seen.take() == ["window"] * 2 + ["int8"] * 3


# --- forwards that nobody steps ---


def own_loop(model, inputs, scheduler, steps=6, calls=1, as_number=False):
    scheduler.set_timesteps(steps)
    x = inputs["sample"]
    with torch.no_grad():
        for t in scheduler.timesteps:
            for _ in range(calls):
                noise = model(**inputs | {"sample": x, "timestep": t.item() if as_number else t}).sample
            x = scheduler.step(noise, t, x).prev_sample
    return x


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: next(iter(window)))
@pytest.mark.parametrize("before", ["nothing", "a run", "half a run", "a prepared run"])
@pytest.mark.parametrize("as_number", [False, True])
def test_P21_a_loop_with_a_scheduler_of_its_own_is_exact_counted_and_named(before, window, as_number, caplog):
    pipe, _ = sd_pipe()
    inputs = MODELS["unet_sd15"]()[1]
    stock = own_loop(pipe.unet, inputs, ddim())
    if before == "a prepared run":
        # one that begins with the timestep of the loop could not be told from it before the second forward
        pipe.scheduler = diffusers.DDIMScheduler(timestep_spacing="leading")
        pipe.scheduler.set_timesteps(7)
    name = type(pipe.scheduler).__name__
    handle = pipe.set_attn_processor(options(**window))
    if before == "a run":
        draw(pipe, 8)
    elif before == "half a run":
        with pytest.raises(InterruptedError):
            draw(pipe, 8, callback_on_step_end=stop_at_three)
    calls = handle.report().calls
    assert not caplog.records
    assert torch.equal(own_loop(pipe.unet, inputs, ddim(), as_number=as_number), stock)
    report = handle.report()
    assert report.calls == calls and report.fallbacks["unfollowed"] == 6 * len(report.rows)
    assert f"6 forwards of unet belong to no step of {name} (unfollowed)" in str(report)
    assert "pipe.scheduler = scheduler" in report.notes[-1]
    warned = [record for record in caplog.records if "belongs to no step" in record.getMessage()]
    assert len(warned) == 1 and warned[0].levelno == logging.WARNING
    draw(pipe, 8)  # and the pipeline goes on as before
    after = handle.report()
    assert after.calls > calls and after.fallbacks["unfollowed"] == report.fallbacks["unfollowed"]
    handle.reset()
    assert "unfollowed" not in str(handle.report())


def stop_at_three(pipe, step, timestep, tensors):
    if step == 3:
        raise InterruptedError
    return tensors


def test_P21_strict_refuses_forwards_that_nobody_steps():
    pipe, _ = sd_pipe()
    inputs = MODELS["unet_sd15"]()[1]
    with sp.apply(pipe, options(on_unsupported="raise", keep={"first_steps": 1})):
        with pytest.raises(sp.UnsupportedAttentionError, match=r"'unfollowed'.*pipe.scheduler = scheduler"):
            own_loop(pipe.unet, inputs, ddim())
        draw(pipe, 3)


def test_P21_planned_scales_run_dynamic_where_nobody_steps(caplog):
    """Without windows the forwards stay INT8: no plan of another noise level is used, and they are counted."""
    pipe, _ = sd_pipe()
    inputs = MODELS["unet_sd15"]()[1]
    with sp.apply(pipe, options(scaling="timestep")) as handle:
        draw(pipe, 4)
        before = handle.report()
        own_loop(pipe.unet, inputs, ddim(), steps=5)
        after = handle.report()
        grown = [b["dynamic_calls"] - a["dynamic_calls"] for a, b in zip(before.rows, after.rows, strict=True)]
        assert grown == [5] * len(grown) and after.fallbacks == {}
        assert "5 forwards of unet belong to no step" in str(after)
    assert len([record for record in caplog.records if "belongs to no step" in record.getMessage()]) == 1


def test_P22_a_solver_that_never_steps_the_scheduler_is_noticed():
    """The scheduler only gives its timesteps; the first one is where it says that a run begins."""
    pipe, _ = sd_pipe()
    inputs = MODELS["unet_sd15"]()[1]
    with torch.no_grad(), sp.apply(pipe, options(keep={"first_steps": 1})) as handle:
        seen = Precisions(handle, pipe.unet)
        pipe.scheduler.set_timesteps(5)
        for t in pipe.scheduler.timesteps:
            pipe.unet(**inputs | {"timestep": t})
        assert seen.take() == ["window"] + ["unfollowed"] * 4


def test_P21_a_scheduler_that_is_gone_steps_nothing():
    model, inputs = MODELS["unet_sd15"]()
    pipe = Pipe(model, ddim())
    with torch.no_grad(), sp.apply(pipe, options(keep={"first_steps": 2})) as handle:
        own_loop(model, inputs, pipe.scheduler, steps=4)
        pipe.scheduler.set_timesteps(4)
        for t in pipe.scheduler.timesteps[:3]:
            noise = model(**inputs | {"timestep": t}).sample
            pipe.scheduler.step(noise, t, inputs["sample"])
        calls = handle.report().calls
        del pipe
        gc.collect()
        model(**inputs)
        report = handle.report()
        assert report.calls == calls and report.fallbacks["unfollowed"] == len(report.rows)


# --- second passes ---


@pytest.mark.parametrize(
    "window", [{"keep": {"last_steps": 3}}, {"keep": {"noise": (0.0, 0.8)}}, {"keep": {"first_steps": 1}}]
)
@pytest.mark.parametrize("scheduler", ["ddim", "euler", "own ddim"])
def test_P23_a_second_pass_at_another_size_counts_from_where_it_starts(scheduler, window):
    """DDIM is not told that it starts late: the first timestep of the model tells."""
    pipe, _ = sd_pipe()
    if scheduler == "ddim":
        pipe.scheduler = ddim()
    handle = pipe.set_attn_processor(options(**window))
    first = IMG2IMG.from_pipe(pipe, **({"scheduler": ddim()} if scheduler == "own ddim" else {}))
    seen = Precisions(handle, pipe.unet)
    for _ in range(2):
        draw(pipe, 8)
        assert seen.take() == expected(window, pipe.scheduler)
        draw(first, 10, size=24, strength=0.3)
        second = seen.take()
        assert second == expected(window, first.scheduler, start=7) and second[0] == "window"


# --- the scheduler of the pipeline is replaced ---


@pytest.mark.parametrize(
    "how", ["eager", pytest.param("compiled", marks=pytest.mark.slow("compiled models read the same noise level"))]
)
def test_P24_a_scheduler_that_is_replaced_is_followed_at_once(how):
    model, inputs = MODELS["flux"]()
    pipe = Pipe(model, diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))
    with sp.apply(pipe, options(keep={"first_steps": 2, "last_steps": 1})) as handle:
        fast = compiled(model, "aot_eager")[0] if how == "compiled" else model
        denoise(pipe, fast, inputs, steps=6)
        pipe.scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
        denoise(pipe, fast, inputs, steps=4)  # 7 timesteps
        rows = handle.report().rows
        assert all((row["calls"], row["fallbacks"]) == (3 + 4, {"window": 6}) for row in rows), rows


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("window", [{}, {"keep": {"first_steps": 3}}])
def test_P25_compiled_forwards_that_nobody_steps_are_counted(window):
    model, inputs = MODELS["flux"]()
    pipe = Pipe(model, diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))
    other = Pipe(model, diffusers.FlowMatchEulerDiscreteScheduler())  # only looks like a pipeline: it tells nobody
    with sp.apply(pipe, options(scaling="timestep", **window)) as handle:
        fast, counter = compiled(model, "aot_eager")
        denoise(pipe, fast, inputs, steps=5)
        denoise(other, fast, inputs, steps=4)
        denoise(pipe, fast, inputs, steps=5)
        assert counter.frame_count == (3 if window else 1)  # INT8, 16 bit by choice, 16 bit because nobody knows
        report = handle.report()
        assert "4 forwards of transformer belong to no step" in str(report)
        rows = {(row["calls"], tuple(row["fallbacks"].items())) for row in report.rows}
        assert rows == ({(4, (("window", 6), ("unfollowed", 4)))} if window else {(14, ())})


# --- reset ---


@pytest.mark.parametrize("before", ["half a run", "a prepared run", "a run", "another loop"])
def test_P38_after_a_reset_nothing_is_expected_of_a_forward(before):
    """reset() and then anything is what a new handle does: where a broken-off run was does not matter."""
    inputs, found = MODELS["unet_sd15"]()[1], []
    for is_new in (False, True):
        pipe, _ = sd_pipe()
        handle = None if is_new else pipe.set_attn_processor(options(keep={"first_steps": 2}))
        if before == "a prepared run":
            pipe.scheduler.set_timesteps(7)
        elif before == "another loop":
            draw(pipe, 3)
            own_loop(pipe.unet, inputs, ddim())
        elif before == "half a run":
            with pytest.raises(InterruptedError):
                draw(pipe, 8, callback_on_step_end=stop_at_three)
        else:
            draw(pipe, 8)
        if is_new:
            handle = pipe.set_attn_processor(options(keep={"first_steps": 2}))
        else:
            handle.reset()
        timesteps = pipe.scheduler.timesteps
        with torch.no_grad():
            outs = [pipe.unet(**(inputs | {"timestep": timesteps[min(4, len(timesteps) - 1)]})).sample]
        outs += [own_loop(pipe.unet, inputs, ddim()), draw(pipe, 4)]
        report = handle.report()
        found.append((outs, report.calls, dict(report.fallbacks), report.notes))
    (ours, *counts), (new, *wanted) = found
    assert counts == wanted and all(map(torch.equal, ours, new))
