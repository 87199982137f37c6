"""Sums in fp32 that are rounded to 16 bit, as in Wan's blocks: one kernel each, and the bits of ordinary ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sage_processors as sp
from sage_processors.linears.postponed.sums import PostponedSum
from sage_processors.postponed.casts import BlockInput, PostponedCast, with_castable_input
from sage_processors.postponed.tensor import Postponed, ordinary
from tests.linears.counting import ops_of
from tests.support.tiny_models import MODELS


pytestmark = pytest.mark.usefixtures("waiting")
WIDTH = 48


class Casts(TorchDispatchMode):
    """Counts casts of whole activations, and matmuls in 8 bit by the dtype of their result."""

    def __init__(self):
        super().__init__()
        self.casts, self.matmuls = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func) and out.dim() == 3 and out.shape[1] > 1:
            self.casts += 1
        if ops_of(func)[1]:
            self.matmuls.append(out.dtype)
        return out


class Layers(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH).to(dtype) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.requires_grad_(False).eval()


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def layers(request):
    made = Layers(request.param)
    with sp.quantize_linears(made, min_features=0):
        x, z = torch.randn(2, 2, 6, WIDTH).to(request.param) * 3
        yield made, x, z, torch.randn(2, 1, WIDTH)


def summed(made, x, z, gate):
    return (x.float() + made.first(z) * gate).type_as(x)


USES = {
    "itself": lambda y, made, z, gate: y,
    "cast": lambda y, made, z, gate: y.float(),
    "norm": lambda y, made, z, gate: made.second((made.norm(y.float()) * (1 + gate) + gate).type_as(y)),
    "norm in 16 bit": lambda y, made, z, gate: made.norm(y.float()).type_as(y) * 2,
    "norm as it is": lambda y, made, z, gate: made.second(nn.functional.layer_norm(y, (WIDTH,))),
    "sum": lambda y, made, z, gate: y + made.second(z),
    "sum of a sum": lambda y, made, z, gate: ((y + made.second(z)).float() + made.third(z).float() * gate).type_as(y),
    "sum and cast": lambda y, made, z, gate: (y.float() + made.second(z).float() * gate).type_as(y),
    "both": lambda y, made, z, gate: y + made.second(made.norm(y.float()).type_as(y)),
    "twice": lambda y, made, z, gate: y.float() + y.float() + y,
    "of its own": lambda y, made, z, gate: y + y.float(),
    "subtracted": lambda y, made, z, gate: y.float() - made.second(z),
    "another type": lambda y, made, z, gate: y.double() + y.to(torch.float16 if y.dtype != torch.float16 else y.dtype),
    "in place": lambda y, made, z, gate: (y.float(), y.mul_(2))[0] + y,
    "a cast in place": lambda y, made, z, gate: (y.float().mul_(2), y)[1],
    "in place behind a norm": lambda y, made, z, gate: (made.norm(y.float()).type_as(y), y.mul_(2))[0] + 1,
    "a cast of what was used": lambda y, made, z, gate: (y[:, :1], y.float(), y.mul_(2))[1],
    "a part": lambda y, made, z, gate: y[:, 1:] + y.float()[:, :-1],
    "one token": lambda y, made, z, gate: y.float() + made.second(z[:, :1]),
}


@pytest.mark.parametrize("use", USES)
def test_whatever_becomes_of_a_sum_the_bits_are_those_of_an_ordinary_one(use, layers):
    made, x, z, gate = layers
    for _ in range(3):  # the first sum is computed at once
        waiting = summed(made, x, z, gate)
        assert type(waiting) is PostponedSum
        expected = ordinary(USES[use](ordinary(summed(made, x, z, gate)), made, z, gate))
        got = ordinary(USES[use](waiting, made, z, gate))
        assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_a_sum_is_rounded_by_the_matmul_and_read_as_it_is(layers):
    made, x, z, gate = layers
    for _ in range(2):
        with Casts() as seen:
            y = summed(made, x, z, gate)
            inner = made.norm(y.float()).type_as(y)
            assert type(y.float()) is PostponedCast
            y = y + made.second(inner)
            y = ordinary((y.float() + made.third(z).float() * gate).type_as(y))
    assert seen.casts == 1  # of the residual that the first sum was given
    assert seen.matmuls == [x.dtype] * 3


def test_what_is_rounded_from_a_sum_is_not_written_to_with_it(layers):
    """Both have the same numbers in memory, where the sum was computed at once."""
    made, x, z, gate = layers
    (given,) = with_castable_input((x,), ())
    for _ in range(3):
        for add in (lambda: x.float() + made.first(z) * gate, lambda: made.second(z) + given):
            for dtype in (torch.float16, torch.bfloat16):
                expected = ordinary(add()).to(dtype)
                total = add()
                rounded = total.to(dtype)
                if rounded is not total:
                    total.add_(100)
                assert torch.equal(ordinary(rounded), expected)


def test_a_residual_that_is_overwritten_is_noticed_in_the_first_call(layers):
    made, x, z, gate = layers
    for _ in range(3):
        wide = x.float()
        expected = (wide + ordinary(made.first(z).float() * gate)).to(x.dtype)
        y = (wide + made.first(z) * gate).type_as(x)
        wide.zero_()
        torch.testing.assert_close(ordinary(y), expected, rtol=2**-6, atol=2**-6)


def test_a_residual_that_is_overwritten_later_is_an_error(layers):
    made, x, z, gate = layers
    ordinary(summed(made, x, z, gate))
    wide = x.float()
    y = (wide + made.first(z) * gate).type_as(x)
    wide.zero_()
    with pytest.raises(sp.ChangedInputError, match=r"residual of first: got a tensor.*layers="):
        ordinary(y)


@pytest.mark.parametrize("use", USES)
def test_whatever_becomes_of_a_blocks_input_the_bits_are_those_of_an_ordinary_one(use, layers):
    made, x, z, gate = layers
    expected = ordinary(USES[use](x.clone(), made, z, gate))
    (given,) = with_castable_input((x.clone(),), (z,))
    assert type(given) is BlockInput
    got = ordinary(USES[use](given, made, z, gate))
    assert got.dtype == expected.dtype and torch.equal(got, expected)


def test_a_blocks_input_is_read_as_it_is(layers):
    made, x, _, gate = layers
    for _ in range(2):
        (given,) = with_castable_input((x,), ())
        with Casts() as seen:
            inner = made.second(made.norm(given.float()).type_as(given))
            ordinary((given.float() + inner * gate).type_as(given))
    assert not seen.casts


def test_what_is_no_input_to_cast_stays_as_it_is(layers):
    _, x, z, _ = layers
    for args, others in [((), ()), ((x, x), ()), ((x,), (x,)), ((x.float(),), ()), ((x.mT,), ()), ((None, x), ())]:
        assert with_castable_input(args, others) is args
    whole = torch.zeros(1, 8, WIDTH, dtype=x.dtype)  # parts share memory, and the count of writes to it
    args = whole[:, :5], whole[:, 5:]
    assert with_castable_input(args, ()) is args and with_castable_input(args[:1], args[1:])[0] is args[0]


def test_an_input_that_is_overwritten_under_another_name_is_an_error(layers):
    _, x, _, _ = layers
    (given,) = with_castable_input((x,), ())
    cast = given.float()
    x.zero_()
    for use in (ordinary, PostponedCast.stored):
        with pytest.raises(sp.ChangedInputError, match="input .* of a block"):
            use(cast)
    del cast
    assert torch.equal(ordinary(given), x)  # it is that tensor, whatever was written to it


def test_models_in_fp32_have_no_such_sums():
    made = Layers(torch.float32)
    with sp.quantize_linears(made, min_features=0):
        x, z = torch.randn(2, 2, 6, WIDTH)
        assert not isinstance(x + made.first(z), Postponed)


@torch.no_grad()
def test_a_model_draws_the_same_whether_sums_wait_or_not(monkeypatch):
    model, inputs = MODELS["wan_t2v"]()
    model = model.to(torch.bfloat16)
    for block in model.blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.float()
    inputs = {k: v.bfloat16() if v.is_floating_point() and k != "timestep" else v for k, v in inputs.items()}
    config = sp.SageAttnProcessor(linears=sp.Linears("int8", min_features=0), min_tokens=0, scaling="dynamic")
    with sp.apply(model, config):
        first = model(**inputs)[0]  # each sum is computed at once
        for _ in range(2):  # in the third forward the blocks' inputs are cast by the kernels that read them
            with Casts() as seen:
                assert torch.equal(model(**inputs)[0], first)
    assert all(dtype == torch.bfloat16 for dtype in seen.matmuls)
