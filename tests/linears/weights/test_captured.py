"""CUDA graphs of models in 8 bit: a graph reads what eager calls made and keep, and keeps nothing of its own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_processors as sp
from sage_processors.linears import modules
from sage_processors.linears.weights import linear_state as weights
from sage_processors.linears.weights import replays, storage
from sage_processors.linears.weights.linear_state import linear_state
from sage_processors.linears.weights.storage import CODES
from sage_processors.reporting.event_counter import EventCounter
from tests.linears.counting import relative_error, set_least_work


pytestmark = pytest.mark.usefixtures("library_tests")


WIDTH = 1024


class Gated(nn.Module):
    """A norm, a layer whose two halves GEGLU multiplies, two layers of one input with biases, a residual."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.to_q, self.to_k = nn.Linear(width, width), nn.Linear(width, width)
        self.proj, self.out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm(x)
        value, gate = self.proj(self.to_q(y) * 0.5 + self.to_k(y)).chunk(2, -1)
        return self.out(value * F.gelu(gate)) + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def draw(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def linears(net):
    return [m for m in net.modules() if linear_state(m) is not None]


@pytest.fixture
def capturing(monkeypatch):
    """A list: while it is not empty, a graph is taken to be captured. And the CPU for a GPU, where calls are short."""
    on: list = []
    monkeypatch.setattr(modules, "is_timed", lambda device: True)
    for module in (modules, replays, storage, weights):
        monkeypatch.setattr(module, "is_captured", lambda device=None: bool(on))
    return on


@torch.no_grad()
def test_E25_what_is_captured_leaves_weights_where_and_as_they_are(capturing):
    net, stock, x = model(), model(), draw(8, 1)
    with sp.quantize_linears(net, "int8"):
        net(x)  # short: nothing is known yet of what follows the layers
        before = [m._sage.storage.all_rows.codes.data_ptr() for m in linears(net)]
        capturing.append(True)
        assert 1e-4 < relative_error(net(x), stock(x)) < 0.05
        capturing.clear()
        set_least_work(net, 0)
        for block in net.blocks:
            state = block.proj._sage
            assert state.storage.is_fixed and not state.storage.in_turns
        assert 1e-4 < relative_error(net(x), stock(x)) < 0.05  # now a graph reads them
        assert not any(block.proj._sage.storage.in_turns for block in net.blocks)
        assert [m._sage.storage.all_rows.codes.data_ptr() for m in linears(net)] == before


@torch.no_grad()
@pytest.mark.parametrize(
    "name, least_work", [("weight", 0), ("bias", 0), ("weight", 2**40), ("bias", 2**40), ("weight.data", 2**40)]
)
def test_E25_what_was_written_to_since_is_captured_in_16_bit(capturing, name, least_work):
    """Which no counter of PyTorch's tells of `.data`: what was handed out is not captured after short calls."""
    net, stock, x = model(), model(), draw(8, 1)
    with sp.quantize_linears(net, "int8") as swap:
        state = net.blocks[0].out._sage
        set_least_work(net, least_work)
        net(x)
        before = state.events.numbers()
        for one in (net, stock):
            if name == "weight.data":
                one.blocks[0].out.weight.data.mul_(3.0)
            else:
                one.blocks[0].out._parameters[name].mul_(3.0)
        capturing.append(True)
        out = net(x)
        capturing.clear()
        swap.count_replays()
        calls, *exact = (now - then for now, then in zip(state.events.numbers(), before, strict=True))
        assert calls == 0 and sum(exact) == 1
        assert relative_error(out, stock(x)) < 0.05


@torch.no_grad()
def test_a_graph_s_bias_is_renewed_in_place(capturing):
    net, x = model(), draw(8, 1)
    with sp.quantize_linears(net, "int8"):
        state = net.blocks[0].proj._sage
        set_least_work(net, 0)
        net(x)
        capturing.append(True)
        net(x)
        capturing.clear()
        laid_out, own = state.storage._bias, state.bias
        before = laid_out.clone()
        net.blocks[0].proj.bias.add_(1.0)
        net(x)
        assert state.storage._bias is laid_out and state.bias is own
        torch.testing.assert_close(laid_out, before + 1.0)


@torch.no_grad()
def test_a_layer_alone_and_one_after_an_error_are_captured_by_themselves(capturing):
    alone = nn.Sequential(nn.Linear(WIDTH, WIDTH)).eval()[0]
    with sp.quantize_linears(alone, "int8", min_features=0):
        set_least_work(alone, 0)
        alone(draw(8, 1))
        capturing.append(True)
        assert type(alone(draw(8, 1))) is torch.Tensor
    capturing.clear()
    net, x = model(), draw(8, 1)
    with sp.quantize_linears(net, "int8"):
        set_least_work(net, 0)
        net(x)
        capturing.append(True)
        hook = net.blocks[1].register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(x)
        hook.remove()
        assert type(net.blocks[0].norm(x)) is torch.Tensor


@pytest.mark.gpu
@torch.no_grad()
def test_replays_have_the_bits_of_eager_forwards_on_a_gpu():
    net = model().cuda().bfloat16()
    inputs = [draw(256, seed).cuda().bfloat16() for seed in (1, 2, 3)]
    with sp.quantize_linears(net, "int8"):
        set_least_work(net, 0)
        wanted = [net(x) for x in inputs][1:]
        x, whole, part = inputs[0].clone(), torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(whole):
            out = net(x)
        layer = net.blocks[1].to_q
        with torch.cuda.graph(part):
            own = layer(x)
        for new, y in zip(inputs[1:], wanted, strict=True):
            x.copy_(new)
            whole.replay()
            part.replay()
            assert torch.equal(out, y)
            assert torch.equal(own, layer(new.clone()))


@pytest.mark.gpu
@torch.no_grad()
def test_E25_replays_and_eager_calls_after_short_ones_on_a_gpu():
    """The layers' codes lie in another order once their gated activation is known: not in what a graph reads."""
    net, stock = model().cuda().bfloat16(), model().cuda().bfloat16()
    short, other, long = (draw(n, s).cuda().bfloat16() for n, s in ((256, 1), (256, 2), (16384, 3)))
    with sp.quantize_linears(net, "int8"):
        for _ in range(2):
            assert torch.equal(net(short), stock(short))
        x, graph = short.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = net(x)
        assert 1e-3 < relative_error(net(long), stock(long)) < 0.05  # before any replay
        for wanted in (short, other, short):
            x.copy_(wanted)
            graph.replay()
            assert 1e-3 < relative_error(out, stock(wanted)) < 0.05
            filler = [torch.full_like(m._buffers[CODES], 77) for m in linears(net) if CODES in m._buffers]
            del filler  # whatever was let go is somebody else's by now
        assert 1e-3 < relative_error(net(long), stock(long)) < 0.05


def replayed(net, times: int, kind: int = 0) -> None:
    """What a graph does on the GPU: a forward that is captured on this CPU has been replayed once."""
    [counter] = linears(net)[0]._sage.shared.replays._times.values()
    counter.traced[kind] += times


@torch.no_grad()
def test_E25_linear_calls_of_replays_are_counted(capturing, monkeypatch):
    net, x = model(), draw(8, 1)
    with sp.quantize_linears(net, "int8") as swap:
        set_least_work(net, 0)
        net(x)
        once = swap.report()
        assert once.calls == 8 and not once.fallbacks
        capturing.append(True)
        net(x)
        replayed(net, 2)
        assert [row["calls"] for row in swap.report().rows] == [1] * 8  # nobody may ask the GPU now
        capturing.clear()
        replayed(net, 1)
        for _ in range(2):
            report = swap.report()
            assert report.calls == 40 and not report.fallbacks
            assert report.rows[0]["bytes_saved"] == 5 * once.rows[0]["bytes_saved"]
        capturing.append(True)
        net(x)  # as before: the same number
        net.blocks[1].out.train()
        net(x)
        capturing.clear()
        replayed(net, 3, kind=1)
        assert swap.report().calls == 40 + 8 + 4 * 7 and swap.report().fallbacks == {"training": 4}
        monkeypatch.setattr(replays, "MOST_KINDS", 2)
        net.blocks[0].out.train()
        capturing.append(True)
        net(x)
        capturing.clear()
        assert swap.report().fallbacks == {"training": 6}  # counted as it was captured


def test_replays_are_not_counted_on_a_tensor_without_numbers():
    found = replays.Replays()
    found.counters = [EventCounter(2)]
    with FakeTensorMode():
        found.begin(torch.device("cpu"), captured=False)
    assert not found._times
    found.begin(torch.device("cpu"), captured=False)
    assert found._times


def test_replays_are_counted_where_an_eager_forward_has_made_room():
    """What is made in a capture is that graph's alone; weights that are offloaded say nothing of the GPU."""
    found, counter = replays.Replays(), EventCounter(2)
    found.counters = [counter]
    found.begin(torch.device("cpu"), captured=True)
    counter.add(0)
    found.end()
    found.count()
    assert not found._times and counter.numbers() == [1, 0]
    net = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    assert weights._device_of(net) == torch.device("cpu")


@torch.no_grad()
def test_what_is_captured_of_a_copy_counts_for_nobody_else(capturing):
    net, x = model(), draw(8, 1)
    with sp.quantize_linears(net, "int8") as swap:
        set_least_work(net, 0)
        net(x)
        twin = copy.deepcopy(net)
        twin(x)
        assert not linears(twin)[0]._sage.shared.replays._times
        capturing.append(True)
        twin(x)
        capturing.clear()
        assert swap.report().calls == 8
        with sp.quantize_linears(twin, "int8") as own:
            set_least_work(twin, 0)
            twin(x)
            assert own.report().calls == 8 and swap.report().calls == 8
