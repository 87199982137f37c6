"""training="int8" on diffusers models: the forward in INT8, gradients near those of exact attention, all counted."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch

import sage_processors as sp
from sage_kernels import compat
from sage_kernels.testing import relative_l2
from sage_processors.diffusion.calls import sage_class
from sage_processors.diffusion.host.discovery import attention_modules
from tests.diffusion.calls.test_processors import attention_inputs, counted
from tests.support.tiny_models import MODELS


TRAIN = sp.SageAttnProcessor(min_tokens=0, training="int8", on_unsupported="raise")
NEAR = 0.05  # through a few layers of random weights; one call's bar is 2 % (test_T07)


def trained(config):
    """An attention module of diffusers and its twin with this config, and inputs that need gradients."""
    stock, x = attention_inputs()
    attention, _ = attention_inputs()
    attention.processor = sage_class.swap(attention.processor, config, "layer")
    return stock, attention, x.requires_grad_()


def gradient(module, x, **options):
    out = module(x, **options)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


def test_T11_a_call_of_training_runs_in_int8_with_near_gradients():
    stock, attention, x = trained(TRAIN)
    (wanted, wanted_grad), (found, found_grad) = gradient(stock, x), gradient(attention, x)
    assert 0 < relative_l2(found, wanted) < NEAR and 0 < relative_l2(found_grad, wanted_grad) < NEAR
    attention.train()
    again, again_grad = gradient(attention, x)
    assert torch.equal(again, found) and torch.equal(again_grad, found_grad)
    assert counted(attention.processor) == {"called": 2}


def test_T11_autocast_trains_in_its_dtype():
    stock, attention, x = trained(TRAIN)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, wanted_grad = gradient(stock, x)
        found, found_grad = gradient(attention, x)
    assert found_grad.dtype == torch.float32 and found.dtype == wanted.dtype
    assert 0 < relative_l2(found, wanted) < NEAR and 0 < relative_l2(found_grad, wanted_grad) < NEAR
    assert counted(attention.processor) == {"called": 1}


@pytest.mark.parametrize("what", ["no_backward", "mask_gradient", "exact", "training"])
def test_T11_what_cannot_train_in_int8_is_exact_and_counted(what, monkeypatch):
    training = "16bit" if what in ("exact", "training") else "int8"
    stock, attention, x = trained(sp.SageAttnProcessor(min_tokens=0, training=training, scaling="dynamic"))
    options, reason = {}, what
    if what == "no_backward":
        monkeypatch.setattr(compat, "flash_backward_for_cpu", None)
    elif what == "mask_gradient":
        options, reason = {"attention_mask": torch.zeros(2, 1, 160).requires_grad_()}, "requires_grad"
    elif what == "exact":
        reason = "requires_grad"
    else:
        attention.train()
    wanted, found = gradient(stock, x, **options), gradient(attention, x, **options)
    assert torch.equal(wanted[0], found[0]) and relative_l2(found[1], wanted[1]) < 1e-5
    assert counted(attention.processor) == {reason: 1}
    strict = sp.SageAttnProcessor(min_tokens=0, training=training, on_unsupported="raise")
    attention.processor = sage_class.swap(stock.processor, strict, "layer")
    with pytest.raises(sp.UnsupportedAttentionError) as caught:
        attention(x, **options)
    assert caught.value.reason == reason


def lora(model):
    from peft import LoraConfig

    torch.manual_seed(1)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def lora_gradients(model, inputs):
    parameters = lora(model)

    def gradients(call=model):
        out = call(**inputs, return_dict=False)[0]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        found = torch.autograd.grad((out * weight).sum(), list(parameters.values()), allow_unused=True)
        return torch.cat([x.flatten() for x in found if x is not None])

    return gradients


@pytest.mark.parametrize("name", ["unet_sd15", "flux", "sd3"])
def test_T11_lora_gradients_of_a_model_in_training_mode(name, caplog):
    pytest.importorskip("peft")
    model, inputs = MODELS[name]()
    gradients = lora_gradients(model.train(), inputs)
    wanted = gradients()
    with caplog.at_level(logging.WARNING, "sage_processors"), sp.apply(model, TRAIN) as handle:
        found = gradients()
        report = handle.report()
        assert report.calls == len(report.rows) and not report.fallbacks
        assert not any("model.eval()" in row["note"] for row in report.rows)
        if hasattr(model, "enable_gradient_checkpointing"):
            model.enable_gradient_checkpointing()
            assert relative_l2(gradients(), found) < 1e-5
            assert handle.report().calls == 3 * report.calls  # checkpointed layers run twice
    assert 0 < relative_l2(found, wanted) < NEAR
    assert "model.eval()" not in caplog.text


@pytest.mark.slow("compiles forward and backward")
def test_T11_compiled_training_has_the_same_gradients():
    pytest.importorskip("peft")
    model, inputs = MODELS["flux"]()
    with sp.apply(model, TRAIN) as handle:
        gradients = lora_gradients(model.train(), inputs)
        wanted = gradients()
        torch._dynamo.reset()
        found = gradients(torch.compile(model, backend="aot_eager"))
        assert relative_l2(found, wanted) < 1e-5
        report = handle.report()
        assert report.calls == 2 * len(report.rows) and not report.fallbacks


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_T11_training_leaves_no_trace_in_planned_scales(mode):
    """Steps of training follow no run: plans of the next run are made of its own steps alone."""
    model, inputs = MODELS["unet_sd15"]()

    def forwards():
        with torch.no_grad():
            return [model(**inputs, return_dict=False)[0] for _ in range(2)]

    config = sp.SageAttnProcessor(min_tokens=0, training="int8")
    with sp.apply(model, config):
        wanted = forwards()
    with sp.apply(model, config) as handle:
        getattr(model, mode)().requires_grad_(True)
        with torch.no_grad() if mode == "train" else contextlib.nullcontext():
            model(**inputs, return_dict=False)[0].sum()
        model.eval().requires_grad_(False)
        # a call with a state is counted there
        assert all(counted(module.processor) == {"called": 1} for _, module in attention_modules(model))
        assert handle.report().calls == len(handle.report().rows)
        assert all(torch.equal(x, y) for x, y in zip(forwards(), wanted, strict=True))
