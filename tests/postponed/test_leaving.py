"""What leaves a model is computed, whatever it is in; inside of it results go on waiting."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.linears import swap
from sage_processors.postponed import block
from sage_processors.postponed.region import opened
from sage_processors.postponed.tensor import Postponed
from tests.linears.counting import OpCounter


pytestmark = pytest.mark.usefixtures("library_tests")
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Named:
    first: torch.Tensor
    second: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: torch.Tensor


def hugging_face(y):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.BaseModelOutput(last_hidden_state=y, hidden_states=(y, y))


def of_diffusers(y):
    outputs = pytest.importorskip("diffusers.models.modeling_outputs")
    return outputs.Transformer2DModelOutput(sample=y)


OUTPUTS = {
    "alone": lambda y: y,
    "tuple": lambda y: (y, None, 1),
    "list": lambda y: [y, [y]],
    "named tuple": lambda y: Pair(y, (y,)),
    "dict": lambda y: {"a": y, "b": {"c": [y]}},
    "ordered dict": lambda y: OrderedDict(a=y),
    "dataclass": lambda y: Named(y, [y]),
    "frozen": Frozen,
    "transformers": hugging_face,
    "diffusers": of_diffusers,
}


class Model(nn.Module):
    def __init__(self, put=lambda y: y):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.put = nn.Linear(64, 128), nn.Linear(128, 64), put

    def forward(self, x):
        return self.put(self.down(nn.functional.gelu(self.up(x))))


def tensors(value):
    """All tensors of an output, and what kinds of things they are in."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        assert all(getattr(value, name, x) is x for name, x in value.items())  # attributes of model outputs
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [x for part in value for x in tensors(part)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_of_every_kind_are_ordinary_tensors(kind, mode):
    model = Model(OUTPUTS[kind]).eval()
    x = torch.randn(3, 64)
    with mode():
        stock = model(x)
        with sp.quantize_linears(model, "int8", min_features=16), OpCounter() as ops:
            found = model(x)
        again = model(x)
    assert (ops.quantized, ops.multiplied) == (2, 2)  # gelu in the first one's last pass
    assert type(found) is type(stock)
    assert tensors(found) and not any(isinstance(y, Postponed) for y in tensors(found))
    for a, b, c in zip(tensors(found), tensors(stock), tensors(again), strict=True):
        assert 0 < (a - b).norm() / b.norm() < 0.03 and torch.equal(b, c)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_output_without_waiting_tensors_is_the_one_that_the_model_made(kind):
    kept = []
    model = Model(lambda y: kept.append(OUTPUTS[kind](y + 0.0)) or kept[-1]).eval().requires_grad_(False)
    with sp.quantize_linears(model, "int8", min_features=16):
        assert model(torch.randn(3, 64)) is kept[-1]


def test_a_layer_alone_is_a_part_of_what_calls_it():
    layer = nn.Linear(64, 64).eval().requires_grad_(False)
    with sp.quantize_linears(layer, "int8", min_features=16):
        assert type(layer(torch.randn(3, 64))) is torch.Tensor
        with opened():
            assert isinstance(layer(torch.randn(3, 64)), Postponed)
    assert not layer._forward_hooks


def test_a_swap_that_fails_at_its_end_leaves_no_hook(monkeypatch):
    model = Model().eval().requires_grad_(False)

    def fails(*_, **__):
        assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 2
        raise RuntimeError("no passes")

    monkeypatch.setattr(swap, "when_imported", fails)
    with pytest.raises(RuntimeError, match="no passes"):
        sp.quantize_linears(model, "int8", min_features=16)
    assert not model._forward_hooks and not model._forward_pre_hooks and type(model.up) is nn.Linear


def test_compiled_code_looks_for_nothing(monkeypatch):
    """Each container that is looked into would be guarded."""
    model = Model(OUTPUTS["dict"]).eval().requires_grad_(False)
    x = torch.randn(3, 64)
    with sp.quantize_linears(model, "int8", min_features=16):
        wanted = model(x)["a"]
        monkeypatch.setattr(block, "ordinary", lambda value: pytest.fail("was called"))
        found = torch.compile(model, backend="eager", fullgraph=True)(x)["a"]
    assert torch.allclose(found, wanted, atol=1e-4)
