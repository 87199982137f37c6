"""Forwards one by one: which belong to the running step; and threads that share a handle."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import diffusers
import pytest
import torch

import sage_processors as sp
from sage_kernels.planning import state as scales
from sage_processors.diffusion.steps import following
from sage_processors.diffusion.steps.forwards import Forwards
from sage_processors.diffusion.steps.noise_level import noise_levels
from sage_processors.diffusion.steps.windows import Progress
from sage_processors.reporting.event_counter import EventCounter
from tests.diffusion.steps.test_following import SD, ddim, draw, options
from tests.diffusion.test_compile import Pipe, denoise
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import sd_pipe


def progress_of(scheduler, windowed=True, **kwargs):
    progress = Progress(windowed)
    progress.begin(noise_levels(scheduler), 0, scheduler.timesteps, **kwargs)
    return progress


@pytest.mark.parametrize("form", ["t", "thousandths", "reversed", "its own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_P26_models_are_given_the_timestep_in_several_forms(form, dtype):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(20)
    give = {
        "t": lambda t: t,
        "thousandths": lambda t: t / 1000,
        "reversed": lambda t: 1 - t / 1000,
        "its own": lambda t: (t / 1000) / (1 + t / 1000) + 2000,
    }[form]
    progress, forwards = progress_of(scheduler), Forwards("cpu")
    for t in scheduler.timesteps:
        given = give(t.to(dtype))
        assert forwards.belongs(progress, given) and forwards.belongs(progress, given.expand(2))
        assert not forwards.belongs(progress, given + 0.3 * given.abs().clamp_min(1.0))
        progress.finish(torch.ones(()))
    assert not forwards.belongs(progress, give(scheduler.timesteps[-1]))  # the run is over


def test_P26_another_timestep_after_a_step_is_another_scheduler():
    scheduler = ddim()
    scheduler.set_timesteps(10)
    progress, forwards = progress_of(scheduler), Forwards("cpu")
    assert forwards.belongs(progress, scheduler.timesteps[0])
    progress.finish(torch.ones(()))
    assert not forwards.belongs(progress, scheduler.timesteps[1] - 7)
    assert not forwards.belongs(progress, scheduler.timesteps[3])
    assert not forwards.belongs(progress, torch.tensor(torch.nan))
    assert forwards.belongs(progress, int(scheduler.timesteps[1]))
    assert forwards.belongs(progress, None) and not forwards.belongs(progress_of(scheduler, is_told=False), None)


def test_P26_a_timestep_written_in_place_is_another_one():
    scheduler = ddim()
    scheduler.set_timesteps(10)
    progress, forwards = progress_of(scheduler), Forwards("cpu")
    buffer = scheduler.timesteps[:1].clone()
    assert forwards.belongs(progress, buffer) and forwards.belongs(progress, buffer)
    buffer.fill_(float(scheduler.timesteps[1]))
    assert not forwards.belongs(progress, buffer)


# --- threads ---


def in_threads(*works):
    """What functions return, each in a thread of its own."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [work.result(120) for work in [pool.submit(work) for work in works]]


def test_P27_threads_with_pipelines_of_their_own_keep_their_windows():
    pipe, _ = sd_pipe()
    handle = pipe.set_attn_processor(options(keep={"first_steps": 3}))
    pipes = [SD.from_pipe(pipe, scheduler=ddim()) for _ in range(2)]
    for other in pipes:
        other.set_progress_bar_config(disable=True)
    start = threading.Barrier(2)
    in_threads(*(lambda other=other: (start.wait(60), draw(other, 8)) for other in pipes))
    rows = handle.report().rows
    assert all((row["calls"], row["fallbacks"]) == (10, {"window": 6}) for row in rows), rows


def overlapping(pipes, steps=6):
    """Pictures of two runs in two threads whose steps take turns: a step of one, a step of the other."""
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def work(index):
        def after_step(pipe, step, timestep, tensors):
            turns[1 - index].release()
            if step + 1 < steps:
                assert turns[index].acquire(timeout=60)
            return tensors

        assert turns[index].acquire(timeout=60)
        return draw(pipes[index], steps, callback_on_step_end=after_step)

    return in_threads(lambda: work(0), lambda: work(1))


@pytest.mark.parametrize("scaling", ["timestep", "dynamic"])
def test_P39_runs_that_overlap_in_two_threads_are_counted_and_named(scaling, caplog):
    """One model has one plan. Without one, threads have nothing to do with each other."""
    pipe, _ = sd_pipe()
    pipes = [pipe, SD.from_pipe(pipe, scheduler=ddim())]
    pipes[1].set_progress_bar_config(disable=True)
    exact = [draw(each, 6) for each in pipes]
    handle = pipe.set_attn_processor(options(scaling=scaling))
    alone = [draw(each, 6) for each in pipes]
    assert handle.following.overlaps == 0 and "overlap" not in str(handle.report())
    together = overlapping(pipes)
    for picture, by_itself, stock in zip(together, alone, exact, strict=True):
        assert torch.equal(picture, by_itself) == (scaling == "dynamic")
        error, usual = (picture - stock).norm(), (by_itself - stock).norm()
        assert error <= 2 * usual  # another plan, and no worse for it than twice
    if scaling == "dynamic":
        assert handle.following.overlaps == 0
        assert not [record for record in caplog.records if record.name == "sage_processors"]
        return
    # all steps but the first of each run, at least once
    assert handle.following.overlaps >= 10
    assert "steps of runs that overlap in several threads: their planned scales mix" in str(handle.report())
    named = [record for record in caplog.records if "overlap in several threads" in record.getMessage()]
    assert len(named) == 1 and 'scaling="dynamic"' in named[0].getMessage()
    assert all(
        torch.equal(draw(each, 6), picture) for each, picture in zip(pipes, alone, strict=True)
    )  # over with them
    handle.reset()
    assert "overlap" not in str(handle.report())


@pytest.mark.parametrize("other", ["prepared before, run after", "run in a thread that ended"])
def test_P39_runs_one_after_the_other_in_several_threads_do_not_overlap(other):
    pipe, _ = sd_pipe()
    pipes = [pipe, SD.from_pipe(pipe, scheduler=ddim())]
    pipes[1].set_progress_bar_config(disable=True)
    handle = pipe.set_attn_processor(options(scaling="timestep"))
    alone = [draw(each, 4) for each in pipes]
    if other == "prepared before, run after":
        pipes[0].scheduler.set_timesteps(4)
    (found,) = in_threads(lambda: draw(pipes[1], 4))
    assert torch.equal(draw(pipes[0], 4), alone[0]) and torch.equal(found, alone[1])
    assert handle.following.overlaps == 0


def test_P37_a_call_beside_the_end_of_a_step_is_counted(monkeypatch):
    """The counts of a step are added up and cleared: a call of another thread waits, or its count would be lost."""
    model, inputs = MODELS["flux"]()
    pipe = Pipe(model, diffusers.FlowMatchEulerDiscreteScheduler())
    clearing, clear, counts = threading.Event(), scales.clear_step, []

    def clear_slowly(*tensors):
        clearing.set()
        time.sleep(0.5)
        clear(*tensors)

    def call():
        clearing.wait(60)
        with torch.no_grad():
            model(**inputs)

    with sp.apply(pipe, options(scaling="timestep")) as handle:
        denoise(pipe, model, inputs, steps=3)
        counts.append(handle.report().calls)
        monkeypatch.setattr(scales, "clear_step", clear_slowly)
        thread = threading.Thread(target=call)
        thread.start()
        pipe.scheduler.set_timesteps(3)
        thread.join(60)
        monkeypatch.undo()
        assert handle.report().calls == counts[0] + 2


def test_P37_eager_counts_of_many_threads_add_up():
    counter = EventCounter(2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(*[lambda: [counter.add(1) for _ in range(5000)]] * 4)
    finally:
        sys.setswitchinterval(interval)
    assert counter.numbers() == [0, 20_000]


# --- CUDA graphs that others capture ---


def test_replays_are_counted_where_options_want_another_precision():
    """What is captured are operations on the device; here they are made again, as a replay makes them."""
    scheduler = ddim()
    scheduler.set_timesteps(4)
    forwards = Forwards("cpu")
    with pytest.raises(AttributeError):
        forwards.misplaced = 1  # counted, never told
    given = torch.zeros(())
    forwards.mark(True, precision=0)
    for place, (t, precision) in enumerate(zip(scheduler.timesteps, (1, 1, 0, 2), strict=True)):
        forwards.mark(True, precision)
        for _ in range(2):  # guidance
            given.copy_(t)
            forwards.count_captured(given, 0)
        assert forwards.misplaced == (2, 4, 4, 6)[place] and forwards.strays == 0
    given.add_(1)
    forwards.count_captured(given, 2)
    assert (forwards.misplaced, forwards.strays) == (6, 1)  # another timestep in the same step
    forwards.mark(False, precision=1)
    forwards.count_captured(given, 0)
    assert (forwards.misplaced, forwards.strays) == (6, 2)  # of no step: nothing is wanted there
    forwards.zero()
    assert (forwards.misplaced, forwards.strays) == (0, 0)


def test_a_capture_holds_the_step_that_was_entered_last_and_the_report_tells(monkeypatch):
    pipe, _ = sd_pipe()
    inputs = MODELS["unet_sd15"]()[1]
    handle = pipe.set_attn_processor(options(keep={"first_steps": 2}))
    on = []
    monkeypatch.setattr(following, "_is_capturing", lambda: bool(on))
    denoiser, captured = handle._denoisers[0], {}
    count = Forwards.count_captured
    monkeypatch.setattr(
        Forwards, "count_captured", lambda self, t, precision: captured.update(t=t, precision=precision)
    )
    scheduler = pipe.scheduler
    scheduler.set_timesteps(5)
    with torch.no_grad():
        for step, t in enumerate(scheduler.timesteps):
            on[:] = [True] * (step == 3)
            pipe.unet(**inputs | {"timestep": t})
            on.clear()
            scheduler.step(inputs["sample"], t, inputs["sample"])
        assert captured == {"t": scheduler.timesteps[3], "precision": 0}
        assert handle.steps.precision == (True,)  # the run is over
        scheduler.set_timesteps(5)
        for t in scheduler.timesteps:
            count(denoiser.forwards, t, captured["precision"])  # as a replay
            scheduler.step(inputs["sample"], t, inputs["sample"])
    assert "2 replays of a CUDA graph of unet ran in steps" in str(handle.report())
    handle.remove()
