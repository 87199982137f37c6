"""The swap on real pipelines: one line in, one line out, scales that follow the scheduler."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import diffusers
import pytest
import torch

import sage_kernels
import sage_processors as sp
from sage_processors.diffusion.calls import sage_class
from tests.diffusion.calls.test_processors import sdpa_as_op, sqnr_db
from tests.diffusion.test_apply import EVERYTHING, processors_of
from tests.support.repository import OPTIONAL, ROOT
from tests.support.tiny_pipelines import PIPES, flux_pipe


@pytest.mark.parametrize("name", PIPES)
def test_pipeline_one_line_in_and_out(name, monkeypatch):
    pipe, run = PIPES[name]()
    parts = {key: part for key, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    denoisers = [key for key in parts if key != "vae"]
    before = {key: processors_of(part) for key, part in parts.items()}
    scheduler, scheduler_class = pipe.scheduler, type(pipe.scheduler)
    stock = run()

    handle = pipe.set_attn_processor(EVERYTHING)
    assert processors_of(parts["vae"]) == before["vae"] if "vae" in parts else True
    assert all(sage_class.is_sage(p) for key in denoisers for p in processors_of(parts[key]).values())
    int8 = run()
    assert sqnr_db(int8, stock) > 25 and not torch.equal(int8, stock)
    report = handle.report()
    layers = [f"{key}.{layer}" for key in denoisers for layer in before[key]]
    assert [row["layer"] for row in report.rows] == layers
    assert all(row["calls"] > 0 and row["scaling"] == "timestep" and row["fallbacks"] == {} for row in report.rows), (
        str(report)
    )

    monkeypatch.setattr(sage_kernels, "sage_attention", sdpa_as_op)
    assert torch.equal(run(), stock)
    monkeypatch.undo()

    handle.remove()
    handle.remove()
    for key, part in parts.items():
        now = processors_of(part)
        assert all(now[layer] is before[key][layer] for layer in now) and now.keys() == before[key].keys()
        assert not part._forward_pre_hooks
    assert pipe.scheduler is scheduler and type(scheduler) is scheduler_class
    assert torch.equal(run(), stock)
    assert "removed" in str(handle.report())
    with pytest.raises(RuntimeError, match="apply again"):
        handle.refresh()


def test_pipeline_plans_follow_the_scheduler_and_frozen_scales():
    pipe, run = flux_pipe()
    handle = pipe.set_attn_processor(EVERYTHING)
    run(steps=6)
    first = handle.report()
    assert all((row["calls"], row["dynamic_calls"]) == (6, 1) for row in first.rows), str(first)
    handle.freeze_scales()
    run(steps=6, seed=1)
    second = handle.report()
    # this time even the first step is planned, from the table at the same noise level
    assert all((row["calls"], row["dynamic_calls"]) == (12, 1) for row in second.rows), str(second)
    assert first.calls == 12 and first.bytes_saved > 0 and second.bytes_saved == 2 * first.bytes_saved


def test_pipeline_forward_hook_does_not_advance_a_second_time():
    pipe, run = flux_pipe()
    handle = pipe.set_attn_processor(EVERYTHING)
    advances = []
    state = handle._denoisers[0].state
    original = state.advance
    state.advance = lambda *levels: (advances.append([round(float(u), 4) for u in levels]), original(*levels))
    run(steps=4)
    sigmas = pipe.scheduler.sigmas
    levels = (sigmas / ((1 - sigmas) ** 2 + sigmas**2).sqrt())[:-1]
    assert [a[0] for a in advances] == pytest.approx(levels.tolist(), abs=1e-3)


@pytest.mark.parametrize("when", ["between runs", "told by refresh"])
def test_pipeline_scheduler_replaced_after_the_swap(when):
    pipe, run = flux_pipe()
    handle = pipe.set_attn_processor(EVERYTHING)
    old = pipe.scheduler
    pipe.scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    if when == "told by refresh":
        handle.refresh()
        assert type(old) is diffusers.FlowMatchEulerDiscreteScheduler
    torch.manual_seed(0)
    pipe.scheduler.set_timesteps(5)
    x = torch.randn(1, 64, 16)
    ids = torch.zeros(64, 3)
    embeds = {
        "encoder_hidden_states": torch.randn(1, 12, 32),
        "pooled_projections": torch.randn(1, 32),
        "txt_ids": torch.zeros(12, 3),
    }
    with torch.no_grad():
        for t in pipe.scheduler.timesteps:
            noise = pipe.transformer(hidden_states=x, timestep=t[None] / 1000, img_ids=ids, **embeds).sample
            x = pipe.scheduler.step(noise, t, x).prev_sample
    report = handle.report()
    assert type(old) is diffusers.FlowMatchEulerDiscreteScheduler
    assert all((row["calls"], row["dynamic_calls"]) == (9, 1) for row in report.rows), str(report)


def test_handle_lives_as_long_as_the_pipeline():
    pipe, run = flux_pipe()
    pipe.set_attn_processor(EVERYTHING)  # nobody keeps the handle
    gc.collect()
    run()
    assert sp.handle_of(pipe).report().calls == 8
    gone = weakref.ref(pipe.transformer)
    del pipe, run
    gc.collect()
    assert gone() is None


def test_P31_a_handle_whose_pipeline_is_gone_says_so():
    pipe, run = flux_pipe()
    handle, model = pipe.set_attn_processor(EVERYTHING), pipe.transformer
    del pipe, run
    gc.collect()
    assert "was garbage-collected" in str(handle.report())
    with pytest.raises(RuntimeError, match="pipeline was garbage-collected.*keep a reference"):
        handle.refresh()
    assert handle.report().rows and sp.handle_of(model) is handle
    handle.remove()
    assert not any(sage_class.is_sage(p) for p in processors_of(model).values())


IMPORTS = """
import sys, torch
before = {{m.split('.')[0] for m in sys.modules}}
{first}
assert ("sage_processors" in sys.modules) == ("sage" in "{order}".split()[0])
{second}
from diffusers import DiffusionPipeline, ModularPipeline
for kind in (DiffusionPipeline, ModularPipeline):
    assert kind.set_attn_processor.__module__.startswith("sage_processors")
import importlib.util, diffusers.pipelines.pipeline_utils as utils
assert "Sage" not in type(utils.__spec__.loader).__name__ and "Patching" not in type(utils.__spec__.loader).__name__
"""


@pytest.mark.slow("a process each; test_import_boundaries imports us first, this module diffusers")
@pytest.mark.parametrize(
    "order",
    [
        "pipeline_utils sage_processors",
        "sage_processors pipeline_utils",
    ],
)
def test_pipeline_method_exists_in_every_import_order(order):
    light = f"assert not {{m.split('.')[0] for m in sys.modules}} & ({set(OPTIONAL)!r} - before)"
    lines = {
        "sage_processors": "import sage_processors, sage_kernels\n" + (light if order.startswith("sage") else ""),
        "pipeline_utils": "import diffusers.pipelines.pipeline_utils",
    }
    first, second = (lines[name] for name in order.split())
    code = IMPORTS.format(first=first, second=second, order=order)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": paths}, cwd="/")


def test_pipeline_method_of_somebody_else_is_left_alone(monkeypatch):
    from sage_processors.diffusion.host.pipeline_method import add_pipeline_method

    theirs = object()
    monkeypatch.setattr(diffusers.DiffusionPipeline, "set_attn_processor", theirs)
    add_pipeline_method()
    assert diffusers.DiffusionPipeline.set_attn_processor is theirs
