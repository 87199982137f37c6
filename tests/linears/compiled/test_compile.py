"""torch.compile sees two registered ops and ordinary tensors, and compiles once."""

from __future__ import annotations

import operator
import os
import pickle

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import sage_processors as sp
from sage_kernels.compat import add_graph_pass
from sage_processors.linears.compiled.graph_edits import is_call, is_own, written_by
from sage_processors.linears.compiled.graph_fusion import fuse, fuse_in_compiled_code
from tests.linears.counting import OpCounter, ops_of, relative_error, run
from tests.support.inductor import passes_alone
from tests.support.tiny_models import MODELS


class Backend:
    """Counts graphs, and the two ops in them."""

    def __init__(self):
        self.graphs = self.quantized = self.multiplied = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        for node in graph.graph.nodes:
            quantized, multiplied = ops_of(node.target)
            self.quantized, self.multiplied = self.quantized + quantized, self.multiplied + multiplied
        return aot_eager(graph, inputs)


def flux():
    torch._dynamo.reset()
    model, inputs = MODELS["flux"]()
    return model, inputs, run(model, inputs)


@pytest.mark.slow("compiles a whole model")
def test_whole_models_are_one_graph_over_all_steps():
    model, inputs, expected = flux()
    backend = Backend()
    with sp.quantize_linears(model, min_features=0) as swap, torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for step in range(4):
            given = inputs | {"timestep": torch.tensor([1.0 - step / 4])}
            compiled(**given, return_dict=False)
        assert relative_error(compiled(**inputs, return_dict=False)[0], expected) < 0.02
        assert backend.graphs == 1
        linears = [row for row in swap.report().rows if row["format"]]
        assert backend.multiplied == len(linears)
        assert {row["compiled_calls"] for row in linears} == {5} and swap.report().fallbacks == {}


def test_repeated_blocks_are_compiled_and_the_rest_is_not():
    model, inputs, expected = flux()
    backend = Backend()
    with sp.quantize_linears(model, min_features=0), torch.no_grad():
        model.compile_repeated_blocks(fullgraph=True, backend=backend)
        model(**inputs, return_dict=False)
        graphs = backend.graphs
        for _ in range(3):
            got = model(**inputs, return_dict=False)[0]
        assert relative_error(got, expected) < 0.02 and backend.graphs == graphs and backend.multiplied


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(48), nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return self.two(self.one(self.norm(x)))


def test_an_eager_call_between_compiled_ones():
    torch._dynamo.reset()
    block, x = Block().eval().requires_grad_(False), torch.randn(2, 6, 48)
    expected, backend = block(x), Backend()
    with sp.quantize_linears(block, min_features=0), torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        for call in (block, compiled, block, compiled):
            assert relative_error(call(x), expected) < 0.02
        assert backend.graphs == 1
        block.one.weight.neg_()
        flipped = block(x)
        assert relative_error(flipped, expected) > 0.5
        assert relative_error(compiled(x), flipped) < 0.02 and backend.graphs == 1
    with torch.no_grad():
        block.one.weight.neg_()
        torch.testing.assert_close(compiled(x), expected)  # stock again: compiled anew


def test_a_compiled_part_gets_ordinary_tensors():
    torch._dynamo.reset()
    block, x = Block().eval().requires_grad_(False), torch.randn(2, 6, 48)
    expected = block(x)
    backend = Backend()
    with sp.quantize_linears(block, min_features=0):
        block(x)
        block.one.compile(fullgraph=True, backend=backend)
        block.two.compile(fullgraph=True, backend=backend)
        for _ in range(3):
            got = block(x)
        assert type(got) is torch.Tensor and backend.graphs >= 1
        assert relative_error(got, expected) < 0.03


@pytest.mark.parametrize("wrapped", [False, True])
def test_layers_of_compiled_parts_are_counted_beside_eager_ones(wrapped):
    torch._dynamo.reset()
    model, x = nn.Sequential(Block(), Block()).eval().requires_grad_(False), torch.randn(2, 6, 48)
    with sp.quantize_linears(model, min_features=0) as swap, torch.no_grad():
        for _ in range(2):
            model(x)
        if wrapped:
            model[0] = torch.compile(model[0], backend="eager")
        else:
            model[0].compile(backend="eager")
        for _ in range(3):
            model(x)
        found = {row["layer"]: (row["calls"], row["compiled_calls"]) for row in swap.report().rows}
    layers = [(f"{i}.{name}", counts) for i, counts in ((0, (2, 3)), (1, (5, 0))) for name in ("one", "two")]
    assert found == dict(layers)


def test_layers_that_stay_exact_are_counted_in_graphs_too():
    torch._dynamo.reset()
    layer, x = nn.Linear(48, 64).requires_grad_(False).train(), torch.randn(4, 48)
    with sp.quantize_linears(layer, min_features=0) as swap:
        compiled = torch.compile(layer, fullgraph=True, backend=Backend())
        for _ in range(3):
            torch.testing.assert_close(compiled(x), nn.Linear.forward(layer, x))
        assert swap.report().fallbacks == {"training": 3}


def test_the_pass_keeps_what_was_there_before():
    from torch._inductor import config

    before, seen = config.pre_grad_custom_pass, []
    try:
        config.pre_grad_custom_pass = None
        add_graph_pass(lambda graph: seen.append(1), b"1")
        fuse_in_compiled_code()
        config.pre_grad_custom_pass(torch.fx.Graph())
        assert seen == [1] and fuse in config.pre_grad_custom_pass.changes
        assert config.pre_grad_custom_pass.uuid() != before
        # torch 2.11 makes its part of a cache's key by pickling it: other passes, other key
        first = pickle.dumps(config.pre_grad_custom_pass)
        add_graph_pass(lambda graph: None, b"2")
        assert pickle.dumps(config.pre_grad_custom_pass) not in (first, pickle.dumps(None))
        known = config.pre_grad_custom_pass
        fuse_in_compiled_code()
        assert config.pre_grad_custom_pass is known  # once is enough
    finally:
        config.pre_grad_custom_pass = before


def compiled_ops(model, call, backend=passes_alone):
    """What `call()` returns, compiled, and the calls of our ops in its graphs: name → arguments.

    A call of dynamic_linear is one of each of the other two, but for the rows that one hands to the other.
    """
    from torch._inductor import config

    torch._dynamo.reset()
    fuse_in_compiled_code()
    before = config.pre_grad_custom_pass
    found = {"quantize_activation": [], "quantized_linear": [], "dynamic_linear": []}

    def look(graph):
        for node in graph.nodes:
            if is_call(node, "dynamic_linear"):
                found["quantize_activation"].append(node.args[:10])
                found["quantized_linear"].append((None, None, *node.args[10:]))
            for name, calls in found.items():
                if is_call(node, name):
                    calls.append(node.args)

    try:
        add_graph_pass(look, os.urandom(8))  # compiled code of an earlier run is not looked at
        with torch.no_grad():
            return call(torch.compile(model, fullgraph=True, backend=backend)), found
    finally:
        config.pre_grad_custom_pass = before


def test_blocks_are_compiled_with_as_many_calls_as_eager_ones():
    model, inputs, expected = flux()
    with sp.quantize_linears(model, min_features=0), torch.no_grad():
        with OpCounter() as ops:
            eager = model(**inputs, return_dict=False)[0]
        got, found = compiled_ops(model, lambda compiled: compiled(**inputs, return_dict=False)[0])
    assert relative_error(got, expected) < 0.02 and relative_error(got, eager) < 0.005
    # the compiler puts values of two origins side by side itself: they stay columns of a joined result there
    multiplied = ops.multiplied - 2 * len(model.transformer_blocks)
    assert (len(found["quantize_activation"]), len(found["quantized_linear"])) == (ops.quantized, multiplied)
    assert {args[2] for args in found["quantize_activation"]} == {"none", "layer"}
    finished = [(args[5], args[6] is not None, args[7] is not None) for args in found["quantized_linear"]]
    assert ("gelu_tanh", False, False) in finished and ("none", True, True) in finished


class Layers(nn.Module):
    """A norm, three projections of it and a layer behind; `finish` is given what they make."""

    def __init__(self, finish, norm="layer", bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(48, elementwise_affine=bias) if norm == "layer" else nn.RMSNorm(48, eps=1e-5)
        self.to_q, self.to_k, self.to_v = (nn.Linear(48, 48, bias=bias) for _ in range(3))
        self.out = nn.Linear(48, 64, bias=bias)
        self.finish = finish
        self.eval().requires_grad_(False)

    def forward(self, x, vector, residual):
        return self.finish(self, x, vector, residual)


FINISHES = {
    # name: (what a model does, (quantisations, matmuls, merged or finished ones) when compiled)
    "projections": (lambda m, x, v, r: m.to_q(y := m.norm(x)) + m.to_k(y) * 2 - m.to_v(y), (1, 1)),
    "keys of another input": (lambda m, x, v, r: m.to_q(y := m.norm(x)) + m.to_k(x) * 2 - m.to_v(y), (2, 3)),
    "modulated": (lambda m, x, v, r: m.to_q(y := m.norm(x) * (1 + v) + v) - m.to_k(y), (1, 1)),
    "shifted": (lambda m, x, v, r: m.out(v + m.norm(x)), (1, 1)),
    "scaled": (lambda m, x, v, r: m.out(m.norm(x) * v), (1, 1)),
    "shift of each token": (lambda m, x, v, r: m.out(m.norm(x) + x), (1, 1)),
    "gelu": (lambda m, x, v, r: F.gelu(m.out(x), approximate="tanh"), (1, 1)),
    "exact gelu": (lambda m, x, v, r: F.gelu(m.out(x)), (1, 1)),
    "silu": (lambda m, x, v, r: F.silu(m.out(x)), (1, 1)),
    "gate and residual": (lambda m, x, v, r: r + torch.cat([v, v], -1)[..., :64] * F.dropout(m.out(x), 0.0), (1, 1)),
    "casts": (lambda m, x, v, r: (r.float() + m.out(x).float() * torch.cat([v, v], -1)[..., :64]).type_as(r), (1, 1)),
    "used twice": (lambda m, x, v, r: F.gelu(y := m.out(x)) + y, (1, 1)),
    "sum with itself": (lambda m, x, v, r: (y := m.out(x)) + y, (1, 1)),
    "input written to": (lambda m, x, v, r: (y := m.norm(x), a := m.to_q(y), y.mul_(-2), a + m.to_k(y))[-1], (2, 2)),
    "norm's input written to": (lambda m, x, v, r: (z := x * 1, y := m.norm(z), z.add_(1), m.out(y))[-1], (1, 1)),
    "norm's input written to by an argument": (
        lambda m, x, v, r: (z := x * 1, y := m.norm(z), F.leaky_relu(z, 0.5, True), m.out(y))[-1],
        (1, 1),
    ),
    "residual written to": (lambda m, x, v, r: (z := r * 1, y := m.out(x), z.add_(1), z + y)[-1], (1, 1)),
    "output written to": (lambda m, x, v, r: (y := m.out(x), y.mul_(2), F.gelu(y))[-1], (1, 1)),
    "slice written to": (lambda m, x, v, r: (y := m.out(x), y.__setitem__((0, 0), 7.0), r + y)[-1], (1, 1)),
    "columns of two": (lambda m, x, v, r: m.out(torch.cat([r[..., :16], F.gelu(m.to_q(x))[..., :32]], -1)), (2, 2)),
    "columns of two used twice": (
        lambda m, x, v, r: m.out(c := torch.cat([r[..., :16], m.to_q(x)[..., :32]], dim=2)) * c.mean(),
        (2, 2),
    ),
    "columns written to": (
        lambda m, x, v, r: (z := r[..., :16] * 1, c := torch.cat([z, m.to_q(x)[..., :32]], -1), z.add_(9), m.out(c))[
            -1
        ],
        (2, 2),
    ),
    "columns of three": (
        lambda m, x, v, r: m.out(torch.cat([r[..., :16], m.to_q(x)[..., :16], r[..., :16]], -1)),
        (2, 2),
    ),
    "tokens of two": (lambda m, x, v, r: m.out(torch.cat([x, m.to_q(x)], 1))[:, 6:], (2, 2)),
    "gelu in another type": (lambda m, x, v, r: F.gelu(m.out(x).float()), (1, 1)),
}


FUSED = {
    "columns of two": lambda found: found["quantize_activation"][1][9] is not None,
    "projections": lambda found: found["quantize_activation"][0][2] in ("layer", "rms"),
    "modulated": lambda found: all(x is not None for x in found["quantize_activation"][0][6:8]),
    "scaled": lambda found: found["quantize_activation"][0][6] is not None,
    "shifted": lambda found: found["quantize_activation"][0][7] is not None,
    "gelu": lambda found: found["quantized_linear"][0][5] == "gelu_tanh",
    "exact gelu": lambda found: found["quantized_linear"][0][5] == "gelu",
    "silu": lambda found: found["quantized_linear"][0][5] == "silu",
    "gate and residual": lambda found: all(x is not None for x in found["quantized_linear"][0][6:8]),
    "gelu in another type": lambda found: found["quantized_linear"][0][8] == torch.float32,
}


# each of our calls with all that it can be given: Inductor makes code of these
LOWERED = ("modulated", "gate and residual", "columns of two", "gelu in another type")


@pytest.mark.parametrize(
    ("finish", "norm"), [*((x, "layer") for x in FINISHES), ("projections", "rms"), ("modulated", "rms")]
)
def test_compiled_models_make_what_eager_ones_make(finish, norm):
    function, counts = FINISHES[finish]
    model = Layers(function, norm, bias=norm == "layer")
    x, vector, residual = torch.randn(2, 6, 48), torch.randn(2, 1, 48), torch.randn(2, 6, 64)
    expected = model(x, vector, residual)
    with sp.quantize_linears(model, min_features=0):
        backend = "inductor" if finish in LOWERED else passes_alone
        got, found = compiled_ops(model, lambda compiled: compiled(x, vector, residual), backend)
    assert got.dtype == expected.dtype and relative_error(got, expected) < 0.03
    assert (len(found["quantize_activation"]), len(found["quantized_linear"])) == counts
    # what is done in one call, and what is not
    if finish in FUSED:
        assert FUSED[finish](found)
    elif finish not in ("casts", "input written to", "keys of another input"):
        assert all(args[9] is None for args in found["quantize_activation"])
        assert all(args[5:8] == ("none", None, None) for args in found["quantized_linear"])


JOINED = {
    # name: (what a model does, calls that quantise and multiply at once, calls that only multiply)
    "one product": (lambda m, x, v, r: F.gelu(m.out(m.norm(x))) + r, 1, 0),
    "projections": (lambda m, x, v, r: m.to_q(y := m.norm(x)) + m.to_k(y) - m.to_v(y), 1, 0),
    "two in a row": (lambda m, x, v, r: r + m.out(F.silu(m.to_q(x))), 2, 0),
    "two of one activation": (lambda m, x, v, r: torch.cat([m.out(x), m.to_q(x)], -1), 0, 2),
    "its own residual": (lambda m, x, v, r: x + m.to_q(m.norm(x)), 0, 1),
    "written to behind it": (lambda m, x, v, r: (z := x * 1, y := m.out(z), z.add_(9), y + r)[-1], 1, 0),
}


@pytest.mark.parametrize("name", JOINED)
def test_rows_that_one_product_needs_are_quantised_in_its_call(name, monkeypatch):
    function, joined, alone = JOINED[name]
    model = Layers(function)
    x, vector, residual = torch.randn(2, 6, 48), torch.randn(2, 1, 48), torch.randn(2, 6, 64)
    with sp.quantize_linears(model, min_features=0):
        got, found = compiled_ops(model, lambda compiled: compiled(x, vector, residual))
        monkeypatch.setattr("sage_processors.linears.compiled.graph_fusion._join", lambda *_: None)
        apart, others = compiled_ops(model, lambda compiled: compiled(x, vector, residual))
    assert torch.equal(got, apart) and not others["dynamic_linear"]
    assert len(found["dynamic_linear"]) == joined and len(found["quantized_linear"]) == joined + alone
    assert len(others["quantized_linear"]) == joined + alone


def test_nothing_is_quantised_behind_a_write_to_it():
    ops, graph = torch.ops.sage_kernels, torch.fx.Graph()
    x, codes, scale = (graph.placeholder(name) for name in ("x", "codes", "scale"))
    rows = graph.call_function(
        ops.quantize_activation.default, (x, "int8", "none", None, None, 1e-6, None, None, None, None)
    )
    parts = [graph.call_function(operator.getitem, (rows, i)) for i in (0, 1)]
    graph.call_method("add_", (x, 1))
    given = (*parts, codes, scale, None, "none", None, None, torch.float32)
    graph.output(graph.call_function(ops.quantized_linear.default, given))
    fuse(graph)
    assert not any(is_call(node, "dynamic_linear") for node in graph.nodes)
    next(node for node in graph.nodes if node.target == "add_").replace_all_uses_with(x)
    graph.erase_node(next(node for node in graph.nodes if node.target == "add_"))
    fuse(graph)
    assert [is_call(node, "dynamic_linear") for node in graph.nodes].count(True) == 1


def in_fp32(m, x, v, r):
    """A block that computes norms, gates and sums in fp32, as video models do."""
    normed = F.layer_norm(x.float(), (48,), m.norm.weight.float(), m.norm.bias.float(), 1e-5).to(torch.float32)
    return (r.float() + m.out((normed * (1 + v) + v).type_as(x)) * torch.cat([v, v], -1)[..., :64]).type_as(r)


def test_norms_gates_and_sums_in_fp32_are_of_the_same_calls():
    model = Layers(in_fp32).bfloat16()
    x, vector, residual = torch.randn(2, 6, 48).bfloat16(), torch.randn(2, 1, 48), torch.randn(2, 6, 64).bfloat16()
    expected = model(x, vector, residual)
    with sp.quantize_linears(model, min_features=0):
        got, found = compiled_ops(model, lambda compiled: compiled(x, vector, residual))
        assert relative_error(model(x, vector, residual), expected) < 0.03
    (rows,), (linear,) = found["quantize_activation"], found["quantized_linear"]
    assert rows[0].op == "placeholder" and rows[2] == "layer" and None not in (rows[3], rows[4], rows[6], rows[7])
    assert linear[6] is not None and linear[7].op == "placeholder" and linear[8] == got.dtype == torch.bfloat16
    assert relative_error(got, expected) < 0.03


def test_casts_to_a_smaller_type_stay_in_front_of_a_norm_and_a_sum():
    def finish(m, x, v, r):
        return r.bfloat16() + m.out(F.layer_norm(x.bfloat16().float(), (48,)))

    model = Layers(finish)
    x, vector, residual = torch.randn(2, 6, 48), torch.randn(2, 1, 48), torch.randn(2, 6, 64)
    with sp.quantize_linears(model, min_features=0):
        _, found = compiled_ops(model, lambda compiled: compiled(x, vector, residual))
    assert found["quantize_activation"][0][0].target == found["quantized_linear"][0][7].target == "bfloat16"


def test_what_a_call_may_write_to():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("L_self_attn_processor_sage_events_traced")
    calls = {
        "reads": graph.call_function(torch.add, (x, 1)),
        "and": graph.call_function(operator.and_, (x, y)),
        "by name": graph.call_function(F.relu, (x,), {"inplace": True}),
        "by place": graph.call_function(F.dropout, (x, 0.5, True, True)),
        "not by place": graph.call_function(F.dropout, (x, 0.5, True, False)),
        "out": graph.call_function(torch.add, (x, 1), {"out": x}),
        "method": graph.call_method("mul_", (x, 2)),
        "operator": graph.call_function(operator.iadd, (x, 2)),
        "item": graph.call_function(operator.setitem, (x, 0, 2)),
        "op": graph.call_function(torch.ops.aten.add_.Tensor, (x, x)),
        "a graph": graph.call_function(torch.ops.higher_order.cond, (x, None, None, ())),
        "own": graph.call_method("add_", (graph.call_function(operator.getitem, (y, 0)), 1)),
        "a sum with own": graph.call_method("add_", (graph.call_function(torch.add, (y, x)), 1)),
    }
    found = {name: any(z is not None and not is_own(z) for z in written_by(node)) for name, node in calls.items()}
    assert {name for name, writes in found.items() if not writes} == {"reads", "and", "not by place", "own"}


@pytest.mark.slow("compiles models of transformers")
@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
def test_a_model_of_transformers_is_compiled_in_one_graph(name):
    """Dynamo guards on the class of a decoder layer, which a swap has changed."""
    pytest.importorskip("transformers")
    from tests.support.tiny_language_models import MODELS as LANGUAGE_MODELS

    model, inputs = LANGUAGE_MODELS[name]()
    inputs = {key: value for key, value in inputs.items() if key in ("input_ids", "attention_mask")}
    given = {} if name == "bert" else {"use_cache": False}
    with torch.no_grad():
        stock = model(**inputs, **given)[0]
        with sp.quantize_linears(model, min_features=1) as swap:
            eager = model(**inputs, **given)[0]
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs, **given)[0]
            assert swap.report().fallbacks == {}
    assert relative_error(compiled, eager) < 1e-3 < relative_error(compiled, stock)
