"""How exact 8-bit linear layers are, against fp64; and how weights are quantised."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import quantize_weight
from sage_kernels.facts.recipe import SHRINKS
from sage_kernels.ops.linear import interleaved
from sage_kernels.reference.linear import ref_quantize_weight
from tests.kernels.linear.linear_cases import FORMATS, normal, oracle


WORST = {"int8": 0.0135, "fp8": 0.042}  # relative L2 of one layer on N(0, 1)


def relative_error(out, x, weight):
    wanted = x.double() @ weight.double().mT
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
def test_one_layer_on_normal_numbers(linears, format, dtype):
    x, weight = normal(48, 1024, dtype=dtype), normal(96, 1024, dtype=dtype, seed=1)
    out = linears.multiply(
        linears.quantize(x, format=format), quantize_weight(weight, format=format), dtype=torch.float32
    )
    assert relative_error(out, x, weight) <= WORST[format]


def test_a_balance_recovers_planted_outlier_channels(linears):
    """Four channels 100 times larger after the norm, as a model's norm weights make them."""
    x, weight, gain = normal(48, 512), normal(64, 512, seed=1), torch.ones(512)
    gain[[3, 77, 200, 511]] = 100.0
    weight[:, gain > 1] /= 100.0  # function-preserving
    normed = torch.nn.functional.layer_norm(x, (512,), eps=1e-6) * gain
    balance = gain.reciprocal()
    plain, balanced = (
        relative_error(
            linears.multiply(
                linears.quantize(x, norm="layer", gain=gain, balance=b),
                quantize_weight(weight, balance=b),
                dtype=torch.float32,
            ),
            normed,
            weight,
        )
        for b in (None, balance)
    )
    assert balanced <= WORST["int8"] and plain > 5 * balanced


@pytest.mark.parametrize("columns", [100, 12288])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_searched_range_of_a_weight_row_is_never_worse_than_the_plain_one(dtype, columns):
    weight = normal(5, columns, dtype=dtype)
    weight[1, 7] = 30.0
    weight[2] = 0
    weight[3] *= 1e-4

    def error(rows):
        return (rows.codes.double() * rows.scale.double()[:, None] - weight.double()).square().sum(1)

    searched, plain = quantize_weight(weight), oracle(weight)
    # the search is in fp32: what it takes for smaller may be so by rounding alone
    assert (error(searched) <= error(plain) * (1 + 1e-5)).all()
    shrinks = searched.scale / plain.scale
    assert all(min(abs(shrink - x) for x in SHRINKS) < 1e-3 for shrink in shrinks.tolist())
    if columns == 12288:  # many elements round finer, and one is clipped
        assert error(searched)[1] < 0.95 * error(plain)[1] and shrinks[1] < 0.99
    fp8 = quantize_weight(weight, format="fp8")
    assert torch.equal(fp8.scale, oracle(weight, format="fp8").scale)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(5, 1), (6, 100), (4, 1024), (2, 3000)])
def test_any_device_quantises_a_weight_to_the_same_bits(linears, format, shape):
    for i, dtype in enumerate((torch.bfloat16, torch.float32)):
        weight = normal(*shape, seed=i)
        weight[0], weight[1, 0] = 0.0, 40.0  # a row of zeros, and an outlier, whose row takes a smaller range
        balance = normal(shape[1], seed=2).exp() if i else None
        strided = torch.stack([weight, weight.roll(1)], 1).to(dtype)[:, 0]
        for given in (weight.to(dtype), strided, weight.to(dtype).mT.contiguous().mT):
            rows = linears.quantize_weight(given, format=format, balance=balance)
            codes, scale = ref_quantize_weight(given, format, balance)
            assert torch.equal(rows.codes.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(rows.scale, scale)


def test_weights_are_balanced_and_interleaved():
    weight, balance = normal(6, 40), normal(40, seed=1).exp()
    rows = quantize_weight(weight, balance=balance, is_gated=True)
    wanted = quantize_weight((weight / balance)[[0, 3, 1, 4, 2, 5]])
    assert torch.equal(rows.codes, wanted.codes) and torch.equal(rows.scale, wanted.scale)
    assert interleaved(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    parameter = torch.nn.Parameter(weight)
    assert torch.equal(quantize_weight(parameter).codes, quantize_weight(weight).codes)
    assert not quantize_weight(parameter).scale.requires_grad and rows.format == "int8"
    assert quantize_weight(weight, format="fp8").format == "fp8"


@pytest.mark.parametrize("columns", [1, 100, 272])
def test_rows_of_weights_lie_as_copy_engines_want_them(columns):
    for format in FORMATS:
        codes = quantize_weight(normal(5, columns), format=format).codes
        assert codes.stride(0) == -(-columns // 16) * 16 and codes.stride(1) == 1
        assert codes.is_contiguous() == (columns % 16 == 0)
        transposed = quantize_weight(normal(columns, 5).mT, format=format)
        assert transposed.codes.stride() == codes.stride() and transposed.scale.is_contiguous()
        assert not codes.as_strided((4, codes.stride(0) - columns), codes.stride(), columns).float().any()
