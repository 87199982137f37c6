"""Outliers in channels: balanced where the weights tell of them, and nothing else is touched."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.evaluation.hard_linears import inject_channel_outliers
from sage_processors.linears import balance
from sage_processors.linears.weights.linear_state import linear_state
from tests.linears.compiled.test_compile import Backend, compiled_ops
from tests.linears.counting import OpCounter, relative_error, run
from tests.linears.test_pipelines import draw, pipeline, psnr
from tests.linears.test_qkv import Attention
from tests.support.tiny_models import MODELS


@pytest.fixture
def planted():
    """A model with outliers in front of its layers, its inputs, stock output, and its error without outliers."""
    model, inputs = MODELS["flux"]()
    with sp.quantize_linears(model, min_features=0):
        swapped = run(model, inputs)
    plain = relative_error(swapped, run(model, inputs))
    with inject_channel_outliers(model):
        yield model, inputs, run(model, inputs), plain


def hard_block(seed=0, factor=256.0, channel=5):
    """Attention whose input has an outlier channel, which its weights undo; the input."""
    torch.manual_seed(seed)
    stock = Attention().eval().requires_grad_(False)
    x = torch.randn(2, 6, 48)
    x[..., channel] *= factor
    for module in stock.children():
        module.weight[:, channel] /= factor
    return stock, x


def balances(model):
    found = {name: m._sage.balance for name, m in model.named_modules() if linear_state(m) is not None}
    return {name: own for name, own in found.items() if own is not None}


# the bar: 3 dB; without a balance more than 30 are lost
@pytest.mark.slow("pictures of a whole pipeline")
def test_planted_outliers_cost_pictures_less_than_3_db():
    pipe = pipeline("tiny_sd")
    stock = draw(pipe)
    with sp.quantize_linears(pipe.unet, min_features=0):
        assert not balances(pipe.unet)  # trained layers without outliers stay as they are
        plain = psnr(draw(pipe), stock)
    with inject_channel_outliers(pipe.unet) as names, sp.quantize_linears(pipe.unet, min_features=0) as swap:
        assert len(names) == 12
        assert psnr(draw(pipe), stock) > plain - 3 and swap.report().fallbacks == {}


def test_the_bar_is_missed_without_a_balance(planted, monkeypatch):
    model, inputs, expected, plain = planted
    with sp.quantize_linears(model, min_features=0):
        assert relative_error(run(model, inputs), expected) < plain * 10 ** (3 / 20)
    monkeypatch.setattr(balance, "OFF", math.inf)
    with sp.quantize_linears(model, min_features=0):
        assert relative_error(run(model, inputs), expected) > 5 * plain


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_outliers_is_as_exact_as_without(format, dtype):
    stock, x = hard_block()
    plain, y = hard_block(factor=1.0)
    errors = []
    for module, given in ((stock.to(dtype), x.to(dtype)), (plain.to(dtype), y.to(dtype))):
        twin = copy.deepcopy(module)
        with sp.quantize_linears(twin, format, min_features=0):
            errors.append([relative_error(a + 0, b) for a, b in zip(twin(given), module(given), strict=True)])
    assert all(hard < 1.2 * easy + torch.finfo(dtype).eps for hard, easy in zip(*errors, strict=True))


def test_layers_of_one_activation_share_a_balance_and_are_quantised_once(planted):
    model, inputs, *_ = planted
    doubles, singles = len(model.transformer_blocks), len(model.single_transformer_blocks)
    with sp.quantize_linears(model, min_features=0), torch.no_grad():
        run(model, inputs)
        with OpCounter() as ops:
            run(model, inputs)
        # values of both origins are multiplied apart from queries and keys
        assert (ops.quantized, ops.multiplied) == (8 * doubles + 2 * singles, 10 * doubles + 3 * singles)
        found = balances(model)
        assert (
            len({id(found[f"single_transformer_blocks.0.{n}"]) for n in ("attn.to_q", "attn.to_v", "proj_mlp")}) == 1
        )
        assert len(set(map(id, found.values()))) == 4 * doubles + singles
        assert all((own.vector.log2() % 1 == 0).all() and (own.vector < 1).sum() == 3 for own in found.values())


def test_keys_and_values_of_another_input_have_a_balance_of_their_own(library_tests):
    stock, x = hard_block()
    for module in (stock.to_k, stock.to_v):
        module.weight[:, 5] *= 256.0
    twin, other = copy.deepcopy(stock), torch.randn(2, 3, 48)
    with sp.quantize_linears(twin, min_features=0):
        for i in range(2):
            x, other = x.clone(), other.clone()
            with OpCounter() as ops:
                got = [y + 0 for y in twin(x, other)]
            assert i == 0 or (ops.quantized, ops.multiplied) == (2, 2)
            assert all(relative_error(a, b) < 0.02 for a, b in zip(got, stock(x, other), strict=True))
        assert set(balances(twin)) == {"to_q"}


def test_ordinary_and_odd_weights_have_none():
    torch.manual_seed(0)
    weight = torch.randn(64, 48)
    ordinary = balance.column_sizes(weight)
    assert not balance.exponents_of([ordinary]).any()
    weight[:, 3] /= 100
    size = balance.column_sizes(weight)
    assert balance.exponents_of([size]).nonzero().tolist() == [[3]] and balance.exponents_of([size])[3] == -7
    weight[:, 4] = 0  # read by nobody: whatever is there is out of the way
    assert balance.exponents_of([balance.column_sizes(weight)])[4] == -balance.MOST
    weight[:, :8] /= 100  # too many to be outliers
    assert not balance.exponents_of([balance.column_sizes(weight)]).any()
    assert balance.column_sizes(torch.zeros(4, 4)) is None
    assert balance.column_sizes(weight.fill_(torch.nan)) is None


def test_a_weight_that_changes_takes_its_neighbours_along():
    stock, x = hard_block()
    twin = copy.deepcopy(stock)
    with sp.quantize_linears(twin, min_features=0) as swap:
        twin(x)
        own = twin.to_k._sage.balance
        vector, before = own.vector, own.vector.clone()
        for module in (*stock.children(), *twin.children()):
            module.weight[:, 5] /= 16
        x = x.clone()
        x[..., 5] *= 16
        for _ in range(2):
            assert all(relative_error(a + 0, b) < 0.02 for a, b in zip(twin(x), stock(x), strict=True))
        assert own.vector is vector and own.vector[5] == before[5] / 16  # a graph may read it
        stock.to_q.weight.mul_(-2)
        twin.to_q.weight.data.mul_(-2)  # noticed by refresh alone
        swap.refresh()
        assert all(relative_error(a + 0, b) < 0.02 for a, b in zip(twin(x), stock(x), strict=True))
        for module in (stock.to_q, twin.to_q):  # called by itself, after a change that nobody else heard of
            module.weight[:, 5] *= 64
        assert relative_error(twin.to_q(x) + 0, stock.to_q(x)) < 0.02
        assert relative_error(twin.to_k(x) + 0, stock.to_k(x)) < 0.02
    assert all(type(module) is nn.Linear for module in twin.children())


def test_copies_moves_and_calls_without_a_16_bit_weight():
    stock, x = hard_block()
    twin = copy.deepcopy(stock)
    sp.quantize_linears(twin, min_features=0, drop_weights=True)
    got = [y + 0 for y in twin(x)]
    again = copy.deepcopy(twin)
    assert all(torch.equal(a, b + 0) for a, b in zip(got, again(x), strict=True))
    assert all(torch.equal(a, b + 0) for a, b in zip(got, twin.to(torch.bfloat16).float()(x), strict=True))
    for a, b in zip(twin.train()(x), stock(x), strict=True):  # what the codes stand for, in 16 bit
        assert relative_error(a, b) < 0.02


def test_compiled_code_reads_the_balance():
    torch._dynamo.reset()
    (block, x), backend = hard_block(), Backend()
    expected = [y.clone() for y in block(x)]
    with sp.quantize_linears(block, min_features=0) as swap, torch.no_grad():
        eager = [relative_error(a + 0, b) for a, b in zip(block(x), expected, strict=True)]
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        for _ in range(2):
            found = [relative_error(a, b) for a, b in zip(compiled(x), expected, strict=True)]
        assert max(eager) < 0.03 and found == pytest.approx(eager, rel=0.01) and backend.graphs == 1
        assert swap.report().fallbacks == {} and all(
            (row["calls"], row["compiled_calls"]) == (1, 2) for row in swap.report().rows
        )


@pytest.mark.slow("compiles; eager code has the same balance")
def test_compiled_code_makes_as_many_calls_as_without_outliers(planted):
    model, inputs, expected, plain = planted
    with sp.quantize_linears(model, min_features=0), torch.no_grad():
        with OpCounter() as ops:
            run(model, inputs)
        got, found = compiled_ops(model, lambda compiled: compiled(**inputs, return_dict=False)[0])
    assert relative_error(got, expected) < plain * 10 ** (3 / 20)
    multiplied = ops.multiplied - 2 * len(model.transformer_blocks)  # values are joined there
    assert (len(found["quantize_activation"]), len(found["quantized_linear"])) == (ops.quantized, multiplied)
    assert any(args[2] == "layer" and args[8] is not None for args in found["quantize_activation"])


class Normed(nn.Module):
    """Attention's projections behind a norm, all of one input."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(48), hard_block(factor=1.0)[0]
        self.eval().requires_grad_(False)

    def forward(self, x):
        y = self.norm(x)
        return [layer(y) + 0 for layer in (self.attn.to_q, self.attn.to_k, self.attn.to_v)]


@pytest.mark.parametrize("waits", [False, True])
def test_layers_of_one_input_with_other_outliers_each_read_it_with_their_own_balance(waits, library_tests):
    """Queries undo outliers in one channel, keys in another, and values in none."""
    model = Normed()
    x = torch.randn(2, 6, 48)
    for module, channel in ((model.attn.to_q, 5), (model.attn.to_k, 9)):
        module.weight[:, channel] /= 64
    expected = model(x)

    def outputs():
        y = x if waits else model.norm(x).clone()
        if waits:
            return model(y)
        return [layer(y) + 0 for layer in (model.attn.to_q, model.attn.to_k, model.attn.to_v)]

    with sp.quantize_linears(model, min_features=0):
        for _ in range(3):  # neighbours that have one matmul until they are called
            errors = [relative_error(a, b) for a, b in zip(outputs(), expected, strict=True)]
            assert all(error < 0.02 for error in errors), errors
        found = balances(model)
        assert sorted(found) == ["attn.to_k", "attn.to_q"] and found["attn.to_k"] is not found["attn.to_q"]
