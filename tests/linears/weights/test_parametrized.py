"""Weights and biases that others put something in place of: pruning, weight norms, parametrizations, other shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import sage_processors as sp
from tests.linears.counting import layers, relative_error


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def widened(layers):
    layers[1].weight, layers[1].bias = nn.Parameter(torch.randn(96, 64)), None
    layers[3] = nn.Linear(96, 64)


def pruned_for_good(layers):
    prune.remove(prune.l1_unstructured(layers[1], "weight", 0.5), "weight")


def parametrized(layers):
    parametrize.register_parametrization(layers[1], "weight", Doubled())


def parametrized_for_good(layers):
    parametrized(layers)
    parametrize.remove_parametrizations(layers[1], "weight")


# what is done to the layers → whether the first one runs in 8 bit afterwards
CHANGES = {
    "weight_norm": (lambda layers: weight_norm(layers[1]), False),
    "spectral_norm": (lambda layers: spectral_norm(layers[1]), False),
    "parametrized_weight_norm": (lambda layers: parametrizations.weight_norm(layers[1]), False),
    "parametrized": (parametrized, False),
    "parametrized_for_good": (parametrized_for_good, True),
    "pruned": (lambda layers: prune.l1_unstructured(layers[1], "weight", 0.5), False),
    "pruned_for_good": (pruned_for_good, True),
    "pruned_bias": (lambda layers: prune.l1_unstructured(layers[1], "bias", 0.5), False),
    "no_bias": (lambda layers: setattr(layers[1], "bias", None), True),
    "widened": (widened, False),
}


def changed(name, stack):
    torch.manual_seed(5)
    CHANGES[name][0](stack)
    return stack.eval()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["before", "after", "between", "refreshed"])
def test_the_layer_gives_what_it_would_and_comes_back_as_it_would_be(name, when):
    x, stack = torch.randn(4, 64), layers()
    with torch.no_grad():
        stock = changed(name, layers())
        wanted = stock(x)
        if when == "before":
            changed(name, stack)
        with sp.quantize_linears(stack, min_features=0) as swap:
            if when == "between":
                stack(x)
            if when != "before":
                changed(name, stack)
            if when == "refreshed":
                swap.refresh()
            before = {row["layer"]: row["calls"] for row in swap.report().rows}
            for _ in range(2):
                assert relative_error(stack(x) + 0, wanted) < 0.03
            runs = {row["layer"]: row["calls"] - before[row["layer"]] for row in swap.report().rows}
            assert runs.get("1", 0) == 2 * CHANGES[name][1]
        assert torch.equal(stack(x), wanted)
    assert nn.Linear in (type(stack[1]), *type(stack[1]).__bases__)
    assert stack[1].__dict__.keys() == stock[1].__dict__.keys()


def test_a_parametrization_stays_on_top_of_the_layer_and_can_be_taken_off():
    stack, x = layers(), torch.randn(4, 64)
    before = stack(x)
    with sp.quantize_linears(stack, min_features=0):
        parametrized(stack)
    assert parametrize.is_parametrized(stack[1]) and isinstance(stack[1], nn.Linear)
    assert not torch.equal(stack(x), before)
    parametrize.remove_parametrizations(stack[1], "weight", leave_parametrized=False)
    assert type(stack[1]) is nn.Linear and torch.equal(stack(x), before)


@pytest.mark.parametrize("name", ["pruned", "pruned_bias", "widened"])
def test_compiled_layers_too(name):
    torch._dynamo.reset()
    x, stack = torch.randn(4, 64), layers()
    with torch.no_grad(), sp.quantize_linears(stack, min_features=0):
        changed(name, stack)
        got = torch.compile(stack, backend="aot_eager")(x)
        assert relative_error(got, changed(name, layers())(x)) < 0.03
    torch._dynamo.reset()


def test_attributes_that_are_not_there_are_named():
    linear = nn.Linear(64, 64)
    with sp.quantize_linears(linear, min_features=0):
        del linear.bias
        with pytest.raises(AttributeError, match="no attribute 'bias'"):
            print(linear.bias)
        linear.bias = torch.ones(64)
        assert torch.equal(linear.bias, torch.ones(64))
        del linear.bias
        assert not hasattr(linear, "bias")
