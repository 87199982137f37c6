"""register_transformers(training="int8"): models train with an INT8 forward; what can't is exact and counted."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_utils import AttentionInterface

import sage_kernels
import sage_processors as sp
from sage_kernels import compat
from sage_kernels.testing import relative_l2
from sage_processors.language.report import counted
from tests.language.test_transformers_gradients import gradients
from tests.support.language_calls import SAME, llama_attention
from tests.support.tiny_language_models import MODELS, padded


TRAIN = sp.register_transformers("sage_train_any_length", min_tokens=1, training="int8")[0]
# Relative L2 of a parameter's gradient through two layers whose softmaxes are peaked: a call's output is within 3 %
# there (OP_BUDGET of test_transformers_models.py), and a gradient passes both layers forward and back.
NEAR = 4 * 0.03


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert"])
def test_T11_a_model_trains_with_near_gradients(name, padding, mode):
    model, inputs = MODELS[name]()
    inputs = padded(inputs, padding) if padding else inputs
    model.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for each in ("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"):
        if hasattr(model.config, each):
            setattr(model.config, each, 0.0)
    getattr(model, mode)()
    stock = gradients(model, inputs)
    model.set_attn_implementation(TRAIN)
    ours = gradients(model, inputs)
    assert ours.keys() == stock.keys()
    joined = [torch.cat([found[key].flatten() for key in stock]) for found in (ours, stock)]
    assert 0 < relative_l2(*joined) < NEAR
    report = sp.attention_report(model)
    assert report.calls == 2 and not report.fallbacks
    assert "model.eval()" not in str(report)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mistral", "no_backward"), ("gemma2", "no_backward"), ("gpt_oss", "gradient"), ("t5", "gradient")],
)
def test_T11_windows_caps_sinks_and_learnt_biases_stay_exact(name, reason):
    model, inputs = MODELS[name]()
    model.requires_grad_(True)
    stock = gradients(model, inputs)
    model.set_attn_implementation(TRAIN)
    ours = gradients(model, inputs)
    report = sp.attention_report(model)
    if all(row["status"] == "not selected" for row in report.rows):
        pytest.skip(f"in transformers {transformers.__version__} {name} asks for no implementation")
    assert reason in report.fallbacks
    if not report.calls:
        for key, wanted in stock.items():
            assert key.endswith("key.bias") or relative_l2(ours[key], wanted) < 1e-4, key


@pytest.mark.parametrize("what", ["dropout", "no_fused_backward", "exact"])
def test_T11_dropout_and_missing_kernels_are_exact_and_counted(what, monkeypatch):
    attend, module, query, key, value = llama_attention()
    if what != "exact":
        attend = AttentionInterface._global_mapping[TRAIN]
    if what == "no_fused_backward":
        monkeypatch.setattr(compat, "flash_backward_for_cpu", None)
    query.requires_grad_()
    torch.manual_seed(0)
    out, _ = attend(module, query, key, value, scaling=0.25, dropout=0.3 if what == "dropout" else 0.0)
    torch.manual_seed(0)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=0.3 if what == "dropout" else 0.0, is_causal=True, scale=0.25, enable_gqa=True
    ).transpose(1, 2)  # fmt: skip
    if what != "dropout":
        assert relative_l2(out.detach(), wanted.detach()) < SAME
    assert counted(module) == {{"no_fused_backward": "no_backward", "exact": "gradient"}.get(what, what): 1}


def test_T11_a_call_of_training_is_that_of_the_op_and_its_gradient():
    attend = AttentionInterface._global_mapping[TRAIN]
    _, module, query, key, value = llama_attention()
    given = [x.requires_grad_() for x in (query, key, value)]
    out, _ = attend(module, *given, scaling=0.25)
    same = sage_kernels.differentiable_attention(*(x.transpose(1, 2) for x in given), causal=True, scale=0.25)
    assert torch.equal(out, same)
    both = [torch.autograd.grad(x.square().sum(), given) for x in (out, same)]
    assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


def test_T11_a_wrong_option_is_refused():
    with pytest.raises(ValueError, match="training: got 'fp8'"):
        sp.register_transformers("sage_no_such", training="fp8")
    with pytest.raises(ValueError, match="name: got None with options"):
        sp.register_transformers(training="int8")
