"""Functions of transformers that somebody puts others in place of, after our names were chosen, are the ones that run.

Profilers, adapters and other accelerators do this. Each patch changes what the function returns, and stock under the
same patch is what has to come out.
"""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.gemma2 import modeling_gemma2

import sage_processors as sp
from sage_kernels.testing import relative_l2
from tests.support.language_calls import SAME, forward, tiny
from tests.support.patching import as_profilers_do, mixed_up
from tests.support.tiny_language_models import MODELS


NEVER = sp.register_transformers("sage_never_long", min_tokens=10**6)[0]


WAYS = pytest.mark.parametrize("way", [mixed_up, as_profilers_do])
COMPILED = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow("compiles"))])


@COMPILED
@WAYS
def test_the_eager_function_of_exact_calls_is_the_one_that_is_there(way, compiled, monkeypatch):
    """Gemma 2 has a soft cap, which SDPA does not know: its exact calls are those of its eager function."""
    name = "eager_attention_forward"
    model, inputs = tiny("gemma2", NEVER)
    running = torch.compile(model, backend="eager") if compiled else model
    torch._dynamo.reset()
    before = forward(running, inputs)
    monkeypatch.setattr(modeling_gemma2, name, way(getattr(modeling_gemma2, name)))
    after, stock = forward(running, inputs), forward(*MODELS["gemma2"]())
    assert relative_l2(after, before) > 0.05 and relative_l2(after, stock) < SAME


@COMPILED
@WAYS
def test_the_sdpa_function_of_exact_calls_is_the_registered_one(way, compiled, monkeypatch):
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def patch():
        AttentionInterface.register("sdpa", way(usual))

    try:
        model, inputs = tiny("llama", NEVER)
        running = torch.compile(model, backend="eager") if compiled else model
        torch._dynamo.reset()
        before = forward(running, inputs)
        patch()
        after = forward(running, inputs)
        model.set_attn_implementation("sdpa")
        assert relative_l2(after, before) > 0.05 and relative_l2(after, forward(model, inputs)) < SAME
    finally:
        AttentionInterface.register("sdpa", usual)


def test_a_patch_that_is_taken_away_is_gone(monkeypatch):
    model, inputs = tiny("gemma2", NEVER)
    before = forward(model, inputs)
    with monkeypatch.context() as patch:
        name = "eager_attention_forward"
        patch.setattr(modeling_gemma2, name, mixed_up(getattr(modeling_gemma2, name)))
        assert relative_l2(forward(model, inputs), before) > 0.05
    assert torch.equal(forward(model, inputs), before)


def test_an_eager_function_that_names_its_arguments_is_held_to_them(monkeypatch):
    """Stock would drop the soft cap without a word, since the eager functions take any keyword."""

    def forgetful(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        raise AssertionError("is not called")

    model, inputs = tiny("gemma2", NEVER)
    forward(model, inputs)
    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", forgetful)
    with pytest.raises(NotImplementedError, match="got softcap, which forgetful does not take"):
        forward(model, inputs)
