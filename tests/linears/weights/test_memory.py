"""Bytes of a model's weights without the 16-bit ones: computed from shapes, and held against what is really there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.linears.weights import linear_state as weights
from sage_processors.linears.weights.linear_state import linear_state
from tests.support.tiny_models import MODELS
from tests.support.weight_bytes import IN_16_BIT, computed, flux_on_meta


def test_weights_of_flux_take_half_the_memory():
    model, swap = flux_on_meta(drop_weights=True)
    before, after, elements = computed(model, swap)
    assert sum(x.numel() for x in model.parameters()) == 11_901_408_320
    assert after / before < 0.505
    # what is left: two embedders of 256 columns, the latents' and the text's first layer, the last one
    assert elements["none"] == 2 * 256 * 3072 + 64 * 3072 + 4096 * 3072 + 3072 * 64
    stays = flux_on_meta(drop_weights=True, layers={**dict.fromkeys(IN_16_BIT, "none")})
    _, without, others = computed(*stays)
    assert others.get("int8_weights") is None and 0.63 < without / before < 0.65


def resident(model) -> int:
    """Bytes of all memory that parameters and buffers lie in."""
    storages = {x.untyped_storage() for x in (*model.parameters(), *model.buffers())}
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


@pytest.mark.parametrize("linears", ["int8", "fp8"])
def test_what_is_computed_is_what_is_there(linears):
    model, _ = MODELS["flux"]()
    model = model.to(torch.bfloat16)
    assert resident(model) == sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    swap = sp.quantize_linears(model, linears, min_features=0)
    modules = [choice.module for choice in swap.choices if choice.format != "none"]
    both = resident(model)
    swap.drop()
    before, after, _ = computed(model, swap)
    dropped = [choice.module for choice in swap.choices if choice.format != "none"]
    assert len(dropped) > len(modules) and both > before
    # a placeholder holds one number for each weight that is gone
    assert resident(model) == after + 2 * len(dropped)


def test_a_module_that_is_tied_keeps_what_others_still_hold():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 48)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 64)) for _ in range(2))
            self.blocks[0][1].weight = self.embed.weight

    model = Tied().eval().requires_grad_(False)
    expected = model.blocks[0](torch.ones(2, 48))
    sp.quantize_linears(model, min_features=0, drop_weights=True)
    assert model.embed.weight.isfinite().all() and model.embed(torch.tensor(3)).shape == (48,)
    torch.testing.assert_close(model.blocks[0](torch.ones(2, 48)) + 0, expected, rtol=0.1, atol=0.05)


def test_16_bit_weights_are_freed_one_by_one(monkeypatch):
    """Else all weights would be there in both forms before the first one is freed."""
    model, _ = MODELS["flux"]()
    quantize, there = weights.quantize_weight, []

    def watched(weight, **options):
        modules = [m for m in model.modules() if linear_state(m) is not None]
        there.append(sum(m._sage.is_filled and not m._sage.dropped for m in modules))
        return quantize(weight, **options)

    monkeypatch.setattr(weights, "quantize_weight", watched)
    sp.quantize_linears(model, min_features=0, drop_weights=True)
    assert len(there) > 10 and set(there) == {0}
    model, _ = MODELS["flux"]()
    options = {"scaling": "dynamic", "linears": {"format": "int8", "min_features": 0, "drop_weights": True}}
    there.clear()
    sp.apply(model, sp.SageAttnProcessor(**options))
    assert len(there) > 10 and set(there) == {0}
