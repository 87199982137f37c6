"""torch.export of transformers models under our names: what is exported, and what it leaves behind in the process."""

from __future__ import annotations

import logging

import pytest
import torch

import sage_processors as sp
from sage_kernels.testing import relative_l2
from tests.support.language_calls import ANY_LENGTH, STRICT, forward
from tests.support.tiny_language_models import MODELS


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def exported(name, implementation, *, grad, strict):
    """(model, its inputs, its program, the attention ops in it)."""
    model, inputs = MODELS[name]()
    model.requires_grad_(True).set_attn_implementation(implementation)
    with torch.set_grad_enabled(grad):
        program = torch.export.export(Logits(model), (inputs["input_ids"],), strict=strict)
    ops = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return model, inputs, program, [op for op in ops if "scaled_dot" in op or "sage" in op]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_P58_INT8_attention_is_exported_and_nothing_of_the_tracer_stays(name, strict):
    model, inputs, program, ops = exported(name, ANY_LENGTH, grad=False, strict=strict)
    assert ops == ["sage_kernels.attention.default"] * 2
    with torch.no_grad():
        assert relative_l2(program.module()(inputs["input_ids"]), forward(model, inputs)) < 1e-5
    assert not [name for name in program.constants if "event" in name or "lifted" in name or "getitem" in name]
    report = sp.attention_report(model)  # a counter made of the tracer's tensors would raise here
    assert report.calls == 2 and not report.fallbacks


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("strict", [False, True])
def test_P58_exact_attention_is_never_exported_in_silence(strict, caplog):
    with caplog.at_level(logging.WARNING, "sage_processors"):
        _, _, _, ops = exported("llama", ANY_LENGTH, grad=True, strict=strict)
    assert ops and not [op for op in ops if "sage" in op]
    said = [r.getMessage() for r in caplog.records if "exported without INT8" in r.getMessage()]
    assert [text.partition(" is")[0] for text in said] == ["LlamaAttention 0", "LlamaAttention 1"]
    assert all("reason: gradient" in text and "torch.no_grad()" in text for text in said)
    with pytest.raises(sp.UnsupportedAttentionError, match="LlamaAttention 0.*gradient"):
        exported("llama", STRICT, grad=True, strict=strict)
    if not strict:  # as every program in INT8
        _, _, _, ops = exported("llama", STRICT, grad=False, strict=strict)
        assert ops == ["sage_kernels.attention.default"] * 2


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_P58_a_compiled_strict_model_says_what_an_eager_one_does(fullgraph):
    model, inputs = MODELS["llama"]()
    model.requires_grad_(True).set_attn_implementation(STRICT)
    torch._dynamo.reset()
    compiled = torch.compile(Logits(model), backend="eager", fullgraph=fullgraph)
    expected = torch._dynamo.exc.Unsupported if fullgraph else sp.UnsupportedAttentionError
    with pytest.raises(expected):
        compiled(inputs["input_ids"])
