"""A 16-bit weight that changed is noticed, whoever wrote to it, and moving it is no change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sage_kernels
import sage_processors as sp
from sage_processors.linears import weights
from tests.linears.counting import relative_error


@pytest.fixture
def layer():
    torch.manual_seed(0)
    module = nn.Linear(48, 64).eval().requires_grad_(False)
    with sp.quantize_linears(module, min_features=0) as swap:
        module(torch.randn(2, 48)) + 0
        yield module, swap


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


def test_the_weight_is_what_quantize_weight_makes(layer):
    module, _ = layer
    codes, scale = sage_kernels.quantize_weight(module.weight)
    assert torch.equal(module._buffers["_sage_codes"], codes) and torch.equal(module._buffers["_sage_scale"], scale)


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


def test_dropped_weights_can_neither_be_saved_nor_put_back():
    block = nn.ModuleList(nn.Linear(48, 64) for _ in range(2)).eval().requires_grad_(False)
    swap = sp.quantize_linears(block, min_features=0, drop_weights=True)
    for call in (swap.remove, block.state_dict, lambda: sp.quantize_linears(block)):
        with pytest.raises(
            RuntimeError, match="16-bit weights were dropped .*drop_weights=True.*load the model again"
        ):
            call()
    x = torch.randn(4, 48)
    assert block[0](x).shape == (4, 64) and swap.report().calls == 1
    assert "dropped" in swap.report().rows[0]["note"]


def test_dropped_halves_of_a_gated_layer():
    from diffusers.models.activations import GEGLU

    block = GEGLU(48, 64).eval().requires_grad_(False)
    x = torch.randn(4, 48)
    expected, plain = block(x), block.proj(x)
    sp.quantize_linears(block, min_features=0, drop_weights=True)
    assert relative_error(block(x) + 0, expected) < 0.03
    assert relative_error(block.proj(x) + 0, plain) < 0.02
    assert relative_error(block.proj(x.clone().requires_grad_()).detach(), plain) < 0.02
