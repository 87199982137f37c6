"""torch.compile sees two registered ops and ordinary tensors, and compiles once."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn

import sage_processors as sp
from sage_kernels.compat import add_graph_pass
from sage_processors.linears.graph_pass import share_in_compiled_code, share_quantized
from tests.linears.counting import relative_error
from tests.support.tiny_models import MODELS


class Backend:
    """Counts graphs, and the two ops in them."""

    def __init__(self):
        self.graphs = self.quantized = self.multiplied = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        for node in graph.graph.nodes:
            self.quantized += "quantize_activation" in str(node.target)
            self.multiplied += "quantized_linear" in str(node.target)
        return aot_eager(graph, inputs)


def flux():
    torch._dynamo.reset()
    model, inputs = MODELS["flux"]()
    with torch.no_grad():
        return model, inputs, model(**inputs, return_dict=False)[0]


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


def test_an_eager_call_between_compiled_ones():
    model, inputs, expected = flux()
    backend = Backend()
    with sp.quantize_linears(model, min_features=0), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for call in (model, compiled, model, compiled):
            assert relative_error(call(**inputs, return_dict=False)[0], expected) < 0.02
        assert backend.graphs == 1
        model.transformer_blocks[0].attn.to_q.weight.neg_()
        flipped = model(**inputs, return_dict=False)[0]
        assert relative_error(compiled(**inputs, return_dict=False)[0], flipped) < 0.02 and backend.graphs == 1
    with torch.no_grad():
        model.transformer_blocks[0].attn.to_q.weight.neg_()
        torch.testing.assert_close(compiled(**inputs, return_dict=False)[0], expected)  # stock again: compiled anew


def test_a_compiled_part_gets_ordinary_tensors():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.one, self.two = nn.LayerNorm(48), nn.Linear(48, 48), nn.Linear(48, 48)

        def forward(self, x):
            return self.two(self.one(self.norm(x)))

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


def test_layers_that_stay_exact_are_counted_in_graphs_too():
    torch._dynamo.reset()
    layer, x = nn.Linear(48, 64).requires_grad_(False).train(), torch.randn(4, 48)
    with sp.quantize_linears(layer, min_features=0) as swap:
        compiled = torch.compile(layer, fullgraph=True, backend=Backend())
        for _ in range(3):
            torch.testing.assert_close(compiled(x), nn.Linear.forward(layer, x))
        assert swap.report().fallbacks == {"training": 3}


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.to_q, self.to_k, self.to_v = (nn.Linear(48, 48) for _ in range(3))
        self.overwrites = False

    def forward(self, x):
        x = self.norm(x)
        q = self.to_q(x)
        if self.overwrites:
            x.mul_(-2)
        return q + self.to_k(x) + self.to_v(x)


@pytest.mark.parametrize("overwrites", [False, True])
def test_compiled_code_quantises_an_activation_once(overwrites):
    torch._dynamo.reset()
    block, x = Projections().eval().requires_grad_(False), torch.randn(2, 6, 48)
    block.overwrites = overwrites
    expected = block(x)
    counted = []

    def count(graph):
        counted.append(sum("quantize_activation" in str(node.target) for node in graph.nodes))

    with sp.quantize_linears(block, min_features=0), torch.no_grad():
        from torch._inductor import config

        share_in_compiled_code()
        before = config.post_grad_custom_pre_pass
        try:
            add_graph_pass(count, b"test")
            assert relative_error(torch.compile(block, fullgraph=True)(x), expected) < 0.03
        finally:
            config.post_grad_custom_pre_pass = before
    assert counted == [2 if overwrites else 1]
    add_graph_pass(share_quantized, b"")
    assert config.post_grad_custom_pre_pass is before  # once is enough


def test_the_pass_keeps_what_was_there_before():
    from torch._inductor import config

    before, seen = config.post_grad_custom_pre_pass, []
    try:
        config.post_grad_custom_pre_pass = None
        add_graph_pass(lambda graph: seen.append(1), b"1")
        share_in_compiled_code()
        config.post_grad_custom_pre_pass(torch.fx.Graph())
        assert seen == [1] and share_quantized in config.post_grad_custom_pre_pass.changes
        assert config.post_grad_custom_pre_pass.uuid() != before
    finally:
        config.post_grad_custom_pre_pass = before
