"""Same seed, same picture: what a run draws hangs on its inputs and options, not on what this handle drew before."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from diffusers import FlowMatchEulerDiscreteScheduler

import sage_processors as sp
from sage_kernels.planning.rules import FROM_TABLE, NEED_RUNS
from sage_processors.diffusion.calls import processors
from tests.diffusion.test_compile import Pipe, compiled
from tests.support.outliers import varying_outliers
from tests.support.tiny_models import MODELS


RECIPES = ("qk_int8_pv_bf16", "qk_int8_pv_fp8")
PLANNED = ("timestep", "delayed", "static", "sigma_power")
STEPS = 6  # row maxima are kept from the fourth step on
BATCHED = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance")


def options(**given):
    return sp.SageAttnProcessor(min_tokens=0, **given)


class Drawing:
    """A pipeline of a small FLUX, and pictures of it: A, and B of other noise, prompt, size, batch and steps."""

    def __init__(self, device="cpu", dtype=torch.float32):
        self.model, inputs = MODELS["flux"]()
        self.model.to(device, dtype)
        self.inputs = {
            n: x.to(device, dtype if x.is_floating_point() else x.dtype) if isinstance(x, torch.Tensor) else x
            for n, x in inputs.items()
        }
        self.pipe = Pipe(self.model, FlowMatchEulerDiscreteScheduler())

    def _of(self, seed, size=1.0, batch=1):
        generator = torch.Generator().manual_seed(seed)
        inputs = dict(self.inputs)
        for name in ("hidden_states", "encoder_hidden_states"):
            noise = torch.randn(inputs[name].shape, generator=generator) * size
            inputs[name] = noise.to(inputs[name].device, inputs[name].dtype)
        repeated = {n: inputs[n].repeat(batch, *[1] * (inputs[n].dim() - 1)) for n in BATCHED if n in inputs}
        return inputs | repeated

    @torch.no_grad()
    def draw(self, seed, *, model=None, steps=STEPS, guided=False, pipe=None, size=1.0, batch=1):
        model, scheduler = self.model if model is None else model, (pipe or self.pipe).scheduler
        inputs, other = self._of(seed, size, batch), self._of(seed + 1000, size, batch)
        scheduler.set_timesteps(steps)
        latents = inputs["hidden_states"]
        for t in scheduler.timesteps:
            now = {"hidden_states": latents, "timestep": (t.reshape(1) / 1000).repeat(batch).to(latents)}
            noise = model(**inputs | now).sample
            if guided:
                without = model(**other | now).sample
                noise = without + 3.0 * (noise - without)
            latents = scheduler.step(noise, t, latents).prev_sample
        return latents.clone()

    def a(self, **given):
        return self.draw(1, **given)

    def b(self, **given):
        return self.draw(2, **{"steps": 4, "size": 8.0, "batch": 2} | given)


def is_same_again(a, b):
    """Whether A is A again after B."""
    first = a()
    other = b()
    assert torch.isfinite(other).all()
    return torch.equal(first, a())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scaling", [*PLANNED, "per_token", "per_block", "per_head"])
def test_Q10_a_picture_is_the_same_again_after_another(scaling, recipe):
    drawing = Drawing()
    with sp.apply(drawing.pipe, options(scaling=scaling, recipe=recipe)) as handle:
        assert is_same_again(drawing.a, drawing.b)
        assert handle.report().calls == 2 * (2 * STEPS + 4)
        if scaling in PLANNED:  # the first step of each run, and no other
            assert {row["dynamic_calls"] for row in handle.report().rows} == {3}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scaling", FROM_TABLE)
def test_Q11_frozen_scales_are_what_every_run_starts_from(scaling, recipe):
    """Also after a run of another shape, for whose calls the first step's plan was none."""
    drawing = Drawing()
    with sp.apply(drawing.pipe, options(scaling=scaling, recipe=recipe)) as handle:
        cold = drawing.a()
        drawing.draw(3)
        assert ("are not frozen" in str(handle.report())) == (scaling in NEED_RUNS)
        handle.freeze_scales()
        assert "are frozen" in str(handle.report())
        before = handle._denoisers[0].state.snapshot()
        assert is_same_again(drawing.a, drawing.b)
        after = handle._denoisers[0].state.snapshot()
        assert all(torch.equal(before[name], after[name]) for name in ("table", "table_run"))
        warm = drawing.a()
        assert not torch.equal(warm, cold)  # a first step with a plan
        handle.reset()
        assert torch.equal(drawing.a(), cold)
    assert (warm - cold).norm() < 0.05 * cold.norm()


def test_Q11_a_loaded_table_is_frozen(tmp_path):
    drawing, path = Drawing(), tmp_path / "scales.safetensors"
    with sp.apply(drawing.pipe, options()) as handle:
        drawing.draw(3)
        handle.save_scales(path)
        handle.freeze_scales()
        expected = drawing.a()
    with sp.apply(drawing.pipe, options()) as handle:
        drawing.b()
        handle.load_scales(path)
        assert torch.equal(drawing.a(), expected)
        assert is_same_again(drawing.a, drawing.b)
        handle.save_scales(tmp_path / "again.safetensors")
    with sp.apply(drawing.pipe, options()) as handle:
        handle.load_scales(tmp_path / "again.safetensors")
        assert torch.equal(drawing.a(), expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scaling", ["timestep", "static"])
@pytest.mark.parametrize("frozen", [False, True])
def test_Q12_guidance_with_two_calls_a_step(scaling, recipe, frozen):
    drawing = Drawing()
    with sp.apply(drawing.pipe, options(scaling=scaling, recipe=recipe)) as handle:
        if frozen:
            drawing.draw(3, guided=True)
            handle.freeze_scales()
        assert is_same_again(lambda: drawing.a(guided=True), lambda: drawing.b(guided=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_Q13_two_pipelines_that_share_a_model(recipe):
    drawing = Drawing()
    other = Pipe(drawing.model, drawing.pipe.scheduler)
    with sp.apply(drawing.pipe, options(recipe=recipe)):
        assert is_same_again(drawing.a, lambda: drawing.b(pipe=other))
    with sp.apply(drawing.pipe, options(recipe=recipe)):
        expected = drawing.a()
    with sp.apply(other, options(recipe=recipe)):
        drawing.b()
        assert torch.equal(drawing.a(pipe=other), expected)


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scaling", ["timestep", "delayed", "static"])
@pytest.mark.parametrize("rotation", ["none", "auto"])
def test_Q14_after_a_run_that_was_broken_off(scaling, recipe, rotation):
    """Half a step is no step: its statistics and row maxima are nobody's."""
    drawing, calls = Drawing(), []

    def fails(module, args, kwargs):
        calls.append(module)
        if len(calls) in (1, 5):
            raise Broken

    with sp.apply(drawing.pipe, options(scaling=scaling, recipe=recipe, rotation=rotation)) as handle:
        first = drawing.a()
        hook = drawing.model.single_transformer_blocks[0].register_forward_pre_hook(fails, with_kwargs=True)
        for _ in range(2):
            with pytest.raises(Broken):
                drawing.b(size=50.0)
        hook.remove()
        assert torch.equal(drawing.a(), first)
        assert handle.report().calls > 2 * 2 * STEPS


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scaling", ["timestep", "delayed"])
def test_Q15_compiled_models(scaling, recipe):
    drawing = Drawing()
    torch._dynamo.reset()
    with sp.apply(drawing.pipe, options(scaling=scaling, recipe=recipe)) as handle:
        fast, counter = compiled(drawing.model, "aot_eager")
        assert is_same_again(lambda: drawing.a(model=fast), lambda: drawing.b(model=fast, batch=1))
        if scaling == "timestep":
            handle.freeze_scales()
            assert is_same_again(lambda: drawing.a(model=fast), lambda: drawing.b(model=fast, batch=1))
        assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_Q15_pictures_on_a_gpu(recipe):
    """Where one launch plans the step."""
    drawing = Drawing("cuda", torch.bfloat16)
    with sp.apply(drawing.pipe, options(recipe=recipe)) as handle:
        assert is_same_again(drawing.a, drawing.b)
        handle.freeze_scales()
        assert is_same_again(drawing.a, drawing.b)
        fast = torch.compile(drawing.model, mode="reduce-overhead")
        assert is_same_again(lambda: drawing.a(model=fast), lambda: drawing.b(model=fast, batch=1))
    torch._dynamo.reset()


# --- a model without a scheduler ---


@torch.no_grad()
def walk(drawing, seed, times, *, size=1.0, batch=1, model=None):
    inputs = drawing._of(seed, size, batch)
    model = drawing.model if model is None else model
    return torch.stack([model(**inputs | {"timestep": torch.full((batch,), t)}).sample for t in times])


DOWN, SHORT, UP = [1.0, 0.8, 0.6, 0.4, 0.2, 0.1], [0.7, 0.3], [0.1, 0.3, 0.6, 0.9]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scaling", ["timestep", "delayed"])
@pytest.mark.parametrize("told", [False, True])
def test_Q16_a_model_without_a_pipeline_tells_runs_by_its_timesteps(scaling, recipe, told):
    drawing = Drawing()
    with sp.apply(drawing.model, options(scaling=scaling, recipe=recipe)) as handle:

        def run(seed, times, **given):
            if told:
                handle.new_run()
            return walk(drawing, seed, times, **given)

        for times, other in ((DOWN, SHORT), (UP, UP), ([0.5], [0.5]), (DOWN, DOWN[:2])):
            walk(drawing, 5, [0.95, 0.99] if times is UP else [0.05, 0.04])  # the end of a run before
            first = run(1, times)
            for batch in (2, 1):  # of another shape, whose plan would not be used; and of this one
                run(2, other, size=8.0, batch=batch)
                assert torch.equal(run(1, times), first), times
        rows = handle.report().rows
        assert all(0 < row["dynamic_calls"] < row["calls"] for row in rows)
        # rows are kept only where the host knows of the runs
        kept = [site["lagged"] for site in handle._denoisers[0].state.summary()]
        assert all(n > 0 for n in kept) if told and recipe == RECIPES[1] else not any(kept)


def test_Q16_a_pipeline_needs_no_word_of_its_runs():
    drawing = Drawing()
    with sp.apply(drawing.pipe, options()) as handle, pytest.raises(ValueError, match="scheduler says where a run"):
        handle.new_run()


# --- rotation ---


@pytest.mark.parametrize("scaling", ["timestep", "dynamic"])
@pytest.mark.parametrize("probed", [False, True])
def test_Q17_rotation_is_decided_by_the_run_itself(scaling, probed, monkeypatch):
    """B has outliers that a rotation spreads, A has none; a probe of the user's goes on over all runs."""
    drawing, attend, hard = Drawing(), processors._attend, []

    def harder(query, key, *rest):
        return attend(*(varying_outliers(x, 16.0 if hard else 1.0) for x in (query, key)), *rest)

    monkeypatch.setattr(processors, "_attend", harder)

    def draw(is_hard):
        hard[:] = [1] * is_hard
        before = [row["rotated_calls"] for row in handle.report().rows]
        picture = drawing.a()
        return picture, [row["rotated_calls"] - n for row, n in zip(handle.report().rows, before, strict=True)]

    with sp.apply(drawing.pipe, options(scaling=scaling, rotation="auto")) as handle:
        if probed:
            handle.probe(every=1)
        (a, plain), (b, rotated) = draw(False), draw(True)
        (a_again, plain_again), (b_again, _) = draw(False), draw(True)
    assert plain == plain_again == [0, 0] and max(rotated) == STEPS - 1
    assert torch.equal(a, a_again) and torch.equal(b, b_again)


# --- the option by name, and errors ---


def test_Q18_adaptive_scaling_goes_on_from_run_to_run():
    drawing = Drawing()
    with sp.apply(drawing.pipe, options(scaling="timestep_adaptive")) as handle:
        first = drawing.a()
        second = drawing.a()
        assert not torch.equal(first, second)  # planned from the first one, step by step
        assert (first - second).norm() < 0.05 * first.norm()
        assert {row["dynamic_calls"] for row in handle.report().rows} == {1}
        handle.reset()
        assert torch.equal(drawing.a(), first)
        handle.freeze_scales()
        assert is_same_again(drawing.a, drawing.b)
    with sp.apply(drawing.pipe, options()):
        assert torch.equal(drawing.a(), first)  # a first run is what the default draws


def test_Q19_freezing_says_what_it_cannot_do():
    drawing = Drawing()
    with sp.apply(drawing.pipe, options()) as handle:
        with pytest.raises(ValueError, match="got no scales yet, expected a run before"):
            handle.freeze_scales()
        drawing.a()
        handle.freeze_scales()
        handle.reset()
        with pytest.raises(ValueError, match="got no scales yet"):
            handle.freeze_scales()
    with pytest.raises(RuntimeError, match="removed"):
        handle.freeze_scales()
    for scaling in ("delayed", "per_block"):
        with sp.apply(drawing.pipe, options(scaling=scaling)) as handle:
            drawing.a()
            with pytest.raises(ValueError, match=f"got scaling='{scaling}', which plans nothing from other runs"):
                handle.freeze_scales()


def test_Q19_layers_that_come_after_freezing_are_frozen_too():
    """What an IP-Adapter or a refresh swaps anew goes on from the table."""
    drawing = Drawing()
    with sp.apply(drawing.pipe, options()) as handle:
        drawing.draw(3)
        handle.freeze_scales()
        expected, model = drawing.a(), drawing.model
        slow = next(name for name in model.attn_processors if "single" in name)
        module = model.get_submodule(slow.removesuffix(".processor"))
        module.processor, ours = (lambda *_, **__: None), module.processor
        handle.refresh()
        assert handle._denoisers[0].state.frozen
        module.processor = ours
        handle.refresh()
        drawing.b()
        assert torch.equal(drawing.a(), expected)
