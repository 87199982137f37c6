"""`skip` in a pipeline: the same picture for the same seed, whatever runs, breaks off, or is left out."""

from __future__ import annotations

import dataclasses
import json

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import sage_processors as sp
from sage_kernels.facts.skipping import TOTAL_TILES, TOTAL_VISITED
from sage_kernels.ops import skip_state
from sage_kernels.planning import skip_lists
from tests.diffusion.calls.test_processors import sqnr_db
from tests.diffusion.test_compile import Pipe, compiled, denoise
from tests.diffusion.test_same_seed import Drawing
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe


# small random models attend to everything alike: what is to be skipped at all takes a large limit
SKIP = sp.SageAttnProcessor(min_tokens=0, skip=sp.Skip(limit=0.9, every=3, first_steps=1))
DENSE = dataclasses.replace(SKIP, skip=None)
STEPS = 6


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(skip_state, "REFERENCE_BLOCK", (4, 4))
    monkeypatch.setattr(skip_lists, "LEAST_TILES", 4)


def lists_of(handle):
    return handle._denoisers[0].state.kept.skip_lists


def test_T25_tiles_are_skipped_and_the_report_says_what_was_lost():
    drawing = Drawing()
    with sp.apply(drawing.pipe, DENSE):
        dense = drawing.draw(0)
    with sp.apply(drawing.pipe, SKIP) as handle:
        ours = drawing.draw(0)
        report = handle.report()
    assert 10 < sqnr_db(ours, dense) < 90  # something was left out, and little
    for row in report.rows:
        assert row["calls"] == STEPS and row["dense"] == {"first_last": 2}
        assert 0.02 < row["skipped_fraction"] < 1
        assert 0 < row["lost_mean"] <= row["lost_max"] and (row["lost_max"] <= 0.9) == (row["beyond_limit"] == 0)
    assert "skipped" in str(report) and "probability lost" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["rows"][0]["lost_max"] == report.rows[0]["lost_max"]


@pytest.mark.parametrize(
    ("guided", "recipe"),
    [
        (True, "qk_int8_pv_bf16"),
        pytest.param(False, "qk_int8_pv_bf16", marks=pytest.mark.slow("guidance shows it")),
        pytest.param(True, "qk_int8_pv_fp8", marks=pytest.mark.slow("lists do not hang on the recipe")),
    ],
)
def test_Q51_a_picture_another_and_the_first_again(guided, recipe):
    drawing = Drawing()
    with sp.apply(drawing.pipe, dataclasses.replace(SKIP, recipe=recipe)) as handle:
        first = drawing.draw(0, guided=guided)
        drawing.draw(1, steps=5, size=2.0, batch=2, guided=not guided)
        again = drawing.draw(0, guided=guided)
        sites = len(handle._denoisers[0].state.sites)
        assert len(lists_of(handle)._kept) == sites * 3  # both passes of guidance, and another shape
    assert torch.equal(first, again)
    with sp.apply(drawing.pipe, dataclasses.replace(SKIP, recipe=recipe)):
        assert torch.equal(drawing.draw(0, guided=guided), first)  # as a handle of its own draws it


def test_Q52_an_exception_amid_a_step_leaves_nothing():
    drawing = Drawing()
    with sp.apply(drawing.pipe, SKIP):
        first = drawing.draw(0)
        calls = []

        def broken(module, args):
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("broken off")

        hook = drawing.model.transformer_blocks[-1].register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="broken off"):
            drawing.draw(1)
        hook.remove()
        assert torch.equal(drawing.draw(0), first)


def test_windows_come_before_lists():
    """Steps in 16 bit ask for no list, and the first one behind them measures everything."""
    drawing = Drawing()
    config = dataclasses.replace(
        SKIP, keep=sp.Keep(first_steps=3), skip=dataclasses.replace(SKIP.skip, first_steps=0, last_steps=0, every=2)
    )
    with sp.apply(drawing.pipe, config) as handle:
        drawing.draw(0)
        for row in handle.report().rows:
            assert row["fallbacks"] == {"window": 3} and row["dense"] == {} and row["skipped_fraction"] > 0


@pytest.mark.parametrize("skips", [1, 2])
def test_Q52_layers_that_whole_steps_leave_out_go_on_with_their_lists(skips):
    """As FirstBlockCache and TaylorSeer do; what was due meanwhile is measured in the next call."""
    model, inputs = MODELS["flux"]()
    pipe = Pipe(model, FlowMatchEulerDiscreteScheduler())
    config = dataclasses.replace(SKIP, skip=dataclasses.replace(SKIP.skip, first_steps=0, last_steps=0, every=4))
    with sp.apply(pipe, config) as handle, torch.no_grad():
        pipe.scheduler.set_timesteps(9)
        latents = inputs["hidden_states"]
        for step, t in enumerate(pipe.scheduler.timesteps):
            if step % (1 + skips) == 0:
                lists = list(lists_of(handle)._kept.values())
                for one in lists:
                    one.bound.fill_(-1.0)
                noise = model(**inputs | {"hidden_states": latents, "timestep": t.reshape(1) / 1000}).sample
                for one in lists:
                    due = (1 + skips) / min(4, one.lists.shape[2])
                    measured = float((one.bound >= 0).double().mean())
                    assert measured >= due - 1 / one.lists.shape[2] and (measured < 1 or one.alarms.any() or due >= 1)
            latents = pipe.scheduler.step(noise, t, latents).prev_sample
        assert all(row["skipped_fraction"] > 0 for row in handle.report().rows)


def test_Q52_first_block_cache_beside_lists():
    pipe, run = flux_pipe()
    cache = diffusers.FirstBlockCacheConfig(threshold=0.05)
    pipe.transformer.enable_cache(cache)
    stock = run(steps=8)
    pipe.transformer.disable_cache()
    with sp.apply(pipe, dataclasses.replace(SKIP, skip=dataclasses.replace(SKIP.skip, limit=0.3))) as handle:
        pipe.transformer.enable_cache(cache)
        first = run(steps=8)
        assert sqnr_db(first, stock) > 15
        run(steps=5, seed=1)
        assert torch.equal(run(steps=8), first)
        assert all(row["skipped_fraction"] > 0 for row in handle.report().rows)
        pipe.transformer.disable_cache()


@pytest.mark.slow("compiles a whole model")
def test_compiled_calls_skip_what_eager_ones_do_and_are_compiled_once():
    results = []
    for way in ("eager", "compiled"):
        torch._dynamo.reset()
        model, inputs = MODELS["flux"]()
        pipe = Pipe(model, FlowMatchEulerDiscreteScheduler())
        with sp.apply(pipe, SKIP) as handle, torch._dynamo.config.patch(error_on_recompile=True):
            fast = model if way == "eager" else compiled(model, "aot_eager")[0]
            picture = denoise(pipe, fast, inputs, steps=8)
            rows = handle.report().rows
            results.append((picture, [(row["skipped_fraction"], row["dense"], row["calls"]) for row in rows]))
    torch._dynamo.reset()
    (eager, eager_rows), (fast, rows) = results
    assert rows == eager_rows and all(fraction > 0 for fraction, *_ in rows)
    torch.testing.assert_close(fast, eager, rtol=1e-5, atol=1e-5)


def test_Q50_masked_calls_stay_dense_and_are_counted():
    model, inputs = MODELS["qwen_image_padded"]()
    pipe = Pipe(model, FlowMatchEulerDiscreteScheduler())
    with sp.apply(pipe, SKIP) as handle:
        denoise(pipe, model, inputs, steps=3)
        rows = [row for row in handle.report().rows if row["calls"]]
    assert rows and all(row["dense"] == {"masked": 3} and row["skipped_fraction"] == 0 for row in rows)


def test_Q50_forwards_that_belong_to_no_step_stay_dense():
    drawing = Drawing()
    with sp.apply(drawing.pipe, SKIP) as handle, torch.no_grad():
        drawing.model(**drawing.inputs)  # before any run
        first = handle.report().rows
        drawing.draw(0)
        drawing.model(**drawing.inputs)  # after its last step
        last = handle.report().rows
    assert all(row["dense"] == {"unfollowed": 1} for row in first)
    assert all(row["dense"]["unfollowed"] == 2 and row["dense"]["first_last"] == 2 for row in last)


def test_Q50_steps_that_go_back_begin_anew():
    drawing = Drawing()
    config = dataclasses.replace(SKIP, skip=dataclasses.replace(SKIP.skip, first_steps=0, last_steps=0, every=20))
    with sp.apply(drawing.pipe, config) as handle:
        drawing.draw(0, steps=4)
        state, lists = handle._denoisers[0].state, lists_of(handle)
        denoiser, now = handle._denoisers[0], int(lists.now)
        denoiser.advance(0.3, 0.8, handle.steps.progress)
        assert int(lists.now) == now + 1 + 20 and int(lists.went_back) == 1 and state is denoiser.state


def test_lists_need_a_scheduler():
    with pytest.raises(ValueError, match="skip: got Skip.* for a model without a pipeline"):
        sp.apply(MODELS["flux"]()[0], SKIP)


LIMITED = "transformer_blocks.0.attn"


def test_layers_have_limits_of_their_own():
    """A limit of 0 leaves a layer as it is without lists, bit for bit; a large one is as that of all."""
    drawing = Drawing()
    with sp.apply(drawing.pipe, dataclasses.replace(SKIP, layers={"*": {"skip_limit": 0.0}})) as handle:
        ours = drawing.draw(0)
        assert all(row["dense"] == {"no_limit": STEPS - 2, "first_last": 2} for row in handle.report().rows) or all(
            row["dense"] == {"no_limit": STEPS} for row in handle.report().rows
        )
    with sp.apply(drawing.pipe, DENSE):
        assert torch.equal(ours, drawing.draw(0))
    with sp.apply(drawing.pipe, SKIP):
        wanted = drawing.draw(0)
    with sp.apply(
        drawing.pipe,
        dataclasses.replace(SKIP, skip=dataclasses.replace(SKIP.skip, limit=0.1), layers={"*": {"skip_limit": 0.9}}),
    ):
        assert torch.equal(drawing.draw(0), wanted)
    config = dataclasses.replace(SKIP, layers={f"*{LIMITED}": {"skip_limit": 0.0}})
    with sp.apply(drawing.pipe, config) as handle:
        drawing.draw(0)
        shares = {row["layer"]: row["skipped_fraction"] for row in handle.report().rows}
    assert all((share == 0) == name.endswith(LIMITED) for name, share in shares.items()) and len(shares) > 1
    with pytest.raises(ValueError, match="layers: got 'nowhere', which matches no layer"):
        sp.apply(drawing.pipe, dataclasses.replace(SKIP, layers={"nowhere": {"skip_limit": 0.1}}))


def test_limits_hang_on_the_noise_level():
    """Below a border of 0 or above it: tiles are left out in these steps alone, and a seed draws the same again."""
    drawing, shares = Drawing(), []
    for limits in ((0.9, 0.0), (0.0, 0.9), (0.9, 0.9)):
        config = dataclasses.replace(
            SKIP, skip=dataclasses.replace(SKIP.skip, last_steps=0, noise=(0.4,)), layers={"*": {"skip_limit": limits}}
        )
        with sp.apply(drawing.pipe, config) as handle:
            first, left_out = drawing.draw(0), []
            hook = drawing.model.register_forward_hook(lambda *_, h=handle, x=left_out: x.append(visited(h)))
            assert torch.equal(drawing.draw(0), first)
            hook.remove()
            u = [float(t) / 1000 for t in drawing.pipe.scheduler.timesteps]
        new = [b > a for a, b in zip(left_out, left_out[1:], strict=False)]
        low = [level < 0.4 for level in u[1:]]
        assert any(low) and not all(low)
        shares.append(list(zip(new, low, strict=True)))
    below, above, both = shares
    assert {is_low for is_new, is_low in below if is_new} == {True}
    assert {is_low for is_new, is_low in above if is_new} == {False}
    assert {is_low for is_new, is_low in both if is_new} == {True, False}


def visited(handle) -> int:
    """Pairs of tiles that were left out so far."""
    totals = lists_of(handle).totals.sum(0)
    return int(totals[TOTAL_TILES] - totals[TOTAL_VISITED])


@pytest.mark.parametrize(
    "options", [{"layers": {"*": {"scaling": "per_token"}}}, {"layers": {f"*{LIMITED}": {"recipe": "mixed"}}}]
)
def test_layers_that_plan_nothing_have_no_lists(options):
    drawing = Drawing()
    with sp.apply(drawing.pipe, dataclasses.replace(SKIP, **options)) as handle:
        drawing.draw(0)
        rows = handle.report().rows
    unplanned = [row for row in rows if "*" in options["layers"] or row["layer"].endswith(LIMITED)]
    assert unplanned and all(row["skipped_fraction"] == 0 and not row["dense"] for row in unplanned)
    assert all(row["skipped_fraction"] > 0 for row in rows if row not in unplanned)


def on_gpu(**options):
    """(state with lists of tiles on a GPU, a function that makes a call with them)."""
    from sage_kernels import sage_attention
    from sage_kernels.planning.state import ScaleState, Site
    from tests.kernels.attention.test_skipping import scores_of

    q, k, v = (x.cuda() for x in scores_of("clustered", 1000, 2500))
    state = ScaleState([Site("a", 1, 64)], device="cuda")
    lists = state.kept.skip_lists = skip_lists.SkipLists(1, torch.device("cuda", 0), every=3, **options)
    return state, lambda: sage_attention(q, k, v, state=state.head_state(0), skip=lists.of(0, q, k))


@pytest.mark.gpu
def test_graphs_of_steps_find_the_step_that_runs():
    """A CUDA graph captured at one step is replayed at all: dense at the ends of a run, void when another begins."""
    results = []
    for graphs in (False, True):
        state, call = on_gpu(limit=0.2, first_steps=1, last_steps=1)
        lists = state.kept.skip_lists
        outs, graph = [], None
        for _ in range(2):
            state.begin_run(1.0)
            for step in range(6):
                lists.place(step, 6 - step)
                if graphs and graph is None and step == 1:
                    torch.cuda.synchronize()
                    call()  # compiles and makes the lists, as one step more of the run would
                    state.begin_run(1.0)
                    lists.place(step, 6 - step)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = call()
                if graph is None:
                    outs.append(call().float())
                else:
                    graph.replay()
                    outs.append(out.float().clone())
                state.advance(1 - step / 10, 0.9 - step / 10)
        results.append((outs[6:], lists.summary()[0]["skipped_fraction"]))
    (eager, share), (replayed, graph_share) = results
    assert share > 0 and graph_share > 0
    for a, b in zip(eager, replayed, strict=True):
        # a dense call of another variant rounds P against another reference
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_E05_lists_never_wait_for_the_gpu():
    state, call = on_gpu(limit=[(0.2, 0.1)], borders=(0.5,))
    lists = state.kept.skip_lists
    levels = torch.linspace(1, 0, 8, device="cuda")

    def run():
        state.begin_run(levels[0])
        for step in range(4):
            lists.at_level(levels[step])
            lists.place(step, 4 - step)
            call()
            state.advance(levels[step], levels[step + 1])
            lists.in_order(levels[step], levels[step + 1])

    run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 < lists.summary()[0]["skipped_fraction"] < 1
