"""Norms in front of 8-bit layers, computed with the quantisation of their rows: those that state no width."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

import sage_processors as sp
from sage_processors.linears.postponed import norm
from sage_processors.linears.postponed.norm_layers import ANY_WIDTH, norm_form, norm_width
from tests.support.cpu_graphs import options
from tests.support.tiny_models import MODELS


@pytest.fixture
def made(monkeypatch):
    """(norm, has a gain) of each quantisation that a norm's result was asked for."""
    found, own = [], norm.quantize_activation

    def counted(x, **kwargs):
        found.append((kwargs.get("norm"), kwargs.get("gain") is not None))
        return own(x, **kwargs)

    monkeypatch.setattr(norm, "quantize_activation", counted)
    return found


def test_a_norm_of_any_width_has_its_formula_found():
    assert norm_width(RMSNorm(0, 1e-6, False)) == ANY_WIDTH and norm_form(RMSNorm(0, 1e-6, False)) == ("rms", False)
    assert norm_width(RMSNorm(24, 1e-6)) == 24 and norm_width(nn.Linear(4, 4)) is None
    with_weight = RMSNorm(24, 1e-6)
    with_weight.weight = None
    with_weight.dim = (0,)
    assert norm_width(with_weight) == ANY_WIDTH
    with_weight.scale = nn.Parameter(torch.ones(3))
    assert norm_width(with_weight) is None and norm_form(with_weight) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modulated_norms_of_mochi_are_one_pass_with_the_quantisation(made, dtype):
    """Two norms of each block and stream lie in front of linear layers, and the layers read each once."""
    model, inputs = MODELS["mochi"]()
    model, inputs = model.to(dtype), {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    with torch.no_grad():
        stock = model(**inputs, return_dict=False)[0].float()
        with sp.apply(model, options(linears={"format": "int8", "min_features": 0})):
            for _ in range(3):
                made.clear()
                out = model(**inputs, return_dict=False)[0].float()
        assert made == [("rms", True)] * 7  # the last block's text ends in its attention
        assert float((out - stock).norm() / stock.norm()) < 0.02
        assert torch.equal(model(**inputs, return_dict=False)[0].float(), stock)
