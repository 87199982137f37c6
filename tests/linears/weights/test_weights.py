"""A 16-bit weight that changed is noticed, whoever wrote to it, and moving it is no change."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sage_processors as sp
from sage_processors.linears.weights import linear_state as weights
from sage_processors.linears.weights.fingerprints import WeightCheck, are_changed, sample_of
from tests.linears.counting import relative_error


@pytest.fixture
def layer():
    torch.manual_seed(0)
    module = nn.Linear(48, 64).eval().requires_grad_(False)
    with sp.quantize_linears(module, min_features=0) as swap:
        module(torch.randn(2, 48)) + 0
        yield module, swap


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def data_of(module):
    return module.weight.data


CHANGES = {
    "in_place": lambda m: m.weight.mul_(-2),
    "through_data": lambda m: data_of(m).mul_(-2),
    "data_iadd": lambda m: setattr(m.weight, "data", m.weight.data.__iadd__(torch.ones(64, 48))),
    "new_data": lambda m: setattr(m.weight, "data", -m.weight.data),
    "new_parameter": lambda m: setattr(m, "weight", nn.Parameter(-m.weight.detach(), requires_grad=False)),
    "load": lambda m: m.load_state_dict({k: -v for k, v in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict({k: -v for k, v in m.state_dict().items()}, assign=True),
    "copy": lambda m: m._parameters["weight"].copy_(torch.randn(64, 48)),
    "one_element": lambda m: m.weight.data[5].mul_(9),
    "swapped_rows": lambda m: m.weight.data.copy_(m.weight.data.flip(0)),
    "swapped_columns": lambda m: m.weight.data.copy_(m.weight.data.flip(1)),
    "bias": lambda m: m.bias.data.add_(4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(layer, name):
    module, _ = layer
    CHANGES[name](module)
    x = torch.randn(4, 48)
    assert relative_error(module(x) + 0, nn.Linear.forward(module, x)) < 0.02


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_write_in_place_that_no_attribute_tells_of_is_noticed(name):
    """Through model.parameters(), as mergers of adapters do: PyTorch counts it, and we are not asked."""
    torch.manual_seed(0)
    net = nn.Linear(48, 64).eval().requires_grad_(False)
    x = torch.randn(3, 48)
    with sp.quantize_linears(net, min_features=0):
        for _ in range(3):
            net(x)
            assert not (net._sage.touched or net._sage.bias_touched)
            dict(net.named_parameters())[name].add_(0.5)
            expected = torch.nn.functional.linear(x, net._parameters["weight"], net._parameters["bias"])
            assert ((net(x) - expected).norm() / expected.norm()).item() < 0.02


def test_a_change_behind_the_modules_back_is_noticed_by_refresh(layer):
    module, swap = layer
    for parameter in module.parameters():
        parameter.data.mul_(-1)
    swap.refresh()
    x = torch.randn(4, 48)
    assert relative_error(module(x) + 0, nn.Linear.forward(module, x)) < 0.02


def test_looking_at_a_weight_or_moving_it_quantises_nothing(layer, monkeypatch):
    module, swap = layer
    monkeypatch.setattr(weights, "quantize_weight", lambda *a, **k: pytest.fail("quantised again"))
    x = torch.randn(4, 48)
    assert module.weight.dtype == torch.float32
    module(x) + 0
    module.to(torch.float64).to(torch.float32)
    module(x) + 0
    module._parameters["weight"].data = module._parameters["weight"].data.clone()
    module(x) + 0
    swap.refresh()
    module(x) + 0


def test_weights_on_meta_wait():
    module = nn.Linear(48, 64, device="meta").eval().requires_grad_(False)
    with sp.quantize_linears(module, min_features=0) as swap:
        module(torch.randn(4, 48, device="meta"))
        (row,) = swap.report().rows
        assert row["calls"] == 0 and row["fallbacks"] == {"device": 1}
        module.to_empty(device="cpu").load_state_dict(nn.Linear(48, 64).state_dict())
        x = torch.randn(4, 48)
        assert relative_error(module(x) + 0, nn.Linear.forward(module, x)) < 0.02


def test_tied_weights_stay_tied():
    block = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(2)).eval().requires_grad_(False)
    block[1].weight = block[0].weight
    with sp.quantize_linears(block, min_features=0):
        x = torch.randn(4, 48)
        assert torch.equal(block[0](x) + 0, block[1](x) + 0)
        block[0].weight.neg_()
        assert torch.equal(block[0](x) + 0, block[1](x) + 0)
    assert block[0].weight is block[1].weight


def test_one_module_in_two_places_is_swapped_once():
    shared = nn.Linear(48, 48)
    block = nn.ModuleList([shared, shared]).eval().requires_grad_(False)
    expected = copy.deepcopy(shared)
    with sp.quantize_linears(block, min_features=0) as swap:
        assert len(swap.report().rows) == 1
        block[1](torch.randn(4, 48)) + 0
    assert type(shared) is nn.Linear and torch.equal(shared.weight, expected.weight)


# --- without the 16-bit weights ---


def test_dropped_weights_free_their_memory_and_change_no_result():
    block = nn.ModuleList(nn.Linear(48, 64) for _ in range(2)).eval().requires_grad_(False)
    x = torch.randn(4, 48)
    with sp.quantize_linears(block, min_features=0):
        expected = [module(x) + 0 for module in block]
    sp.quantize_linears(block, min_features=0, drop_weights=True)
    assert all(torch.equal(module(x) + 0, y) for module, y in zip(block, expected, strict=True))
    weight = block[0].weight
    assert weight.shape == (64, 48) and weight.untyped_storage().nbytes() == 4 and weight.isnan().all()
    block.to(torch.bfloat16)
    assert block[0].weight.dtype == torch.bfloat16 and block[0].weight.untyped_storage().nbytes() == 2
    assert relative_error(block[0](x.bfloat16()) + 0, expected[0]) < 0.02
    needing = x.bfloat16().requires_grad_()  # exact calls use what the codes stand for
    assert relative_error(block[0](needing).detach(), expected[0]) < 0.02


def test_dropped_halves_of_a_gated_layer():
    from diffusers.models.activations import GEGLU

    block = GEGLU(48, 64).eval().requires_grad_(False)
    x = torch.randn(4, 48)
    expected, plain = block(x), block.proj(x)
    sp.quantize_linears(block, min_features=0, drop_weights=True)
    assert relative_error(block(x) + 0, expected) < 0.03
    assert relative_error(block.proj(x) + 0, plain) < 0.02
    assert relative_error(block.proj(x.clone().requires_grad_()).detach(), plain) < 0.02


class Net(nn.Sequential):
    """A class of its own: of a model that is one of torch.nn's, torch.compile takes in the hooks, too."""

    def forward(self, x):
        return super().forward(x)


def net():
    torch.manual_seed(0)
    return Net(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()


def called(model, x):
    with torch.no_grad():
        return model(x) + 0


def train(model, optimizer, call=None, steps=3):
    for _ in range(steps):
        (call or model)(torch.randn(4, 64, device=next(model.parameters()).device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),  # counts no writes
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["train", "eval", "layer_alone", "compiled"])
def test_trained_weights_are_quantised_anew(name, how, device):
    """Weights of which nobody tells that they were written to, in whatever way gradients were asked for."""
    model, x = net().to(device), torch.randn(4, 64, device=device)
    with sp.quantize_linears(model, min_features=0) as swap:
        before = called(model, x)
        model.train(how in ("train", "compiled"))
        call = None
        if how == "layer_alone":  # nobody calls the model
            call = model[1]
        elif how == "compiled":
            call = torch.compile(model, backend="aot_eager")
        train(model, OPTIMIZERS[name](model.parameters()), call)
        model.eval()
        got = called(model, x)
        swap.remove()
        assert relative_error(got, called(model, x)) < 0.03 < relative_error(got, before)
    torch._dynamo.reset()


def test_a_call_between_a_gradient_and_the_step_is_not_the_last_word():
    model, x = net(), torch.randn(4, 64)
    optimizer = OPTIMIZERS["fused"](model.parameters())
    with sp.quantize_linears(model, min_features=0) as swap:
        model(x).square().sum().backward()
        for _ in range(2):
            called(model, x)
            optimizer.step()
        got = called(model, x)
        swap.remove()
    assert relative_error(got, called(model, x)) < 0.03


def test_frozen_weights_are_not_looked_at_after_a_forward_with_gradients(monkeypatch):
    model, x = net().requires_grad_(False), torch.randn(4, 64)
    with sp.quantize_linears(model, min_features=0):
        called(model, x)
        looked = []
        monkeypatch.setattr(weights, "checksum", lambda *a: looked.append(1))
        model(x)
        called(model, x)
        assert not looked


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_looks_at_some_numbers_of_every_weight(monkeypatch, device):
    model, x = net().to(device), torch.randn(4, 64, device=device)
    made = []
    quantize = weights.quantize_weight
    monkeypatch.setattr(weights, "quantize_weight", lambda *a, **k: made.append(1) or quantize(*a, **k))
    with sp.quantize_linears(model, min_features=0) as swap:
        called(model, x)
        made.clear()
        swap.begin_run()
        called(model, x)
        assert not made
        for layer in (model[1], model[3]):
            for parameter in layer._parameters.values():
                parameter.data.mul_(-3)
            swap.begin_run()
            assert relative_error(called(model, x), model(x)) < 0.03
        assert len(made) == 2
        called(model, x)
        model[1]._parameters["weight"].data.mul_(-2)
        swap.begin_run()
        swap.begin_run()  # and a layer that is called by hand, not by a forward of the model
        assert relative_error(called(model[1], x), nn.functional.linear(x, *model[1]._parameters.values())) < 0.03


def test_a_check_leaves_traces_and_fake_tensors_alone():
    """They see no operation of it, and the weights that were written to are noticed in the next eager call."""
    model, x = net().requires_grad_(False), torch.randn(4, 64)
    with sp.quantize_linears(model, min_features=0) as swap:
        called(model, x)
        operations = []
        for begins in (False, True):
            if begins:
                swap.begin_run()
            operations.append(len(make_fx(model[1])(x).graph.nodes))
        swap.begin_run()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert model[1](mode.from_tensor(x)).shape == (4, model[1].out_features)
        swap.begin_run()
        torch.jit.trace(model[1], x, check_trace=False)
        assert operations[0] == operations[1]
        model[1]._parameters["weight"].data.mul_(-2)
        expected = nn.functional.linear(x, *model[1]._parameters.values())
        assert relative_error(called(model[1], x), expected) < 0.03


def test_a_check_that_is_wanted_during_another_is_not_lost():
    check, state = WeightCheck(), SimpleNamespace(touched=False, bias_touched=False)
    now, before = torch.zeros(4), torch.zeros(4)

    def samples():
        if check.is_wanted and not made:
            made.append(1)
            check.want(lambda: samples)
        return [(state, (now, before))]

    made = []
    check.want(lambda: samples)
    check.make()
    assert check.is_wanted and not state.touched
    now += 1
    check.make()
    assert state.touched and not check.is_wanted


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 64), (70, 300), (300, 70), (7, 0)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "cut", "expanded"])
def test_a_sample_is_of_other_rows_and_columns(shape, layout):
    rows, columns = shape
    x = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    x = {
        "contiguous": lambda: x,
        "transposed": lambda: x.t().contiguous().t(),
        "cut": lambda: torch.nn.functional.pad(x, (2, 3, 1, 1))[1:-1, 2 : columns + 2],
        "expanded": lambda: x[:1].expand(rows, columns),
    }[layout]()
    sample = sample_of(x)
    assert len(sample) == min(64, *shape)
    if layout != "expanded" and sample.numel():
        at = sample.long()
        assert len(set((at // columns).tolist())) == len(set((at % columns).tolist())) == len(sample)
    assert sample.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_samples_are_compared_by_their_bits():
    nan, zero = torch.full((4,), torch.nan), torch.zeros(4)
    pairs = [(nan, nan.clone()), (zero, -zero), (zero, torch.zeros(4, dtype=torch.bfloat16)), (zero, torch.zeros(3))]
    pairs += [(zero.bfloat16(), zero.bfloat16()), (zero.half(), torch.ones(4).half())]
    assert are_changed(pairs) == [False, True, True, True, False, True] and are_changed([]) == []


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net().requires_grad_(False)

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_that_is_compiled_with_code_around_it_needs_refresh_and_says_so(fullgraph, library_tests):
    torch._dynamo.reset()
    around, x = Around(), torch.randn(4, 64)
    with sp.quantize_linears(around.inner, min_features=0) as swap:
        called(around, x)
        assert not swap.report().notes
        compiled = torch.compile(around, backend="aot_eager", fullgraph=fullgraph)
        called(compiled, x)
        (note,) = swap.report().notes
        assert "call refresh() after its weights" in note
        with torch.no_grad():
            for parameter in around.parameters():
                parameter.mul_(-2)
        swap.refresh()
        got = called(compiled, x)
    assert relative_error(got, called(around, x)) < 0.03
    torch._dynamo.reset()
