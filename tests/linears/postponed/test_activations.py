"""What an activation is in 8 bit is kept for the layers of one forward: not every write to a tensor is counted."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.linears.postponed import activations
from tests.linears.counting import relative_error


pytestmark = pytest.mark.usefixtures("library_tests")


WIDTH = 48


class Block(nn.Module):
    """Two layers that nobody multiplies together, of one input."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.one(x) + self.two(x)


class Attention(nn.Module):
    """q, k and v, of one input and one matrix; forwards that ask for q, or for k, alone."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.keys_alone = False

    def forward(self, x):
        return self.to_k(x) if self.keys_alone else self.to_q(x)


class Model(nn.Module):
    def __init__(self, block=Block, between=None):
        super().__init__()
        self.blocks, self.between = nn.ModuleList([block()]), between

    def forward(self, x):
        y = self.blocks[0](x)
        if self.between is not None:
            self.between(x)
            y = y + self.blocks[0](x)
        return y


def model(**options):
    torch.manual_seed(0)
    return Model(**options).eval().requires_grad_(False)


def draw(seed: int) -> torch.Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


def write_uncounted(x, seed: int = 2) -> None:
    """Other numbers in the same tensor, of which PyTorch knows nothing: as a replayed CUDA graph leaves them."""
    version = x._version
    x.numpy()[:] = draw(seed).numpy()
    assert x._version == version


def fail(x):
    raise ZeroDivisionError


@pytest.fixture
def quantised(monkeypatch):
    """The tensors that were quantised."""
    found, real = [], activations.quantize_activation

    def watched(x, **options):
        found.append(x)
        return real(x, **options)

    monkeypatch.setattr(activations, "quantize_activation", watched)
    return found


@torch.no_grad()
def test_layers_of_one_forward_quantise_it_once(quantised):
    net, x = model(), draw(1)
    with sp.quantize_linears(net, min_features=0):
        net(x)
        assert len(quantised) == 1
        net(x)
        assert len(quantised) == 2


@torch.no_grad()
def test_the_next_forward_may_find_other_numbers_in_the_same_tensor():
    net, stock, x = model(), model(), draw(1)
    with sp.quantize_linears(net, min_features=0):
        assert relative_error(net(x), stock(x)) < 0.02
        write_uncounted(x)
        assert relative_error(net(x), stock(x)) < 0.02


@torch.no_grad()
def test_what_a_forward_left_that_raised_goes_with_the_next_one():
    net, stock, x = model(between=fail), model(), draw(1)
    with sp.quantize_linears(net, min_features=0):
        with pytest.raises(ZeroDivisionError):
            net(x)
        net.between = None
        write_uncounted(x)
        assert relative_error(net(x), stock(x)) < 0.02


@torch.no_grad()
def test_a_part_that_is_compiled_may_write_within_a_forward():
    """Its CUDA graphs replay between eager layers, into the tensors that they gave out before."""
    net, stock = (model(between=write_uncounted) for _ in range(2))
    net.other = nn.Identity()
    net.other.compile(backend="eager")
    with sp.quantize_linears(net, min_features=0):
        assert relative_error(net(draw(1)), stock(draw(1))) < 0.02


@torch.no_grad()
def test_results_that_wait_for_another_layer_leave_with_the_forward():
    net, stock, x = model(block=Attention), model(block=Attention), draw(1)
    with sp.quantize_linears(net, min_features=0):
        net(x)
        write_uncounted(x)
        net.blocks[0].keys_alone = stock.blocks[0].keys_alone = True
        assert relative_error(net(x), stock(x)) < 0.02


@torch.no_grad()
def test_a_block_leaves_no_garbage_that_holds_memory():
    """Codes of a block's inputs are let go when it ends, not when the garbage collector comes round."""
    net, x = model(), draw(1)
    with sp.quantize_linears(net, min_features=0):
        for _ in range(2):
            net(x)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)  # what the collector finds is kept, to be looked at
        try:
            net(x)
            gc.collect()
            assert not [found for found in gc.garbage if type(found) is torch.Tensor]  # no FakeTensor
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
