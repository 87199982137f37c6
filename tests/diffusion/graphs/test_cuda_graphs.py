"""CUDA graphs of calls and of whole models: what they launch, and that a replay is a step like any other."""

from __future__ import annotations

import pytest
import torch

import sage_processors as sp
from sage_kernels import sage_attention
from sage_kernels.planning import row_maxima
from sage_kernels.planning.row_maxima import RowMaxima
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import graph_nodes, relative_l2
from tests.kernels.attention.attention_cases import FP8, normal, runs_fp8
from tests.support.tiny_models import MODELS


pytestmark = pytest.mark.gpu
RECIPES = ["qk_int8_pv_bf16", FP8]
STEPS, WARM_UP = 9, 6


@pytest.fixture(autouse=True)
def gpu():
    torch.compiler.reset()


def captured(function):
    function()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def attention(recipe, scaling):
    """A call that can be captured or compiled, of the recipe and scaling; planned: with a plan."""
    if recipe == FP8 and not runs_fp8("cuda"):
        pytest.skip("this GPU has no FP8")
    q, k, v = (x.cuda() for x in normal(1, 300, 700, 4, 2, 64, dtype=torch.bfloat16))
    if scaling != "planned":
        return lambda: sage_attention(q, k, v, recipe=recipe, scaling=scaling)
    scales = ScaleState([Site("a", 2, 64)], device="cuda")
    state = scales.head_state(0)
    sage_attention(q, k, v, recipe=recipe, state=state)
    scales.advance(1.0, 0.9)
    return lambda: sage_attention(q, k, v, recipe=recipe, state=state)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scaling, most", [("planned", 2), ("per_block", 3), ("per_token", 3)])
def test_a_call_is_so_many_kernels_and_nothing_else(scaling, most, recipe, monkeypatch):
    """Of a compiled call, too: nothing is copied for an op that writes to its state."""
    monkeypatch.setattr(torch, "empty", torch.empty.__wrapped__)  # conftest's poison is a kernel, too
    call = attention(recipe, scaling)
    nodes = graph_nodes(captured(call)[0])
    assert set(nodes) == {"kernel"} and nodes["kernel"] <= most
    compiled = torch.compile(call, fullgraph=True)
    graph, out = captured(compiled)
    assert graph_nodes(graph) == nodes
    graph.replay()
    assert torch.equal(out, call())


def test_nodes_of_every_kind_are_counted():
    x, y = torch.zeros(1 << 16, device="cuda"), torch.ones(1 << 16, device="cuda")

    def work():
        x.copy_(y)  # a copy of the driver's
        return x + y

    assert graph_nodes(captured(work)[0]) == {"copy": 1, "kernel": 1}


def test_row_maxima_that_a_graph_writes_to_are_nobody_elses(monkeypatch):
    """A replay writes where the captured call did, whatever has been forgotten since."""
    monkeypatch.setattr(row_maxima, "FIRST_STEPS", 0)
    kept, shape, device = RowMaxima(), (1, 2, 8), torch.device("cuda", 0)

    def call():
        rows, _ = kept.of(0, shape, device)
        rows.add_(1)
        kept.next_step()

    call()
    graph, _ = captured(call)
    kept.clear()
    others = [torch.zeros(shape, device=device) for _ in range(64)]
    graph.replay()
    assert not any(x.any() for x in others)
    rows, known = kept.of(0, shape, device)
    assert not known and bool((rows == -torch.inf).all())  # another run knows nothing of it


def walk(config, from_graph: bool):
    """Outputs of STEPS denoising steps, the report, what was learnt; from_graph: all behind WARM_UP are replays."""
    model, inputs = MODELS["flux"]()
    model = model.to("cuda", torch.bfloat16)
    inputs = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
    inputs = {n: x.bfloat16() if getattr(x, "is_floating_point", bool)() else x for n, x in inputs.items()}
    inputs["timestep"] = torch.ones(1, device="cuda")
    noise = torch.randn(inputs["hidden_states"].shape, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    first, outputs, graph = inputs["hidden_states"].clone(), [], None
    with torch.no_grad(), sp.apply(model, config) as handle:
        handle.new_run()
        for step in range(STEPS):
            inputs["timestep"].fill_(1 - step / 50)
            inputs["hidden_states"].copy_(first + step / 50 * noise)
            if step == WARM_UP and from_graph:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = model(**inputs).sample
            if graph is None:
                out = model(**inputs).sample
            else:
                graph.replay()
            outputs.append(out.float().clone())
        state = handle._denoisers[0].state
        return outputs, handle.report(), state.snapshot(), state.summary()


@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_of_a_whole_model_walk_the_steps(recipe):
    """Each replay plans the step of the timestep that it finds, and counts; in FP8 it meets the row maxima."""
    if recipe == FP8 and not runs_fp8("cuda"):
        pytest.skip("this GPU has no FP8")
    config = sp.SageAttnProcessor(recipe=recipe, min_tokens=1)
    eager, eager_report, eager_learnt, eager_sites = walk(config, from_graph=False)
    outputs, report, learnt, sites = walk(config, from_graph=True)
    for step, (out, expected) in enumerate(zip(outputs, eager, strict=True)):
        # matrix products may be others in a graph: bits are not compared
        assert float(relative_l2(out, expected)) < 0.01, step
    assert not torch.equal(outputs[-1], outputs[-2])  # else nothing would have been walked
    assert report.calls == eager_report.calls == 2 * STEPS and not report.fallbacks
    for site, other in zip(sites, eager_sites, strict=True):
        for name in ("calls", "dynamic_calls", "lagged"):
            assert site[name] == other[name], name
        assert recipe != FP8 or site["lagged"] > 0
    assert torch.equal(learnt["table_run"], eager_learnt["table_run"])  # the same noise levels
    torch.testing.assert_close(learnt["table"], eager_learnt["table"], rtol=0.05, atol=0.05)
