"""diffusers' modular pipelines take the one-liner as all others do: another class, with components that come later."""

from __future__ import annotations

import gc

import diffusers
import pytest
import torch

import sage_processors as sp
from sage_processors.cli import loading


pytest.importorskip("diffusers.modular_pipelines.flux")


@pytest.fixture(scope="module")
def parts():
    components = loading.load_pipeline("tiny_flux", "cpu").components
    gc.collect()  # the scheduler of the pipeline that was loaded would be followed as long as it lives
    return components


@pytest.fixture
def pipe(parts):
    """A FluxModularPipeline of the embedded weights."""
    modular = diffusers.FluxAutoBlocks().init_pipeline()
    modular.update_components(**{name: parts[name] for name in modular.component_names if parts.get(name) is not None})
    modular.set_progress_bar_config(disable=True)
    return modular


def draw(pipe, steps: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size = {"height": 128, "width": 128, "output_type": "pt", "output": "images"}
    return pipe(prompt="a red circle", num_inference_steps=steps, generator=generator, **size)


def test_a_modular_pipeline_runs_in_int8_follows_its_scheduler_and_is_stock_again(pipe):
    stock = draw(pipe)
    with pipe.set_attn_processor(sp.SageAttnProcessor(min_tokens=0, keep=sp.Keep(first_steps=1))) as handle:
        ours = draw(pipe)
        report = handle.report()
    assert isinstance(handle, sp.Handle) and isinstance(pipe, diffusers.ModularPipeline)
    assert len(report.rows) == 5 and report.calls == 2 * 5 and report.fallbacks == {"window": 5}, str(report)
    assert all(row["dynamic_calls"] < row["calls"] for row in report.rows), str(report)  # the third step had a plan
    assert "follows the pipeline's scheduler" in str(report)
    assert not torch.equal(ours, stock) and sp.metrics.psnr(ours, stock).item() > 40
    assert torch.equal(draw(pipe), stock)


def test_a_scheduler_that_a_modular_pipeline_is_given_later_is_followed(pipe):
    with pipe.set_attn_processor(sp.SageAttnProcessor(min_tokens=0, keep=sp.Keep(last_steps=1))) as handle:
        pipe.update_components(scheduler=diffusers.FlowMatchHeunDiscreteScheduler())
        assert [type(each.scheduler) for each in handle.following.followed] == [type(pipe.scheduler)]
        pipe.update_components(scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config))
        draw(pipe, steps=2)
        report = handle.report()
    assert report.fallbacks == {"window": 5} and report.calls == 5, str(report)


def test_a_modular_pipeline_that_has_no_models_yet_is_refused():
    empty = diffusers.FluxAutoBlocks().init_pipeline()
    with pytest.raises(ValueError, match="pipe: got a pipeline without a unet, transformer or controlnet"):
        empty.set_attn_processor(sp.SageAttnProcessor())
