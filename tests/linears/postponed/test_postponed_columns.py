"""Two activations beside each other, one of them a layer's output: quantised from where they are, or put together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sage_processors as sp
from sage_processors.linears.postponed.columns import PostponedColumns
from sage_processors.postponed.tensor import Postponed, ordinary_in


pytestmark = pytest.mark.usefixtures("waiting")


class Cats(TorchDispatchMode):
    """How many tensors were put together while it is on."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten.cat.default
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(48, 64), nn.Linear(96, 40)
        self.eval().requires_grad_(False)


@pytest.fixture
def block():
    module = Block()
    with sp.quantize_linears(module, min_features=0):
        yield module, torch.randn(2, 6, 48), torch.randn(2, 6, 32)


@pytest.mark.parametrize("dim", [-1, 2])
@pytest.mark.parametrize("is_first", [False, True])
def test_both_are_quantised_from_where_they_are(block, is_first, dim):
    module, x, other = block
    given = [other, F.gelu(module.up(x))] if is_first else (F.gelu(module.up(x)), other)
    with Cats() as cats:
        both = torch.cat(given, dim=dim)
        got = ordinary_in(module.down(both))
    assert type(both) is PostponedColumns and both.shape == (2, 6, 96) and cats.number == 0
    together = torch.cat([ordinary_in(t) for t in given], -1)
    assert torch.equal(got, ordinary_in(module.down(together)))
    assert torch.equal(both.tensor(), together)
    again = module.down(both)  # of the same rows, whoever asks
    assert torch.equal(ordinary_in(again), got)


OTHERS = {
    "tokens": lambda y, r: torch.cat([r, y], 1),
    "three": lambda y, r: torch.cat([r, y, r], -1),
    "one": lambda y, r: torch.cat([y], -1),
    "another type": lambda y, r: torch.cat([r.double(), y], -1),
    "out": lambda y, r: torch.cat([r, y], -1, out=torch.empty(2, 6, 128)),
    "first dimension by default": lambda y, r: torch.cat((r, y)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_put_together_at_once(block, name):
    module, x, _ = block
    residual = torch.randn(2, 6, 64)
    got, expected = OTHERS[name](module.up(x), residual), OTHERS[name](module.up(x).tensor(), residual)
    assert not isinstance(got, Postponed) and torch.equal(got, expected)


def test_others_get_the_tensor_and_may_write_to_it(block):
    module, x, other = block
    both = torch.cat([other, module.up(x)], -1)
    assert torch.equal(torch.relu(both), torch.relu(both.tensor()))
    before = ordinary_in(module.down(both))
    both.mul_(-2)
    after = ordinary_in(module.down(both))
    assert torch.equal(after, ordinary_in(module.down(both.tensor().clone()))) and not torch.equal(after, before)


def test_a_tensor_that_was_written_to_is_an_error(block):
    module, x, other = block
    both = torch.cat([other, module.up(x)], -1)
    other.add_(1)
    for use in (module.down, torch.relu):
        with pytest.raises(sp.ChangedInputError, match="torch.cat: got a tensor that was written to in place"):
            use(both)


def test_a_tensor_without_a_version_does_not_wait(block):
    module, x, other = block
    with torch.inference_mode():
        both = torch.cat([other.clone(), module.up(x)], -1)
        assert type(both) is torch.Tensor
    with torch.enable_grad():
        needs = other.clone().requires_grad_()
        assert torch.cat([needs, module.up(x)], -1).requires_grad
