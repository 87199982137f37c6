"""A feed-forward is the same one for all who are timed on it."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch.nn import functional as F

from sage_kernels.testing import relative_l2


def of_16_bit(
    x, weight, scale, bias, *, out_dtype, convrot=False, input_act="none", residual=None, residual_scale=None
):
    """What the names of comfy_kitchen.int8_linear mean, not rounded; a reversal stands in for its rotation."""
    x = F.gelu(x, approximate="tanh") if input_act == "gelu_tanh" else x
    x = x.flip(-1) if convrot else x
    out = F.linear(x, weight * scale, bias)
    return (out if residual is None else torch.addcmul(residual, residual_scale, out)).to(out_dtype)


@pytest.fixture
def stand_in(monkeypatch):
    class Layout:
        @staticmethod
        def quantize(weight, *, is_weight, per_channel, convrot):
            assert is_weight and per_channel
            return weight.flip(-1) if convrot else weight, types.SimpleNamespace(scale=torch.ones(len(weight), 1))

    package, tensor = types.ModuleType("comfy_kitchen"), types.ModuleType("comfy_kitchen.tensor")
    package.quantize_int8_rowwise = lambda weight: (weight, torch.ones(len(weight), 1))
    package.int8_linear, tensor.TensorWiseINT8Layout = of_16_bit, Layout
    monkeypatch.setitem(sys.modules, "comfy_kitchen", package)
    monkeypatch.setitem(sys.modules, "comfy_kitchen.tensor", tensor)


def test_all_compute_the_same(bench, stand_in):
    torch.manual_seed(0)
    x, layers = bench.make(48, 192, 768, "cpu", torch.float32)
    exact, errors = bench.exact(x, layers), {}
    for provider, recipe, allowed, function in bench.providers(layers):
        out = function(x)
        errors[provider, recipe] = relative_l2(out, exact)
        assert out.shape == x.shape and errors[provider, recipe] < allowed
    assert all(errors.pop((name, "")) < 1e-5 for name in ("torch_bf16", "comfy_kitchen", "comfy_kitchen_rotated"))
    assert [*errors] == [("sage_kernels", "linears_int8"), ("sage_kernels", "linears_fp8")]
    assert 1e-3 < errors["sage_kernels", "linears_int8"] < errors["sage_kernels", "linears_fp8"] / 2
    assert relative_l2(layers.residual, exact) > 0.3  # else its error would hide that of the layers


def test_who_is_not_installed_is_left_out(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    _, layers = bench.make(4, 32, 64, "cpu")
    assert [provider for provider, *_ in bench.providers(layers)] == ["torch_bf16"] + 2 * ["sage_kernels"]
