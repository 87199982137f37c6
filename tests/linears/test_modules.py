"""A swapped linear layer against the 16-bit module: every input it may meet, and what it can't do in 8 bit."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import sage_processors as sp
from tests.linears.counting import OpCounter, expected_error, relative_error


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Block(nn.Module):
    """Two layers, so that it counts as a block."""

    def __init__(self, k=48, n=64, bias=True):
        super().__init__()
        self.first, self.second = nn.Linear(k, n, bias=bias), nn.Linear(n, k)

    def forward(self, x):
        return self.second(self.first(x))


def layer(k=48, n=64, *, bias=True, dtype=torch.float32):
    """A linear layer and its swapped twin."""
    torch.manual_seed(0)
    stock = nn.Linear(k, n, bias=bias).to(dtype).eval().requires_grad_(False)
    return stock, copy.deepcopy(stock)


def swapped(module, linears="int8", **options):
    return sp.quantize_linears(module, linears, **({"min_features": 0} | options))


def only(report):
    (row,) = report.rows
    return row


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("shape", [(5, 48), (2, 5, 48), (2, 3, 5, 48)])
def test_output_is_the_modules_within_quantisation(shape, format, dtype):
    stock, twin = layer(dtype=dtype)
    x = torch.randn(shape).to(dtype)
    with swapped(twin, format) as swap:
        got = twin(x) + 0  # whatever comes next
        assert type(got) is torch.Tensor and got.dtype == dtype and got.shape == stock(x).shape
        assert only(swap.report())["calls"] == 1 and only(swap.report())["format"] == format
    bound = 1.3 * expected_error(x, stock.weight, format=format) + torch.finfo(dtype).eps
    assert 0 < relative_error(got, stock(x)) < bound


def test_weights_that_are_not_finite_stay_in_16_bit():
    stock, twin = layer()
    stock.weight[2, 2] = torch.nan
    twin.weight[2, 2] = torch.nan
    x = torch.randn(4, 48)
    with swapped(twin) as swap:
        torch.testing.assert_close(twin(x), stock(x), equal_nan=True, rtol=0, atol=0)
        assert only(swap.report())["fallbacks"] == {"weight": 1}


def test_exact_calls_are_counted_with_their_reasons():
    stock, twin = layer()
    with swapped(twin) as swap:
        x = torch.randn(4, 48)
        needing = x.clone().requires_grad_()
        assert twin(needing).requires_grad
        torch.testing.assert_close(twin(x[0]), stock(x[0]), rtol=0, atol=0)
        assert twin(x[:0]).shape == (0, 64)
        twin.train()
        torch.testing.assert_close(twin(x), stock(x), rtol=0, atol=0)
        twin.eval()
        torch.testing.assert_close(twin(x[None, None, None]), stock(x[None, None, None]), rtol=0, atol=0)

        class Own(torch.Tensor):
            pass

        twin(x.as_subclass(Own))
        with pytest.raises(RuntimeError):  # as stock
            twin(x.half())
        expected = {"gradient": 1, "rank": 2, "empty": 1, "training": 1, "subclass": 1, "dtype": 1}
        assert only(swap.report())["fallbacks"] == expected and only(swap.report())["calls"] == 0


def test_strict_raises_what_would_be_exact():
    _, twin = layer()
    with swapped(twin, on_unsupported="raise"):
        with pytest.raises(sp.UnsupportedLinearError, match="reason 'training'.*model.eval"):
            twin.train()(torch.randn(4, 48))
        twin.eval()(torch.randn(0, 48))  # nothing is lost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype(dtype):
    stock, twin = layer()
    x = torch.randn(4, 48)
    with swapped(twin) as swap, torch.autocast("cpu", dtype=dtype):
        got, expected = twin(x) + 0, stock(x)
        assert got.dtype == expected.dtype == dtype and only(swap.report())["calls"] == 1
    assert relative_error(got, expected) < 1.3 * expected_error(x, stock.weight) + torch.finfo(dtype).eps


def test_removal_gives_back_the_modules_bit_for_bit():
    block = Block().eval().requires_grad_(False)
    x, before = torch.randn(4, 48), dict(block.named_modules())
    expected, state = block(x), {k: v.clone() for k, v in block.state_dict().items()}
    attributes = {name: set(module.__dict__) for name, module in block.named_modules()}
    swap = swapped(block)
    assert not torch.equal(block(x), expected)
    swap.remove()
    swap.remove()
    assert dict(block.named_modules()) == before and type(block.first) is nn.Linear
    assert {name: set(module.__dict__) for name, module in block.named_modules()} == attributes
    assert not list(block.named_buffers()) and not block._forward_pre_hooks
    assert torch.equal(block(x), expected)
    assert all(torch.equal(v, state[k]) for k, v in block.state_dict().items())


def test_a_wrapper_that_holds_the_swapped_forward_works_after_removal():
    """Whoever wraps a layer's forward with the bound method of the swap keeps it, whatever happens to the class."""
    torch.manual_seed(0)
    block = Block()
    block.norm = nn.LayerNorm(48)
    block.eval().requires_grad_(False)
    x = torch.randn(5, 48)
    expected = 2 * block.first(block.norm(x))
    swap = swapped(block)
    for module in (block.first, block.norm):
        held = module.forward
        module.forward = lambda x, held=held, factor=1 + (module is block.first): factor * held(x)
    assert 0 < relative_error(block.first(block.norm(x)) + 0, expected) < 0.03
    swap.remove()
    assert torch.equal(block.first(block.norm(x)), expected)
    with swapped(block):
        assert 0 < relative_error(block.first(block.norm(x)) + 0, expected) < 0.03


def test_a_swapped_layer_is_a_linear_layer_with_the_same_state():
    block = Block().eval()
    weight = block.first.weight
    with swapped(block):
        assert isinstance(block.first, nn.Linear) and block.first.weight is weight
        assert set(block.state_dict()) == {"first.weight", "first.bias", "second.weight", "second.bias"}
        assert [name for name, _ in block.named_parameters()] == list(block.state_dict())
        block.load_state_dict(block.state_dict())
        with pytest.raises(AttributeError, match="has no attribute"):
            _ = block.first.no_such_thing


def test_copies_stay_in_8_bit_and_have_weights_of_their_own():
    block = Block().eval().requires_grad_(False)
    x = torch.randn(4, 48)
    expected = block(x)
    with swapped(block):
        got = block(x).clone()
        twins = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
        file = io.BytesIO()
        torch.save(block, file)
        twins.append(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
        for twin in twins:
            with OpCounter() as ops:
                assert torch.equal(twin(x), got)
            assert ops.multiplied == 2
            twin.first.weight.zero_()
            twin.first.bias.zero_()
            assert not torch.equal(twin(x), got) and torch.equal(block(x), got)
    for twin in twins:  # a copy can be swapped anew and put back
        with swapped(twin):
            twin(x)
        assert type(twin.first) is nn.Linear
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"linears": "int4"}, ValueError, "linears: got 'int4'"),
        ({"on_unsupported": "loose"}, ValueError, "on_unsupported: got 'loose'"),
        ({"layers": {"third": "none"}}, ValueError, "layers: got 'third', which matches no linear layer"),
        ({"layers": {"third": "int8"}}, ValueError, "layers: got 'third', which matches no"),
        ({"layers": {"first": "int4"}}, ValueError, "layers: got 'int4'"),
        ({"layers": ("first",)}, TypeError, "layers: got 'first'"),
        ({"layers": 3}, TypeError, "layers: got 3"),
        ({"layers": (("first", 8),)}, ValueError, "layers: got 8"),
        ({"linears": 8}, TypeError, "linears: got int"),
        ({"min_features": torch.zeros(3)}, TypeError, "min_features: got Tensor"),
        ({"min_features": -1}, ValueError, "min_features: got -1"),
        ({"drop_weights": 1}, TypeError, "drop_weights: got int"),
    ],
)
def test_bad_options_leave_the_model_alone(options, error, words):
    block = Block()
    with pytest.raises(error, match=words):
        sp.quantize_linears(block, **options)
    assert type(block.first) is nn.Linear and not block._forward_pre_hooks
    with pytest.raises(TypeError, match="model: got str"):
        sp.quantize_linears("model")
