"""LoRA beside 8-bit linear layers: the delta stays in 16 bit, and a fused one is in the 8-bit weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sage_processors as sp
from tests.linears.counting import OpCounter, relative_error, run
from tests.support.tiny_models import MODELS


peft = pytest.importorskip("peft")

QKV = ["to_q", "to_k", "to_v"]


def add_lora(model, name="style", scale=3.0, targets=QKV):
    torch.manual_seed(len(name))
    model.add_adapter(peft.LoraConfig(r=4, lora_alpha=4 * scale, target_modules=targets), adapter_name=name)
    for key, parameter in model.named_parameters():
        if f"lora_B.{name}" in key:
            nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


def quantize(model):
    return sp.quantize_linears(model, min_features=0)


def test_lora_loaded_before_and_after_the_swap():
    for before in (True, False):
        stock, inputs = MODELS["flux"]()
        model = copy.deepcopy(stock)
        plain = run(stock, inputs)
        add_lora(stock)
        expected = run(stock, inputs)
        assert relative_error(plain, expected) > 0.05
        if before:
            add_lora(model)
        with quantize(model) as swap:
            run(model, inputs)
            if not before:
                add_lora(model)
                swap.refresh()
            assert relative_error(run(model, inputs), expected) < 0.02
            names = [row["layer"] for row in swap.report().rows]
            assert not any("lora" in name or "base_layer" in name for name in names)
            assert swap.report().fallbacks == {}
            with OpCounter() as ops:
                run(model, inputs)
            assert ops.multiplied < len([c for c in swap.choices if c.format != "none"])  # q, k, v still as one
            model.delete_adapters("style")
            assert relative_error(run(model, inputs), plain) < 0.02


def test_fused_and_unfused_without_a_refresh():
    stock, inputs = MODELS["flux"]()
    model = copy.deepcopy(stock)
    for each in (stock, model):
        add_lora(each)
    with quantize(model):
        run(model, inputs)
        for scale in (1.0, 0.3):
            for each in (stock, model):
                each.fuse_lora(lora_scale=scale)
            assert relative_error(run(model, inputs), run(stock, inputs)) < 0.02
            for each in (stock, model):
                each.unfuse_lora()
            assert relative_error(run(model, inputs), run(stock, inputs)) < 0.02
        for each in (stock, model):
            each.fuse_lora()
            each.unload_lora()
        assert relative_error(run(model, inputs), run(stock, inputs)) < 0.02
    assert relative_error(run(model, inputs), run(stock, inputs)) < 1e-5


@pytest.mark.parametrize("kind", ["dora", "hra"])
def test_an_adapter_that_computes_with_a_dropped_weight_is_refused(kind):
    """Its 16-bit numbers are not there: without the error the result would be NaN."""
    model, inputs = MODELS["flux"]()
    options = {"r": 4, "target_modules": ["to_q"]}
    config = peft.LoraConfig(**options, use_dora=True) if kind == "dora" else peft.HRAConfig(**options)
    sp.quantize_linears(model, min_features=0, drop_weights=True)
    with pytest.raises(RuntimeError, match="an adapter that computes with it.*16-bit weight was dropped"):
        model.add_adapter(config)
        run(model, inputs)


def test_plain_lora_reads_no_numbers_of_a_dropped_weight():
    model, inputs = MODELS["flux"]()
    sp.quantize_linears(model, min_features=0, drop_weights=True)
    assert run(add_lora(model), inputs).isfinite().all()
