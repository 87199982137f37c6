"""Skip lists in CUDA graphs: the pictures, and the numbers in the report, of eager forwards.

What stands in for captures on a CPU is in tests/support/cpu_graphs.py; the same runs on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import diffusers
import pytest
import torch

import sage_processors as sp
from sage_kernels.ops import skip_state
from sage_kernels.planning import skip_lists
from sage_processors.diffusion.graphs.model_graphs import WARM_UP, ModelGraphs
from tests.diffusion.graphs.test_block_graphs import outside
from tests.diffusion.graphs.test_model_graphs import Looking
from tests.diffusion.test_same_seed import Drawing
from tests.support.cpu_graphs import Recorder, captures
from tests.support.tiny_pipelines import flux_pipe


SKIP = sp.SageAttnProcessor(min_tokens=0, skip=sp.Skip(limit=0.9, every=3, first_steps=1))
STEPS = 12


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(skip_state, "REFERENCE_BLOCK", (4, 4))
        monkeypatch.setattr(skip_lists, "LEAST_TILES", 4)


def drawn(run, config=SKIP, recorder=None, prepare=lambda drawing, recorder: None):
    """Return what `run(drawing, handle)` draws, the report's numbers of lists, and the graphs, None if eager."""
    drawing = Drawing()
    with sp.apply(drawing.pipe, config) as handle:
        graphs = None
        if recorder is not None:
            graphs, recorder = captures(handle, recorder=recorder)
        prepare(drawing, recorder)
        pictures = run(drawing, handle)
        kept = ("calls", "dense", "skipped_fraction", "lost_mean", "lost_max", "beyond_limit")
        numbers = [[row[name] for name in kept] for row in handle.report().rows]
        return pictures, numbers, graphs


def is_same(run, config=SKIP, **given):
    """Assert that graphs draw and count what eager forwards do. Returns the graphs."""
    pictures, numbers, _ = drawn(run, config)
    found, counted, graphs = drawn(run, config, recorder=Recorder(), **given)
    assert len(pictures) == len(found) and all(map(torch.equal, pictures, found))
    assert counted == numbers and any(row[2] > 0 for row in numbers)
    assert not graphs.differing
    return graphs


def several(drawing, handle):
    return [drawing.draw(seed, steps=STEPS) for seed in range(4)]


def test_pictures_with_lists_are_those_of_eager_forwards():
    """A graph for steps with lists, and one for the first and last steps, which have none."""
    graphs = is_same(several)
    assert graphs.eager == {"warm_up": WARM_UP} and graphs.record.captures == 2


@pytest.mark.parametrize("compensate", [False, True])
def test_each_call_of_guidance_reads_its_own_lists(compensate):
    config = dataclasses.replace(SKIP, skip=dataclasses.replace(SKIP.skip, compensate=compensate, last_steps=0))
    graphs = is_same(lambda drawing, _: [drawing.draw(seed, steps=STEPS, guided=True) for seed in range(2)], config)
    assert graphs.record.captures == 4 and graphs.eager == {"warm_up": 2 * WARM_UP}


def test_another_size_between():
    """Its run drops the lists of the first; the graph brings them back, void."""

    def run(drawing, handle):
        sizes = [{}, {}, {"batch": 2}, {"batch": 2}, {}, {"guided": True}, {}]
        return [drawing.draw(seed, steps=STEPS, **size) for seed, size in enumerate(sizes)]

    graphs = is_same(run)
    assert set(graphs.eager) == {"warm_up"} and graphs.replays > 4 * STEPS


def test_blocks_with_lists_where_the_forward_waits():
    graphs = is_same(several, prepare=lambda drawing, recorder: recorder.waits_in(outside(drawing.model)))
    assert not graphs.replays and graphs.block_replays > len(graphs.blocks) * 2 * STEPS


def test_blocks_with_lists_beside_a_cache_of_the_first_block():
    """Whole steps leave the other blocks out; their next call measures what was due meanwhile."""
    found = []
    for recorder in (None, Recorder()):
        pipe, draw = flux_pipe()
        config = dataclasses.replace(SKIP, skip=dataclasses.replace(SKIP.skip, limit=0.3))
        with sp.apply(pipe, config) as handle:
            if recorder is not None:
                graphs, _ = captures(handle, recorder=recorder)
            pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.05))
            pictures = [draw(steps=STEPS, seed=seed) for seed in range(4)]
            found.append((pictures, [(row["calls"], row["dense"]) for row in handle.report().rows]))
            pipe.transformer.disable_cache()
    assert all(map(torch.equal, found[0][0], found[1][0])) and found[0][1] == found[1][1]
    assert graphs.block_replays > STEPS and not graphs.differing


def test_an_eager_call_within_a_step_is_counted():
    """Another forward before the captured one, here under a mode, takes its place among the calls of a step."""

    def run(drawing, handle):
        found = several(drawing, handle)

        def at_fourth(*args, **kwargs):
            progress = handle.following.active.progress
            if progress.taken == 4 and len(found) == 4:
                with Looking():
                    found.append(drawing.model(*args, **kwargs).sample)
            return drawing.model(*args, **kwargs)

        found.append(drawing.draw(7, steps=STEPS, model=at_fourth))
        return found

    graphs = is_same(run)
    assert graphs.eager["observed"] == 1 and graphs.eager["warm_up"] == WARM_UP + 1


def test_calls_of_other_shapes_before_one_change_its_number():
    """The second call of a step was captured as the first of its shape; where it is the second of it, it is eager."""

    def run(drawing, handle):
        pairs = [(1, 2)] * 2 + [(2, 2)] * 2 + [(1, 2)]
        return [in_pairs(drawing, seed, batches) for seed, batches in enumerate(pairs)]

    graphs = is_same(run)
    assert graphs.eager["skip"] > STEPS // 2 and graphs.replays > STEPS


def in_pairs(drawing, seed, batches):
    """Draw with two calls in each step, of samples of `batches`; both of the first noise."""

    def twice(*args, hidden_states, **kwargs):
        first, second = (drawing._of(seed, batch=batch) for batch in batches)
        now = {"timestep": kwargs["timestep"][:1]}
        results = [
            drawing.model(**given | {"timestep": now["timestep"].repeat(len(given["hidden_states"]))}).sample
            for given in (first | {"hidden_states": hidden_states}, second)
        ]
        return Sample(results[0] + 0.1 * results[1][:1])

    return drawing.draw(seed, steps=STEPS, model=twice, batch=batches[0])


class Sample(NamedTuple):
    sample: torch.Tensor


def test_lists_that_an_eager_call_made_anew_are_followed():
    """Another size drops the lists of the first, and the first eager call makes others than the graph had."""

    def run(drawing, handle):
        found = [*several(drawing, handle), drawing.draw(0, steps=STEPS, batch=2), drawing.draw(1, steps=STEPS)]
        found.append(drawing.draw(2, steps=STEPS, batch=2))

        def otherwise(*args, **kwargs):  # a kind of call that was not warmed up
            more = {"return_dict": True} if handle.following.active.progress.taken == 1 else {}
            return drawing.model(*args, **kwargs, **more)

        return [*found, drawing.draw(3, steps=STEPS, model=otherwise), *several(drawing, handle)]

    graphs = is_same(run)
    # steps with lists of the first size once more; what a replay reads here is always what is kept
    assert graphs.eager == {"warm_up": 2 * WARM_UP + 1} and graphs.record.captures == 5


def test_a_capture_before_its_lists_are_made_waits():
    """In runs of three steps the one with lists is captured in the third run, where another size has dropped them."""

    def run(drawing, handle):
        batches = [1, 1, 2, 2, 1, 1]
        return [drawing.draw(seed, steps=3, batch=batch) for seed, batch in enumerate(batches)]

    graphs = is_same(run)
    assert graphs.eager["warm_up"] == 2 * WARM_UP + 1


def test_no_room_for_lists_is_eager(monkeypatch):
    monkeypatch.setattr(skip_lists.SkipLists.__init__, "__kwdefaults__", {
        **skip_lists.SkipLists.__init__.__kwdefaults__, "memory": 300,
    })  # fmt: skip
    pictures, numbers, _ = drawn(several)
    found, counted, graphs = drawn(several, recorder=Recorder())
    assert all(map(torch.equal, pictures, found)) and counted == numbers
    assert any("memory" in row[1] for row in counted) and graphs.eager["skip"] > 0


def test_an_exception_amid_a_run_leaves_nothing():
    def run(drawing, handle):
        first = several(drawing, handle)
        step, taken = drawing.pipe.scheduler.step, []

        def broken(*args, **kwargs):
            taken.append(1)
            if len(taken) == 7:
                raise RuntimeError("broken off")
            return step(*args, **kwargs)

        drawing.pipe.scheduler.step = broken
        with pytest.raises(RuntimeError, match="broken off"):
            drawing.draw(9, steps=STEPS)
        drawing.pipe.scheduler.step = step
        return [*first, *several(drawing, handle)]

    is_same(run)


def test_a_replay_with_other_lists_is_found():
    """One that leaves the lists as they were is dropped, and then those of the two blocks."""

    class Forgetful(Recorder):
        def again(self, run):
            lists = self.graphs.lists
            before = [x.clone() for x in lists.tensors()]
            found = run()
            for x, copy in zip(lists.tensors(), before, strict=True):
                x.copy_(copy)
            return found

    recorder = Forgetful()

    def prepare(drawing, given):
        given.graphs = drawing.model._compiled_call_impl

    _, _, graphs = drawn(several, recorder=recorder, prepare=prepare)
    assert graphs.differing == 3 and graphs.eager["differs"]


@pytest.mark.gpu
@pytest.mark.parametrize("guided", [False, True])
def test_P66_pictures_with_lists_from_graphs_on_a_gpu(guided):
    found = []
    for with_graphs in (False, True):
        drawing = Drawing("cuda", torch.bfloat16)
        with sp.apply(drawing.pipe, SKIP) as handle:
            denoiser = handle._denoisers[0]
            if with_graphs:
                denoiser.use_graphs(ModelGraphs(handle, denoiser))
            pictures = [drawing.draw(seed, steps=STEPS, guided=guided) for seed in range(4)]
            found.append((pictures, [(row["calls"], row["dense"]) for row in handle.report().rows]))
            if with_graphs:
                graphs = denoiser.graphs
                graphs.settle()
                assert graphs.replays > 2 * STEPS and not graphs.differing and set(graphs.eager) == {"warm_up"}
    (eager, numbers), (ours, counted) = found
    assert all(map(torch.equal, eager, ours)) and numbers == counted
