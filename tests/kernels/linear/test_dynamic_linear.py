"""`dynamic_linear` is `quantized_linear` of `quantize_activation`: their bits, their errors, in one call."""

from __future__ import annotations

import re

import pytest
import torch

from sage_kernels import dynamic_linear, quantize_activation, quantize_weight, quantized_linear
from sage_kernels.facts.recipe import GATED
from tests.kernels.linear.linear_cases import FORMATS, normal, skip_without_fp8


OF_ROWS = ("norm", "norm_weight", "norm_bias", "eps", "gain", "shift", "balance", "beside")


def vector(columns=64, seed=1, **options):
    return normal(columns, seed=seed, **options)


# what a call is given beside x [2, 9, 64] and a weight of 32 rows
OPTIONS = {
    "plain": {},
    "layer norm": {"norm": "layer", "norm_weight": vector(), "norm_bias": vector(seed=2), "eps": 1e-3},
    "modulated": {"norm": "rms", "gain": normal(2, 1, 64, seed=3), "shift": normal(2, 1, 64, seed=4)},
    "balance": {"balance": vector().abs() + 0.1},
    "beside": {"beside": normal(2, 9, 36, seed=5)},
    "gelu": {"activation": "gelu_tanh"},
    "gated": {"activation": "swiglu", "bias": vector(32)},
    "gate and residual": {"gate": normal(2, 1, 32, seed=6), "residual": normal(2, 9, 32, seed=7), "bias": vector(32)},
    "another type": {"dtype": torch.float16},
}


def weight_of(options, format="int8", device="cpu"):
    columns = 64 + (36 if "beside" in options else 0)
    weight = normal(32, columns, seed=8).to(device)
    return quantize_weight(weight, format=format, is_gated=options.get("activation") in GATED)


def in_two_calls(x, weight, options):
    rows = {name.removeprefix("norm_"): options[name] for name in OF_ROWS if name in options}
    rest = {"dtype": x.dtype} | {name: value for name, value in options.items() if name not in OF_ROWS}
    return quantized_linear(quantize_activation(x, format=weight.format, **rows), weight, **rest)


def moved(options, device):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_two_calls(linears, name, format, dtype):
    skip_without_fp8(linears.device, format)
    options = moved(OPTIONS[name], linears.device)
    options |= {"beside": options["beside"].to(dtype)} if name == "beside" else {}
    weight = weight_of(options, format, linears.device)
    for x in (normal(2, 9, 64), normal(9, 2, 64).transpose(0, 1)):
        x = x.to(linears.device, dtype)
        got = dynamic_linear(x, weight, **options)
        assert torch.equal(got, in_two_calls(x, weight, options)) and got.is_contiguous()
        assert got.isfinite().all() and got.dtype == options.get("dtype", dtype)


X = normal(2, 9, 64)
BAD = {
    "x": ({"x": X.int()}, TypeError, "x: got torch.int32"),
    "no tensor": ({"x": [1.0]}, TypeError, "x: got list, expected a tensor"),
    "columns": ({"x": X[..., :63]}, ValueError, "x.codes, weight.codes: got shapes (2, 9, 63) and (32, 64)"),
    "columns beside": ({"beside": X}, ValueError, "x.codes, weight.codes: got shapes (2, 9, 128) and (32, 64)"),
    "no rows in 8 bit": ({"weight": X[0]}, TypeError, "weight: got Tensor, expected QuantizedRows"),
    "empty weight": ({"weight": ()}, TypeError, "weight: got tuple, expected QuantizedRows (codes, scale)"),
    "weight of numbers": ({"weight": (1, 2)}, TypeError, "weight.codes: got int, expected a tensor"),
    "scale of numbers": ({"weight": (X[0].to(torch.int8), 2)}, TypeError, "weight.scale: got int, expected a tensor"),
    "norm's weight": ({"norm": "rms", "norm_weight": vector(63)}, ValueError, "norm_weight: got shape (63,), exp"),
    "no norm": ({"norm_bias": vector()}, ValueError, 'norm_weight, norm_bias: got them with norm="none"'),
    "bias": ({"bias": vector(31)}, ValueError, "bias: got shape (31,), expected (32,)"),
    "residual": ({"residual": X}, ValueError, "residual: got shape (2, 9, 64), expected (2, 9, 32)"),
    "dtype": ({"dtype": torch.float64}, TypeError, "dtype: got torch.float64"),
    "activation": ({"activation": "relu"}, ValueError, "activation: got 'relu'"),
    "elsewhere": ({"gate": vector(32).to("meta")}, ValueError, "gate: got device meta, expected cpu"),
    "gradient of x": ({"x": X.clone().requires_grad_()}, NotImplementedError, "x: got a tensor that requires"),
    "gradient of a gain": ({"gain": vector().requires_grad_()}, NotImplementedError, "gain: got a tensor that req"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_N04_a_bad_argument_is_named(name, monkeypatch):
    monkeypatch.setattr("sage_kernels.ops.linear_dynamic.run_op", lambda *_: pytest.fail("something ran"))
    options, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        dynamic_linear(**{"x": X, "weight": weight_of({})} | options)


def test_a_modules_own_parameters_leave_no_gradient():
    norm, bias = (torch.nn.Parameter(vector(n)) for n in (64, 32))
    assert not dynamic_linear(X, weight_of({}), bias, norm="rms", norm_weight=norm).requires_grad
