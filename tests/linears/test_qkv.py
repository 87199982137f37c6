"""to_q, to_k and to_v: one quantisation and one multiplication where their input is one, and right where it is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.postponed.region import opened
from tests.linears.counting import OpCounter, expected_error, relative_error


pytestmark = pytest.mark.usefixtures("library_tests")


class Attention(nn.Module):
    def __init__(self, bias=(True, True, True), kv=48):
        super().__init__()
        self.to_q = nn.Linear(48, 64, bias=bias[0])
        self.to_k = nn.Linear(kv, 32, bias=bias[1])
        self.to_v = nn.Linear(kv, 32, bias=bias[2])

    def forward(self, x, other=None):
        other = x if other is None else other
        return self.to_q(x), self.to_k(other), self.to_v(other)


def pair(**options):
    torch.manual_seed(0)
    stock = Attention(**options).eval().requires_grad_(False)
    return stock, copy.deepcopy(stock)


def close(got, stock, x, other=None):
    for a, b, module in zip(got, stock(x, other), stock.children(), strict=True):
        y = x if other is None or module is stock.to_q else other
        assert relative_error(a + 0, b) < 1.3 * expected_error(y, module.weight)
        assert a.shape == b.shape
        assert a.unflatten(-1, (-1, 16)).transpose(1, 2).shape[1] == b.shape[-1] // 16


@pytest.mark.parametrize("bias", [(True,) * 3, (False,) * 3, (True, False, True)])
def test_one_input_is_one_op(bias):
    stock, twin = pair(bias=bias)
    with sp.quantize_linears(twin, min_features=0) as swap:
        for _ in range(3):
            x = torch.randn(2, 6, 48)
            with OpCounter() as ops:
                got = twin(x)
            assert (ops.quantized, ops.multiplied) == (1, 1)
            close(got, stock, x)
        assert [row["calls"] for row in swap.report().rows] == [3, 3, 3]
        got[0].zero_()  # results are each other's neighbours, not each other
        close([stock.to_q(x), *got[1:]], stock, x)


@pytest.mark.parametrize("kv", [48, 24])
def test_keys_and_values_of_another_input_are_one_op_from_the_second_call_on(kv):
    stock, twin = pair(kv=kv)
    with sp.quantize_linears(twin, min_features=0):
        for i in range(3):
            x, other = torch.randn(2, 6, 48), torch.randn(2, 3, kv)
            with OpCounter() as ops:
                got = [y + 0 for y in twin(x, other)]
            assert i == 0 or (ops.quantized, ops.multiplied) == (2, 2)
            close(got, stock, x, other)
        if kv == 48:  # and one input again
            close(twin(x), stock, x)


def test_three_inputs_and_any_order():
    stock, twin = pair()
    with sp.quantize_linears(twin, min_features=0):
        for _ in range(3):
            x = torch.randn(3, 2, 6, 48)
            got = [module(y) + 0 for module, y in zip(twin.children(), x, strict=True)]
            for a, module, y in zip(got, stock.children(), x, strict=True):
                assert relative_error(a, module(y)) < 1.3 * expected_error(y, module.weight)
            v, k, q = twin.to_v(x[0]), twin.to_k(x[0]), twin.to_q(x[0])
            close((q, k, v), stock, x[0])


BETWEEN = {
    "nothing": lambda model, x: None,
    "input": lambda model, x: x.mul_(-3),
    "weight": lambda model, x: model.to_k.weight.mul_(2),
    "bias": lambda model, x: model.to_k.bias.add_(1),
    "exchanged weight": lambda model, x: setattr(
        model.to_k, "weight", nn.Parameter(model.to_k.weight.data * 2, False)
    ),
    "exchanged bias": lambda model, x: setattr(model.to_k, "bias", nn.Parameter(model.to_k.bias.data + 1, False)),
}


@pytest.mark.parametrize("change", BETWEEN)
@pytest.mark.parametrize("other", [False, True])
def test_what_changes_between_the_calls_is_seen(change, other):
    stock, twin = pair()
    with sp.quantize_linears(twin, min_features=0):
        twin(torch.randn(2, 6, 48))
        x = torch.randn(2, 6, 48)
        y = torch.randn(2, 6, 48) if other else x
        with opened():
            q, first = twin.to_q(x) + 0, stock.to_q(x)
            BETWEEN[change](twin, x)
            k = twin.to_k(y) + 0
        stock.load_state_dict(twin.state_dict())
        assert relative_error(q, first) < 0.02 and relative_error(k, stock.to_k(y)) < 0.02


def test_an_inference_tensor_that_is_written_to_between_the_calls_is_seen():
    stock, twin = pair()
    with sp.quantize_linears(twin, min_features=0), torch.inference_mode(), opened():
        y = torch.randn(2, 6, 48)
        twin.to_q(y)
        y.mul_(-3)
        assert relative_error(twin.to_k(y) + 0, stock.to_k(y)) < 0.02


def test_results_nobody_asks_for_are_let_go():
    stock, twin = pair()
    with sp.quantize_linears(twin, min_features=0):
        x = torch.randn(2, 6, 48)
        with opened() as region:
            twin.to_q(x)
            assert len(region.joined) == 1
            twin.to_k(x), twin.to_v(x)
            assert not region.joined
        twin.to_q(x)  # nobody knows for how long it is what it is
        with OpCounter() as ops:
            assert relative_error(twin.to_k(x), stock.to_k(x)) < 0.02
        assert ops.multiplied == 1
        with opened():
            twin.to_q(x)
            twin.to_q(torch.randn(2, 6, 48))
            assert twin.to_q._sage.run is None


def test_one_weight_that_changes_is_quantised_anew_alone():
    stock, twin = pair()
    with sp.quantize_linears(twin, min_features=0):
        x = torch.randn(2, 6, 48)
        twin(x)
        codes = twin.to_q._buffers["_sage_codes"]
        before = codes.clone()
        for module in (stock, twin):
            module.to_k.weight.neg_()
        close(twin(x), stock, x)
        assert twin.to_q._buffers["_sage_codes"] is codes  # a graph may read it
        assert torch.equal(codes[:64], before[:64]) and not torch.equal(codes[64:96], before[64:96])
        for module in (stock, twin):
            module.to_v.bias.add_(1)
        close(twin(x), stock, x)
        twin.to_v.weight[0, 0] = torch.nan  # can't be quantised: the others go on
        got = twin(x)
        close([*got[:2], stock.to_v(x)], stock, x)
        assert got[2].isnan().any()


def test_options_of_one_of_the_three():
    stock, twin = pair()
    with sp.quantize_linears(twin, min_features=0, layers={"to_k": "fp8"}):
        x = torch.randn(2, 6, 48)
        for a, b in zip(twin(x), stock(x), strict=True):
            assert relative_error(a + 0, b) < 0.04
    with sp.quantize_linears(twin, min_features=0, layers={"to_q": "none"}):
        x = torch.randn(2, 6, 48)
        with OpCounter() as ops:
            got = twin(x)
        assert (ops.quantized, ops.multiplied) == (1, 1) and torch.equal(got[0], stock.to_q(x))


class JointAttention(Attention):
    """Two origins, whose queries, keys and values are put side by side."""

    def __init__(self):
        super().__init__()
        self.add_q_proj, self.add_k_proj, self.add_v_proj = nn.Linear(24, 64), nn.Linear(24, 32), nn.Linear(24, 32)

    def forward(self, x, text):
        return *super().forward(x), self.add_q_proj(text), self.add_k_proj(text), self.add_v_proj(text)


def test_values_that_are_put_beside_others_are_in_one_piece():
    torch.manual_seed(0)
    stock = JointAttention().eval().requires_grad_(False)
    twin = copy.deepcopy(stock)
    with sp.quantize_linears(twin, min_features=0) as swap:
        for _ in range(3):
            x, text = torch.randn(2, 6, 48), torch.randn(2, 3, 24)
            with OpCounter() as ops:
                got = twin(x, text)
            assert (ops.quantized, ops.multiplied) == (2, 4)
            assert [y.is_contiguous() for y in got] == [False, False, True] * 2
            for a, (module, y) in zip(got, named(stock, x, text), strict=True):
                assert relative_error(a, module(y)) < 1.3 * expected_error(y, module.weight)
        assert {row["calls"] for row in swap.report().rows} == {3}
        codes = twin.to_q._buffers["_sage_codes"]
        assert codes.shape == (128, 48)  # compiled code multiplies by all of them at once


def named(model, x, text):
    """(projection, its input), in the order of JointAttention's results."""
    own, added = (model.to_q, model.to_k, model.to_v), (model.add_q_proj, model.add_k_proj, model.add_v_proj)
    return [(module, x) for module in own] + [(module, text) for module in added]
