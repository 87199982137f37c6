"""Calls with too little work for 8 bit run the 16-bit layer, on a GPU alone, and are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.linears import modules
from sage_processors.linears.weights.linear_state import LEAST_WORK, Shared
from tests.linears.counting import set_least_work


class Block(nn.Module):
    """A norm whose result two layers read, one of which may be short, and a third one behind them."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.up = nn.Linear(width, 4 * width)

    def forward(self, x):
        y = self.norm(x)
        return self.to_q(y) + self.to_k(y) * self.to_v(y) + self.up(y)[..., : x.shape[-1]]


class Model(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model(width=64, seed=0):
    torch.manual_seed(seed)
    return Model(width).eval()


def row_of(swap, name: str) -> dict:
    return next(row for row in swap.report().rows if row["layer"] == name)


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("least", [True, False])
def test_work_is_counted_over_all_that_is_multiplied_together(least):
    net = model()
    shared = Shared(64 * 64 * 3 * 10 + (not least))
    with sp.quantize_linears(net, "int8", min_features=0):
        states = [net.blocks[0].to_v._sage, net.blocks[0].up._sage]
        for state in states:
            state.shared = shared
            state.find_short()
        assert (states[0].short_below > 10 * 64) is not least and states[1].short_below <= 10 * 64
        before = states[0].short_below
        states[0].run._break_up(1)  # the first forward would have been another one
        assert states[0].short_below == before
        states[0].dropped = True
        states[0].find_short()
        assert states[0].short_below == 0  # there is no 16-bit weight to multiply by
        states[0].dropped = False


def test_only_default_sizes_leave_short_calls_in_16_bit():
    for options, least in (({}, LEAST_WORK), ({"min_features": 0}, 0), ({"min_features": 1024}, 0)):
        net = model(1024) if options.get("min_features") != 0 else model()
        with sp.quantize_linears(net, "int8", **options):
            assert net.blocks[0].up._sage.shared.least_work == least


@pytest.mark.filterwarnings("error")
def test_a_short_call_is_the_stock_layer_s_and_its_norm_no_longer_waits(monkeypatch, library_tests):
    """As on a GPU: the CPU is taken for one."""
    monkeypatch.setattr(modules, "is_timed", lambda device: True)
    net = model(1024)
    stock = model(1024)
    short, long = draw(1, 8, 1024), draw(1, 40, 1024)
    with torch.no_grad(), sp.quantize_linears(net, "int8", on_unsupported="raise") as swap:
        set_least_work(net, 2**26)
        state = net.blocks[0].norm._sage
        for _ in range(3):
            torch.testing.assert_close(net(short), stock(short), rtol=0, atol=0)
        row = row_of(swap, "blocks.0.to_q")
        assert row["calls"] == 0 and row["fallbacks"] == {"short": 3}
        assert row_of(swap, "blocks.0.up")["fallbacks"] == {"short": 3}
        assert state.at_once_up_to == short.numel()
        # whose weight nobody got, so that nobody looks at its numbers before the next forward
        assert not net.blocks[0].up._sage.touched
        out = net(long)
        assert row_of(swap, "blocks.0.to_q")["calls"] == 1 and state.at_once_up_to == short.numel()
        wanted = stock(long)
        assert 1e-4 < (out - wanted).norm() / wanted.norm() < 0.05
        torch.testing.assert_close(net(short), stock(short), rtol=0, atol=0)


def test_a_short_call_in_compiled_code(monkeypatch):
    monkeypatch.setattr(modules, "is_timed", lambda device: True)
    net, stock = model(1024), model(1024)
    torch._dynamo.reset()
    short, long = draw(1, 8, 1024), draw(1, 40, 1024)
    with torch.no_grad(), sp.quantize_linears(net, "int8") as swap:
        set_least_work(net, 2**26)
        for block in net.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(net(short), stock(short), rtol=0, atol=0)
        assert row_of(swap, "blocks.0.to_q")["fallbacks"]["short"] >= 1
        out, wanted = net(long), stock(long)
        assert 1e-4 < (out - wanted).norm() / wanted.norm() < 0.05
        for block in net.blocks:
            block._compiled_call_impl = None
    torch._dynamo.reset()


@pytest.mark.gpu
def test_short_and_long_calls_on_a_gpu():
    net, stock = model(1024).cuda().bfloat16(), model(1024).cuda().bfloat16()
    short, long = (draw(1, n, 1024).cuda().bfloat16() for n in (512, 16384))
    with torch.no_grad():
        with sp.quantize_linears(net, "int8") as swap:
            assert torch.equal(net(short), stock(short)) and torch.equal(net(short), stock(short))
            assert row_of(swap, "blocks.1.up")["fallbacks"] == {"short": 2}
            net(long)
            rows = [row_of(swap, f"blocks.0.{name}") for name in ("to_q", "to_k", "to_v", "up")]
            assert all(row["calls"] == 1 for row in rows)
        with sp.quantize_linears(net, "int8", min_features=1024) as swap:
            net(short)
            assert row_of(swap, "blocks.1.up")["calls"] == 1


@pytest.mark.gpu
def test_what_a_cuda_graph_captures_is_never_short():
    net, stock = model(1024).cuda().bfloat16(), model(1024).cuda().bfloat16()
    x = draw(1, 512, 1024).cuda().bfloat16()
    with torch.no_grad(), sp.quantize_linears(net, "int8") as swap:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                assert torch.equal(net(x), stock(x))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = net(x)
        graph.replay()
        wanted = stock(x)
        assert 1e-3 < (out - wanted).norm() / wanted.norm() < 0.05
        row = row_of(swap, "blocks.1.up")
        assert row["fallbacks"] == {"short": 2} and row["calls"] == 1
