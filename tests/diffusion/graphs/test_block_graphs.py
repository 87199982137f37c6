"""Graphs of repeated blocks: what they compute, what they leave alone, and that a failure leaves no trace."""

from __future__ import annotations

import copy
import pickle

import diffusers
import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.graphs import call_graphs, capture, comparison, model_graphs, places
from sage_processors.diffusion.graphs.blocks import BlockCall, repeated_blocks
from sage_processors.diffusion.graphs.model_graphs import WARM_UP
from tests.support.cpu_graphs import Recorder, captures, options
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe


FORWARDS = WARM_UP + 4
EIGHT_BIT = {"format": "int8", "min_features": 0}
POPULAR = ["flux", "qwen_image_padded", "chroma", "mochi", "lumina2", "unet_sd15", "wan_t2v"]


def moved(inputs, step):
    """The inputs of another step: other latents, another timestep."""
    found = dict(inputs)
    for name in ("hidden_states", "sample", "timestep"):
        if isinstance(found.get(name), torch.Tensor):
            found[name] = found[name] * (1 - step / 50)
    return found


def forwards(model, inputs, number=FORWARDS, first=0):
    with torch.no_grad():
        return [model(**moved(inputs, first + i), return_dict=False)[0] for i in range(number)]


def same(found, wanted):
    flat = [torch.utils._pytree.tree_leaves(x) for x in (found, wanted)]
    return len(flat[0]) == len(flat[1]) and all(map(torch.equal, *flat))


def outside(model):
    """A module outside of the blocks, in which the forward waits."""
    own = {id(x) for block in repeated_blocks(model) for x in block.modules()}
    return next(x for x in model.modules() if id(x) not in own and not list(x.children()) and x is not model)


@pytest.mark.parametrize(
    "name", [x if x == "flux" else pytest.param(x, marks=pytest.mark.slow("as flux")) for x in POPULAR]
)
def test_a_forward_that_waits_has_graphs_of_its_blocks(name):
    """The same bits and counts as without graphs."""
    model, inputs = MODELS[name]()
    with sp.apply(model, options(linears=EIGHT_BIT)) as handle:
        handle.new_run()
        wanted, expected = forwards(model, inputs), handle.report()
    with sp.apply(model, options(linears=EIGHT_BIT)) as handle:
        graphs, recorder = captures(handle)
        recorder.waits_in(outside(model))
        handle.new_run()
        found, report = forwards(model, inputs), handle.report()
        assert same(found, wanted)
        assert graphs.eager == {"warm_up": WARM_UP, "not_capturable": 1} and graphs.partly == 3
        assert graphs.block_replays == 3 * len(graphs.blocks) > 0 and not graphs.differing
        assert (report.calls, report.linears.calls) == (expected.calls, expected.linears.calls)
        assert report.fallbacks == expected.fallbacks and report.linears.fallbacks == expected.linears.fallbacks
        assert "cpu_graphs.py" in graphs.failures.lines[type(model).__name__]  # where it waited
        assert "not captured:" in str(report)
    assert not any("forward" in block.__dict__ for block in repeated_blocks(model))


def pyramid():
    return diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 2000),
        spatial_attention_block_identifiers=("transformer_blocks",), current_timestep_callback=lambda: 500,
    )  # fmt: skip


CACHES = {  # a function that makes the options, and whether hooks sit between blocks, and not inside of them
    "first block": (lambda: diffusers.FirstBlockCacheConfig(threshold=0.03), True),
    "magnitudes": (
        lambda: diffusers.MagCacheConfig(mag_ratios=[1.0] * 14, num_inference_steps=14, max_skip_steps=1),
        True,
    ),
    "taylor series": (lambda: diffusers.TaylorSeerCacheConfig(cache_interval=3), False),
    "pyramid": (pyramid, False),
}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_decides_what_runs_and_blocks_without_hooks_inside_have_graphs(name, first):
    """The cache is enabled before or after the swap; results are those of the cache without graphs."""
    config, between = CACHES[name]
    found = []
    for graphs in (False, True):
        model, inputs = MODELS["flux"]()
        if first:
            model.enable_cache(config())
        with sp.apply(model, options()) as handle:
            made = captures(handle)[0] if graphs else None
            if not first:
                model.enable_cache(config())
            handle.new_run()
            with model.cache_context("cond"):
                found.append(forwards(model, inputs, 14))
        if made is not None:
            hooked = made.block_eager["hooks"] if made.partly else made.eager["hooks"]
            assert made.replays == 0 and (made.block_replays > made.partly >= 2 if between else hooked >= 4)
        model.disable_cache()
        assert not any(isinstance(block.__dict__.get("forward"), BlockCall) for block in repeated_blocks(model))
        forwards(model, inputs, 1)
    assert same(*found)


def test_what_happens_between_blocks_is_done_and_results_stay():
    model, inputs = MODELS["flux"]()
    residual = {"controlnet_block_samples": [torch.randn(1, 36, 32)], "controlnet_single_block_samples": None}
    with sp.apply(model, options(scaling="dynamic")) as handle:
        wanted = forwards(model, inputs | residual)
        graphs, recorder = captures(handle)
        recorder.waits_in(outside(model))
        found = forwards(model, inputs | residual)
        kept = [x.clone() for x in found]
        assert same(found, wanted) and graphs.partly == 3 and not same(found[-1], forwards(model, inputs)[-1])
        assert same(found, kept)  # later replays write to none of them


def test_a_change_of_one_block_is_captured_again():
    model, inputs = MODELS["flux"]()
    with sp.apply(model, options(linears=EIGHT_BIT, scaling="dynamic")) as handle:
        graphs, recorder = captures(handle)
        recorder.waits_in(outside(model))
        before = forwards(model, inputs)[-1]
        made = recorder.captures
        with torch.no_grad():
            model.transformer_blocks[0].ff.net[2].weight.mul_(1.5)
        after = forwards(model, inputs, 3, first=FORWARDS - 1)
        assert recorder.captures == made + 1 and graphs.block_eager["changed"] == 1
        graphs.stop()
        handle._denoisers[0].graphs = None
        assert same(after, forwards(model, inputs, 3, first=FORWARDS - 1)) and not torch.equal(after[0], before)


def test_copies_and_removal_leave_no_graphs():
    model, inputs = MODELS["flux"]()
    with sp.apply(model, options(scaling="dynamic")) as handle:
        graphs, _ = captures(handle)
        model.proj_out.register_forward_hook(print_nothing)
        out = forwards(model, inputs, WARM_UP + 3)[-1]
        assert graphs.partly
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            replays = graphs.block_replays
            assert other.transformer_blocks[0].forward._block is other.transformer_blocks[0]
            assert (
                torch.equal(forwards(other, inputs, 1, first=WARM_UP + 2)[0], out) and graphs.block_replays == replays
            )
        model.transformer_blocks[0].compile(backend="eager")
        assert torch.equal(forwards(model, inputs, 1, first=WARM_UP + 2)[0], out)
        assert not isinstance(model.transformer_blocks[0].__dict__.get("forward"), BlockCall)
    torch._dynamo.reset()


def print_nothing(module, args, out):
    """A hook of a user's."""


# --- comparisons ---


def test_a_replay_with_other_bits_is_dropped_at_the_end_of_the_run(caplog):
    pipe, draw = flux_pipe()
    with sp.apply(pipe, options()) as handle:
        wanted = draw(steps=9)
        graphs, recorder = captures(handle, recorder=Recorder(error=1e-3))
        first = draw(steps=9)
        assert graphs.replays == 4 and not torch.equal(first, wanted)
        second = draw(steps=9)  # of the whole nothing is replayed now; blocks are, wrongly, and are compared
        assert graphs.replays == 4 and not torch.equal(second, wanted)
        assert torch.equal(draw(steps=9), wanted) and graphs.differing == 3 and graphs.partly == 8
        assert "3 graphs were dropped (differs)" in str(handle.report()) and graphs.eager["differs"] == 10
    assert sum("other bits" in record.getMessage() for record in caplog.records) == 1


def test_comparisons_come_after_a_capture_and_then_seldom(monkeypatch):
    """Not in the first forward of a run; without a scheduler once."""
    assert model_graphs.EVERY == 20
    monkeypatch.setattr(model_graphs, "EVERY", 2)
    seen, expected_of = [], comparison.expected_of
    monkeypatch.setattr(model_graphs, "expected_of", lambda *args: seen.append(pictures) or expected_of(*args))
    pipe, draw = flux_pipe()
    with sp.apply(pipe, options()) as handle:
        captures(handle)
        for pictures in range(5):  # noqa: B007
            draw(steps=7)
    assert seen == [0, 2, 4]
    model, inputs = MODELS["flux"]()
    seen.clear()
    with sp.apply(model, options()) as handle:
        graphs, _ = captures(handle)
        forwards(model, inputs, 30)
        assert len(seen) == 1 and graphs.replays == 25


# --- whatever fails ---


STEPS = {  # name: what is replaced
    "obstacle": (call_graphs, "obstacle"),
    "weights": (call_graphs, "refresh_weights"),
    "model's state": (call_graphs, "ModelState"),
    "copy of the state": (call_graphs, "StateCopy"),
    "kind": (call_graphs, "kind_of"),
    "expected": (comparison, "StateCopy"),
    "comparison": (comparison, "_bits"),
    "room": (model_graphs.ModelGraphs, "has_room"),
    "capture": (Recorder, "__call__"),
    "places": (places.Places, "fill"),
}


def run(handle, model, inputs):
    """What a user sees of a run: outputs, the generator afterwards, counts."""
    handle.new_run()
    torch.manual_seed(3)
    outs = forwards(model, inputs, WARM_UP + 5)
    report = handle.report()
    return outs, torch.rand(1), report.calls, report.linears.calls, str(report.rows)


@pytest.fixture(scope="module")
def undisturbed():
    model, inputs = MODELS["flux"]()
    with sp.apply(model, options(linears=EIGHT_BIT)) as handle:
        return run(handle, model, inputs)


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("step", STEPS)
def test_a_fault_at_any_step_leaves_the_run_as_it_was(monkeypatch, step, blocks, undisturbed):
    """Results, counts and the generator are those without graphs. The step fails at first, then every third time."""
    model, inputs = MODELS["flux"]()
    owner, name = STEPS[step]
    own, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) % 3 == 1:
            raise (torch.OutOfMemoryError if step == "capture" else RuntimeError)("injected")
        return own(*args, **kwargs)

    with sp.apply(model, options(linears=EIGHT_BIT)) as handle:
        graphs, recorder = captures(handle)
        if blocks:
            recorder.waits_in(outside(model))
        monkeypatch.setattr(owner, name, failing)
        found = run(handle, model, inputs)
    assert same(found[0], undisturbed[0]) and found[1:] == undisturbed[1:] and calls


def test_memory_is_bounded_and_the_oldest_shape_goes_first(monkeypatch):
    model, inputs = MODELS["flux"]()
    others = inputs | {"hidden_states": inputs["hidden_states"][:, :8], "img_ids": inputs["img_ids"][:8]}
    with sp.apply(model, options(scaling="dynamic")) as handle:
        graphs, recorder = captures(handle)
        recorder.waits_in(outside(model))
        forwards(model, inputs)
        held = graphs.memory
        assert held > 0 and f"{held / 2**30:.2f} GiB" in str(handle.report())
        monkeypatch.setattr(graphs, "room", lambda: held)
        wanted = forwards(model, others, 2 * WARM_UP)[-1]
        assert graphs.memory < held and graphs.block_eager["memory"] >= 1  # those of the first shape are gone
        partly = graphs.partly
        assert (
            torch.equal(forwards(model, others, 1, first=2 * WARM_UP - 1)[0], wanted) and graphs.partly == partly + 1
        )
        monkeypatch.setattr(graphs, "room", lambda: 0)
        graphs.forget()
        forwards(model, others)
        eager = graphs.eager["memory"]
        forwards(model, others, 2)
        assert graphs.memory == 0 and graphs.eager["memory"] == eager + 2 and graphs.partly == partly + 1


@pytest.mark.gpu
def test_failed_captures_leave_pytorch_as_it_was():
    """The stream, the generator and the allocator; graphs before and after them work, also when all were dropped."""
    device = torch.device("cuda", 0)
    x, taken, stream = torch.randn(64, 64, device=device), capture.Captures(device), torch.cuda.current_stream(device)
    torch.manual_seed(5)
    wanted = torch.rand(4, device=device)
    torch.manual_seed(5)
    results, replay = taken.record(lambda: (x @ x).split(32))
    assert all(part.untyped_storage().data_ptr() == results[0].untyped_storage().data_ptr() for part in results)
    for bad in (
        lambda: x.sum().item(), x.nonzero, x.cpu, lambda: torch.ones(2).to(device), lambda: 1 / 0,
        lambda: torch.rand(4, device=device).tolist(), lambda: torch.empty(10**13, device=device),
    ):  # fmt: skip
        with pytest.raises(capture.CaptureError):
            taken.record(lambda bad=bad: (x @ x, bad()))
        replay()
        assert torch.equal(torch.cat(results), x @ x)
        other = taken.record(lambda: x + 1)
        other[1]()
        assert torch.equal(other[0], x + 1)
    assert torch.cuda.current_stream(device) == stream and torch.equal(torch.rand(4, device=device), wanted)
