"""torch's functions replaced after linear layers and norms were swapped: run in 16 bit, counted, undone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm
from torch import nn

import sage_processors as sp
from tests.linears.counting import relative_error
from tests.linears.test_modules import layer, only, swapped


FORWARD, LINEAR = nn.Linear.forward, F.linear


def louder_forward(self, input):
    return 3 * LINEAR(input, self.weight, self.bias)


def louder_linear(input, weight, bias=None):
    return 3 * LINEAR(input, weight, bias)


PATCHES = {"Linear.forward": (nn.Linear, "forward", louder_forward), "F.linear": (F, "linear", louder_linear)}


class Normed(nn.Module):
    """A norm in front of two layers, as in a block."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.first, self.second = norm, nn.Linear(48, 64), nn.Linear(64, 48)

    def forward(self, x):
        return self.second(self.first(self.norm(x)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_what_torch_runs_for_a_linear_layer_is_followed(patch, compiled, monkeypatch):
    stock, twin = layer()
    x = torch.randn(5, 48)
    with swapped(twin) as swap:
        run = torch.compile(twin, backend="eager", fullgraph=True) if compiled else twin
        before = run(x) + 0
        with monkeypatch.context() as context:
            context.setattr(*patch)
            torch.testing.assert_close(run(x), stock(x))
            assert only(swap.report())["fallbacks"] == {"patched": 1}
            assert "replaced" in only(swap.report())["note"]
        assert torch.equal(run(x) + 0, before) and not torch.equal(before, stock(x))
        assert only(swap.report())["fallbacks"] == {"patched": 1} and not only(swap.report())["note"]
    torch._dynamo.reset()


def test_a_subclass_with_a_forward_of_its_own_since_is_followed(monkeypatch):
    class Kind(nn.Linear):
        pass

    module = Kind(48, 64).eval().requires_grad_(False)
    x = torch.randn(5, 48)
    stock = module(x)
    with swapped(module) as swap:
        module(x) + 0
        monkeypatch.setattr(Kind, "forward", louder_forward, raising=False)
        torch.testing.assert_close(module(x), 3 * stock)
        assert only(swap.report())["fallbacks"] == {"patched": 1}


def test_a_forward_that_was_replaced_before_the_swap_is_not_left_out(monkeypatch):
    stock, twin = layer()
    x = torch.randn(5, 48)
    with monkeypatch.context() as context:
        context.setattr(*PATCHES["Linear.forward"])
        swap = swapped(twin)
        torch.testing.assert_close(twin(x), stock(x))
    assert relative_error(twin(x) + 0, stock(x)) < 0.05
    assert only(swap.report())["calls"] == 1 and only(swap.report())["fallbacks"] == {"patched": 1}


def test_strict_raises(monkeypatch):
    _, twin = layer()
    with swapped(twin, on_unsupported="raise"):
        monkeypatch.setattr(*PATCHES["Linear.forward"])
        with pytest.raises(sp.UnsupportedLinearError, match="'patched'"):
            twin(torch.randn(5, 48))


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_without_its_16_bit_weight_a_layer_runs_what_was_put_there_on_the_one_of_its_codes(patch, monkeypatch):
    stock, twin = layer()
    x = torch.randn(5, 48)
    swapped(twin, drop_weights=True)
    monkeypatch.setattr(*patch)
    assert 0 < relative_error(twin(x), stock(x)) < 0.05
    assert torch.isnan(twin.weight).all()


def test_a_copy_follows(monkeypatch):
    stock, twin = layer()
    x = torch.randn(5, 48)
    with swapped(twin):
        other = copy.deepcopy(twin)
        monkeypatch.setattr(*PATCHES["F.linear"])
        torch.testing.assert_close(other(x), stock(x))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, RMSNorm])
def test_a_norms_forward_is_followed(norm, monkeypatch):
    torch.manual_seed(0)
    model = Normed(norm(48, eps=1e-6)).eval().requires_grad_(False)
    x = torch.randn(5, 48)
    own = norm.forward
    with swapped(model) as swap:
        before = model(x) + 0
        assert torch.equal(model(x) + 0, before)
        with monkeypatch.context() as context:
            context.setattr(norm, "forward", lambda self, x: 3 * own(self, x))
            louder = model(x) + 0
        assert torch.equal(model(x) + 0, before)
        calls = swap.report().calls
    with monkeypatch.context() as context:
        context.setattr(norm, "forward", lambda self, x: 3 * own(self, x))
        assert relative_error(louder, model(x)) < 0.05
    assert calls == 8
