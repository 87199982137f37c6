"""Rows in 8 bit: the kernel against the reference, code for code."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.linear.linear_cases import DTYPES, FORMATS, NORMS, assert_same_rows, normal, oracle


def check(linears, x, **options):
    got = linears.quantize(x, **options)
    assert got.codes.stride(-1) == 1
    assert_same_rows(got, oracle(x, **options), is_exact=options.get("norm", "none") == "none")
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_affine_or_not_and_modulated(linears, norm, format, dtype):
    x = 3 * normal(2, 5, 72, dtype=dtype) + 1
    weight, bias = normal(72, seed=1), normal(72, dtype=dtype, seed=2)
    affine = [{}] if norm == "none" else [{}, {"weight": weight}, {"bias": bias}, {"weight": weight, "bias": bias}]
    modulation = {"gain": 1 + normal(2, 1, 72, dtype=dtype, seed=3), "shift": normal(2, 1, 72, dtype=dtype, seed=4)}
    for options in affine:
        check(linears, x, format=format, norm=norm, **options)
    check(linears, x, format=format, norm=norm, **affine[-1], **modulation, balance=normal(72, seed=5).exp())
    codes = {check(linears, x, norm=norm, format=format, eps=eps).scale.sum().item() for eps in (1e-6, 0.5)}
    assert len(codes) == (1 if norm == "none" else 2)


@pytest.mark.parametrize("shape", [(2, 1, 72), (72,), (1, 5, 72), (2, 5, 72), (2, 5, 1), (5, 1), (1, 1, 72), (1,)])
@pytest.mark.parametrize("which", ["gain", "shift"])
def test_gain_and_shift_of_every_shape(linears, which, shape):
    x = normal(2, 5, 72)
    given = check(linears, x, **{which: normal(*shape, seed=1)})
    plain = oracle(x)
    assert not (torch.equal(given.codes, plain.codes) and torch.equal(given.scale, plain.scale))
    both = {"gain": normal(2, 1, 72, seed=2), "shift": normal(2, 5, 72, seed=3)}
    check(linears, x, norm="layer", **(both | {which: normal(*shape, seed=1)}))


@pytest.mark.parametrize("shape", [(72,), (3, 72), (2, 3, 72), (2, 3, 4, 72), (1, 3, 1, 72)])
def test_one_to_four_dimensions(linears, shape):
    x = normal(*shape)
    vectors = [(72,), (*shape[:-1], 72), (*shape[:1], *(1 for _ in shape[1:-1]), 72)[-len(shape) :]]
    check(linears, x)
    for vector in vectors:
        check(linears, x, norm="rms", gain=normal(*vector, seed=1), shift=normal(*vector, seed=2))
    if len(shape) == 4:  # strides that no two steps can walk
        gain = normal(shape[0], 1, shape[2], 72, seed=3)
        check(linears, x, gain=gain, shift=normal(shape[1], 1, 1, seed=4))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [1, 16, 100, 272, 2520, 13400])
def test_any_number_of_columns(linears, columns, format):
    x = normal(5, columns)
    for norm in NORMS:
        got = check(linears, x, norm=norm, format=format)
        assert linears.tier == "cuda" or got.codes.stride(0) % 16 == 0  # a copy from a GPU is dense
    check(linears, x, format=format, shift=normal(columns, seed=1))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [(1, 1), (16, 100), (272, 16), (100, 2420)])
def test_columns_of_two_tensors_are_those_of_one(linears, columns, format):
    """The bits of both in one tensor, whatever lies around them in memory."""
    wide = torch.full((2, 5, sum(columns) + 9), float("nan"), dtype=torch.bfloat16)
    first, second = wide[..., 3 : 3 + columns[0]], wide[..., 5 + columns[0] : 5 + sum(columns)]
    first.copy_(normal(*first.shape)), second.copy_(10 * normal(*second.shape, seed=1))
    both = torch.cat([first, second], -1)
    vectors = {"gain": normal(2, 1, sum(columns), seed=2), "shift": normal(sum(columns), seed=3)}
    vectors["balance"] = normal(sum(columns), seed=4).abs()
    for options in ({}, vectors, {"norm": "layer", "weight": normal(sum(columns), seed=5)}):
        got = linears.quantize(first, beside=second, format=format, **options)
        wanted = linears.quantize(both, format=format, **options)
        assert torch.equal(got.codes.view(torch.int8), wanted.codes.view(torch.int8))
        assert torch.equal(got.scale, wanted.scale)
    for part in (first, second):  # a row that is lost is lost wherever it is
        kept = part[0, 1, 0].item()
        part[0, 1, 0] = float("inf")
        lost = linears.quantize(first, beside=second, format=format).scale.isnan()
        assert lost[0, 1] and lost.sum() == 1
        part[0, 1, 0] = kept


@pytest.mark.parametrize("number", [0, 1, 7, 65])
def test_any_number_of_rows(linears, number):
    x = normal(number, 3, 272) if number % 2 else normal(number, 272)
    got = linears.quantize(x, norm="layer")
    if number:
        assert_same_rows(got, oracle(x, norm="layer"), is_exact=False)
    elif linears.tier != "reference":
        assert linears.quantize(x.expand(0, 272).mT.reshape(0, 272)).codes.is_contiguous()


def test_strided_inputs(linears):
    wide = normal(2, 6, 300)
    for x in (wide[..., 40:172], wide[:, ::2, :100], wide.transpose(0, 1), wide.mT, wide[..., ::2]):
        got = check(linears, x, norm="rms")
        contiguous = linears.quantize(x.contiguous(), norm="rms")
        # a GPU's sums, and PyTorch's, have another order where strides are others
        assert_same_rows(got, contiguous, is_exact=linears.tier == "interpreter")
    x = wide[..., :100]
    modulation = normal(2, 6, 300, seed=1).chunk(3, -1)  # as adaLN makes them
    check(linears, x, gain=modulation[0][:, :1], shift=modulation[2][:, :1])
    check(linears, x, gain=modulation[1], shift=normal(2, 100, 6, seed=2).mT)
    check(linears, x, norm="layer", weight=normal(200, seed=3)[::2], bias=normal(100, 1, seed=4)[:, 0])
    check(linears, x, balance=normal(200, seed=3).exp()[::2])
    check(linears, normal(1, 100).expand(7, 100))


@pytest.mark.filterwarnings("ignore:.*encountered in")  # of NumPy: that is what this is about
@pytest.mark.parametrize("format", FORMATS)
def test_N01_zeros_tiny_and_huge_values(linears, format):
    x = normal(8, 100)
    x[1] = 0
    x[2] *= 1e-30
    x[3] *= 1e-42
    x[4] *= 1e37
    x[5, 7] = 1e6
    x[6, 3] = torch.finfo(torch.float32).max
    got = check(linears, x, format=format)
    assert int(got.codes[1].float().count_nonzero()) == 0 and got.scale[1] > 0 and got.scale.isfinite().all()
    half = check(linears, torch.full((2, 100), 65504.0, dtype=torch.float16), format=format)
    torch.testing.assert_close(half.codes.float() * half.scale[:, None], torch.full((2, 100), 65504.0))
    check(linears, torch.zeros(3, 100), format=format, norm="layer", shift=normal(100))
    check(linears, torch.full((3, 100), 5.0), format=format, norm="rms")


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_N02_what_is_not_finite_poisons_its_own_row_alone(linears, value, norm, format):
    x = normal(2, 9, 72)
    clean = linears.quantize(x, norm=norm, format=format)
    x[1, 3, 70] = value
    got = linears.quantize(x, norm=norm, format=format)
    others = torch.ones(2, 9, dtype=torch.bool)
    others[1, 3] = False
    assert got.scale[1, 3].isnan() and torch.equal(got.scale[others], clean.scale[others])
    assert torch.equal(got.codes.float()[others], clean.codes.float()[others])
    weight = oracle(normal(40, 72, seed=1), format=format)
    out = linears.multiply(got, weight, dtype=torch.float32)
    assert out[1, 3].isnan().all() and out[others].isfinite().all()


def test_a_row_does_not_depend_on_the_others(linears):
    x = normal(9, 100)
    whole = linears.quantize(x, norm="layer")
    for i in (0, 8):
        alone = linears.quantize(x[i], norm="layer")
        assert torch.equal(alone.codes, whole.codes[i]) and torch.equal(alone.scale, whole.scale[i])


def test_codes_use_the_whole_range_and_round_to_even(linears):
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0, 126.5]])
    assert linears.quantize(x).codes.tolist() == [[127, 0, 2, -2, -127, 126]]
    x = torch.tensor([[448.0, 17.0, 19.0, -448.0, 1.0625, 2.0**-10]])  # ties, and half of the least subnormal
    assert linears.quantize(x, format="fp8").codes.float().tolist() == [[448.0, 16.0, 20.0, -448.0, 1.0, 0.0]]
