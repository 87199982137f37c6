"""Calls that PyTorch differentiates through: exact, counted, and with the gradients of stock attention."""

from __future__ import annotations

import contextlib

import pytest
import torch

import sage_processors as sp
from sage_kernels.testing import relative_l2
from sage_processors.language.report import counted
from tests.support.language_calls import ANY_LENGTH, SAME, STRICT, forward, llama_attention, tiny
from tests.support.tiny_language_models import MODELS, padded, result


def gradients(model, inputs):
    """{name: gradient} of a loss that weighs every logit by itself; NaN would not be equal to anything."""
    model.zero_grad()
    out = result(model(**inputs))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    real = inputs.get("attention_mask", torch.ones(out.shape[:2]))  # rows of padding are no result
    if real.shape == out.shape[:2]:
        weights = weights * real[..., None]
    (out * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "bert", "t5"])
def test_P50_gradients_in_eval_mode_are_those_of_stock_attention(name, padding):
    model, inputs = MODELS[name]()
    inputs = padded(inputs, padding) if padding else inputs
    model.requires_grad_(True)
    stock = gradients(model, inputs)
    model.set_attn_implementation(ANY_LENGTH)
    ours = gradients(model, inputs)
    assert ours.keys() == stock.keys()
    for key, gradient in stock.items():
        if not key.endswith("key.bias"):  # softmax does not see it: its gradient is rounding
            assert relative_l2(ours[key], gradient) < 1e-4, key
    report = sp.attention_report(model)
    assert report.calls == 0 and set(report.fallbacks) == {"gradient"}
    model.set_attn_implementation(STRICT)
    with pytest.raises(sp.UnsupportedAttentionError, match="gradient.*no_grad") as caught:
        model(**inputs)
    assert caught.value.reason == "gradient"


NO_GRADIENT = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad disabled": lambda: torch.set_grad_enabled(False),
    "nothing to train": contextlib.nullcontext,
}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5"])
@pytest.mark.parametrize("way", NO_GRADIENT)
def test_P51_without_a_gradient_a_model_runs_in_INT8(way, name):
    model, inputs = MODELS[name]()
    stock = forward(model, inputs)
    model.requires_grad_(way != "nothing to train").set_attn_implementation(STRICT)
    with NO_GRADIENT[way]():
        out = result(model(**inputs))
    assert 0 < relative_l2(out, stock) < 0.05
    report = sp.attention_report(model)
    assert report.calls > 0 and not report.fallbacks


@pytest.mark.parametrize("what", ["query", "key", "value", "attention_mask", "position_bias", "scaling"])
def test_P50_whatever_needs_the_gradient_gets_it(what):
    attend, module, query, key, value = llama_attention()
    tensors = {"query": query, "key": key, "value": value}
    others = {"attention_mask": torch.randn(2, 1, 9, 9), "position_bias": torch.randn(1, 4, 9, 9)}
    others["scaling"] = torch.tensor(0.3)
    tensors |= {name: x for name, x in others.items() if name == what}
    tensors[what].requires_grad_(True)
    scores = tensors.get("scaling", 0.25) * (query @ key.repeat_interleave(2, 1).transpose(2, 3))
    if what in ("attention_mask", "position_bias"):
        scores = scores + tensors[what]
    else:
        scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    wanted = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    others = {"position_bias": {"is_causal": False}, "scaling": {}}.get(what, {"scaling": 0.25})
    out, _ = attend(module, **tensors, **others)
    weights = torch.randn(out.shape)
    both = [torch.autograd.grad((x * weights).sum(), tensors[what])[0] for x in (out, wanted)]
    assert relative_l2(out, wanted) < SAME and relative_l2(*both) < SAME
    assert counted(module) == {"gradient": 1}


def test_P50_a_gradient_along_the_forward_is_not_dropped():
    """torch.func.jvp: nothing says requires_grad there, and INT8 attention would answer with a derivative of 0."""
    attend, module, query, key, value = llama_attention()
    mask = torch.zeros(2, 1, 9, 9)  # with it SDPA has formulas for tangents

    def of(query):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return attend(module, query, key, value, attention_mask=mask)[0]

    def wanted(query):
        scores = 0.25 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
        return (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)

    tangent = torch.randn(query.shape)
    with torch.no_grad():
        ours, stock = (torch.func.jvp(function, (query,), (tangent,))[1] for function in (of, wanted))
    assert stock.norm() > 0 and relative_l2(ours, stock) < SAME
    assert counted(module) == {"gradient": 1}


@pytest.mark.parametrize("max_cache_len", [None, 64])
def test_P52_an_INT8_cache_passes_no_gradient_on_and_says_so(max_cache_len):
    model, inputs = tiny()
    ids = inputs["input_ids"]
    cache = sp.Int8KVCache(model.config, max_cache_len)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
    model.model.layers[0].self_attn.q_proj.requires_grad_(True)  # the keys of the first layer need none
    with pytest.raises(NotImplementedError, match="query of LlamaAttention 0.*gradient.*INT8 cache.*no_grad"):
        model(ids[:, 20:], past_key_values=cache)
