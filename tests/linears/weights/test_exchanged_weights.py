"""A result that waits is of the weight of its call, or an error: also one that somebody keeps for long."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.postponed.tensor import ChangedInputError


EXCHANGED = "weight of {}: got one that was exchanged"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.up, self.last = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x):
        value, gate = self.up(self.first(x)).chunk(2, dim=-1)
        return self.last(value * nn.functional.gelu(gate))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


def test_a_result_that_is_used_after_its_weight_was_exchanged_is_an_error(model, waiting):
    x = torch.randn(3, 64)
    with sp.quantize_linears(model, "int8", min_features=16):
        model(x)
        wanted = model.last(x) + 0.0
        kept = model.last(x), model.last(x), nn.functional.silu(model.last(x))
        assert torch.equal(kept[0] + 0.0, wanted)  # whose numbers are there from now on
        model.last.weight.mul_(2.0)
        assert torch.equal(kept[0] + 0.0, wanted)
        late = model.last(x)
        model.last.weight.mul_(2.0)
        model(x)
        for result in (late, *kept[1:]):
            with pytest.raises(ChangedInputError, match=EXCHANGED.format("last")):
                result + 0.0
        assert torch.equal(kept[0] + 0.0, wanted)


def test_an_output_keeps_the_numbers_of_its_call(model):
    x = torch.randn(3, 64)
    swap = sp.quantize_linears(model, "int8", min_features=16)
    for change in (lambda: model.last.weight.mul_(2.0), swap.remove):
        kept, wanted = model(x), model(x) + 0.0
        change()
        model(x)
        assert torch.equal(kept + 0.0, wanted)


def test_a_result_from_inside_is_an_error_after_its_layer_was_given_back(model, waiting):
    x = torch.randn(3, 64)
    swap = sp.quantize_linears(model, "int8", min_features=16)
    model(x)  # from here on `up` lies in turns
    plain = model.first(x)
    value, gate = model.up(x).chunk(2, dim=-1)
    gated = value * nn.functional.gelu(gate)
    swap.remove()
    for result, name in ((plain, "first"), (gated, "up")):
        with pytest.raises(ChangedInputError, match=EXCHANGED.format(name)):
            result + 0.0
