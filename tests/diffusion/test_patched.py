"""Functions of diffusers and torch that are replaced after the swap: followed, or run in 16 bit and counted."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_processor
from diffusers.models.transformers import transformer_flux

import sage_processors as sp
from sage_processors.diffusion.calls import sage_class
from sage_processors.diffusion.graphs.model_state import watch_of
from tests.diffusion.calls import test_processors
from tests.diffusion.calls.test_processors import (
    HelperProcessor,
    attention_inputs,
    counted,
    forward,
    sage_attention_module,
    sqnr_db,
)
from tests.support.cpu_graphs import captures
from tests.support.tiny_models import MODELS


SDPA = "scaled_dot_product_attention"
CONFIG = sp.SageAttnProcessor(min_tokens=0, scaling="dynamic")
OWN_ROTARY, OWN_DISPATCH = transformer_flux.apply_rotary_emb, transformer_flux.dispatch_attention_fn
OWN_CALL, OWN_SDPA = transformer_flux.FluxAttnProcessor.__call__, F.scaled_dot_product_attention


def louder_rotary(x, freqs, *args, **kwargs):
    return 4 * OWN_ROTARY(x, freqs, *args, **kwargs)


def louder_dispatch(query, key, value, *args, **kwargs):
    return 6 * OWN_DISPATCH(query, key, value, *args, **kwargs)


@functools.wraps(OWN_CALL)
def louder_call(self, *args, **kwargs):
    made = OWN_CALL(self, *args, **kwargs)
    return tuple(6 * x for x in made) if isinstance(made, tuple) else 6 * made


def louder_sdpa(*args, **kwargs):
    return 6 * OWN_SDPA(*args, **kwargs)


ATTENTION = {
    "dispatch_attention_fn": (transformer_flux, "dispatch_attention_fn", louder_dispatch),
    "__call__": (transformer_flux.FluxAttnProcessor, "__call__", louder_call),
    SDPA: (F, SDPA, louder_sdpa),
}


def patched_forward(monkeypatch, model, inputs, owner, name, value):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        return forward(model, inputs)


def test_a_rotary_embedding_replaced_after_the_swap_is_used_in_int8(monkeypatch):
    model, inputs = MODELS["flux"]()
    patch = (transformer_flux, "apply_rotary_emb", louder_rotary)
    stock, expected = forward(model, inputs), patched_forward(monkeypatch, model, inputs, *patch)
    assert sqnr_db(stock, expected) < 30  # the patch matters
    with sp.apply(model, CONFIG) as handle:
        before = forward(model, inputs)
        calls = handle.report().calls
        assert sqnr_db(patched_forward(monkeypatch, model, inputs, *patch), expected) > 40
        assert handle.report().calls == 2 * calls and not handle.report().fallbacks
        assert torch.equal(forward(model, inputs), before)


@pytest.mark.parametrize("linears", ["none", "int8"])
@pytest.mark.parametrize("patched", [(transformer_flux, "apply_rotary_emb"), (torch.nn.RMSNorm, "forward")])
def test_what_is_put_there_is_handed_ordinary_tensors(patched, linears, monkeypatch):
    """Nobody knows what it does with them, and results may wait for what was there before."""
    model, inputs = MODELS["flux"]()
    own, given = getattr(*patched), []

    def seen(*args, **kwargs):
        given.extend(type(x) for x in args if isinstance(x, torch.Tensor))
        return own(*args, **kwargs)

    config = sp.SageAttnProcessor(min_tokens=0, scaling="dynamic", linears=sp.Linears(linears, min_features=0))
    with sp.apply(model, config):
        before = forward(model, inputs)
        patched_forward(monkeypatch, model, inputs, *patched, seen)
        assert torch.equal(forward(model, inputs), before)
    assert given and set(given) == {torch.Tensor}


def test_what_a_rotary_embedding_is_made_of_is_followed(monkeypatch):
    """Its own code is left out where heads are turned in the pass of attention."""
    model, inputs = MODELS["flux"]()
    patch = (OWN_ROTARY, "__code__", (lambda x, freqs, a=True, b=-1, sequence_dim=2: 0.5 * x).__code__)
    expected = patched_forward(monkeypatch, model, inputs, *patch)
    with sp.apply(model, CONFIG):
        before = forward(model, inputs)
        assert sqnr_db(patched_forward(monkeypatch, model, inputs, *patch), expected) > 40
        assert torch.equal(forward(model, inputs), before)


@pytest.mark.parametrize("patch", ATTENTION.values(), ids=ATTENTION)
def test_attention_replaced_after_the_swap_runs_in_16_bit_and_is_counted(patch, monkeypatch):
    model, inputs = MODELS["flux"]()
    stock, expected = forward(model, inputs), patched_forward(monkeypatch, model, inputs, *patch)
    assert sqnr_db(stock, expected) < 30
    with sp.apply(model, CONFIG) as handle:
        before = forward(model, inputs)
        calls = handle.report().calls
        with monkeypatch.context() as context:
            context.setattr(*patch)
            torch.testing.assert_close(forward(model, inputs), expected)
            report = handle.report()
            assert report.calls == calls and report.fallbacks == {"patched": calls}
            assert f"patched {calls}" in report.verdict
            assert all(patch[1] in row["note"] for row in report.rows if row["status"] == "active")
        assert torch.equal(forward(model, inputs), before)
        assert handle.report().calls == 2 * calls
        assert not any("replaced after" in row["note"] for row in handle.report().rows)
    assert torch.equal(forward(model, inputs), stock)


def test_a_copy_without_a_handle_follows(monkeypatch):
    model, inputs = MODELS["flux"]()
    patch = ATTENTION["dispatch_attention_fn"]
    expected = patched_forward(monkeypatch, model, inputs, *patch)
    with sp.apply(model, CONFIG):
        twin = copy.deepcopy(model)
        before = forward(twin, inputs)
        torch.testing.assert_close(patched_forward(monkeypatch, twin, inputs, *patch), expected)
        assert torch.equal(forward(twin, inputs), before)


@pytest.mark.parametrize("name", ["F", SDPA])
def test_a_processor_alone_follows(name, monkeypatch):
    attention, x, _, base = sage_attention_module()
    inputs = {"hidden_states": x}
    before = forward(attention, inputs)
    assert counted(attention.processor) == {"called": 1}
    functional = types.SimpleNamespace(scaled_dot_product_attention=louder_sdpa)
    patch = (attention_processor, "F", functional) if name == "F" else (F, name, louder_sdpa)
    after = patched_forward(monkeypatch, attention, inputs, *patch)
    assert counted(attention.processor) == {"called": 1, "patched": 1}
    attention.processor = base()
    assert torch.equal(after, patched_forward(monkeypatch, attention, inputs, *patch))
    assert not torch.equal(after, before)


def test_models_see_the_arguments_of_what_was_put_there(monkeypatch):
    """They leave out others without a word."""
    attention, x, _, base = sage_attention_module()
    own = base.__call__

    def with_gain(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, gain=1.0):
        return gain * own(self, attn, hidden_states, encoder_hidden_states, attention_mask)

    patch = (base, "__call__", with_gain)
    patched_forward(monkeypatch, attention, {"hidden_states": x}, *patch)  # has it looked
    found = patched_forward(monkeypatch, attention, {"hidden_states": x, "gain": 3.0}, *patch)
    attention.processor = base()
    assert torch.equal(found, patched_forward(monkeypatch, attention, {"hidden_states": x, "gain": 3.0}, *patch))
    assert not torch.equal(found, patched_forward(monkeypatch, attention, {"hidden_states": x}, *patch))


def test_what_a_helper_uses_is_followed(monkeypatch):
    """Its code is run with other globals, too: with `attend`, which calls attention, by way of `split_heads`."""
    attention, x = attention_inputs()
    inputs = {"attn": attention, "hidden_states": x}
    own = test_processors.split_heads
    patch = (test_processors, "split_heads", lambda x: 6 * own(x))
    stock, expected = (
        forward(HelperProcessor(), inputs),
        patched_forward(monkeypatch, HelperProcessor(), inputs, *patch),
    )
    assert sqnr_db(stock, expected) < 30
    sage = sage_class.swap(HelperProcessor(), CONFIG, "layer")
    assert sqnr_db(forward(sage, inputs), stock) > 30
    assert sqnr_db(patched_forward(monkeypatch, sage, inputs, *patch), expected) > 30
    assert counted(sage) == {"called": 2}


def test_attention_that_a_helper_calls_is_seen_replaced_and_put_back(monkeypatch):
    attention, x = attention_inputs()
    inputs = {"attn": attention, "hidden_states": x}
    sage = sage_class.swap(HelperProcessor(), CONFIG, "layer")
    before = forward(sage, inputs)
    functional = types.SimpleNamespace(scaled_dot_product_attention=louder_sdpa)
    found = patched_forward(monkeypatch, sage, inputs, test_processors, "F", functional)
    assert torch.equal(
        found, patched_forward(monkeypatch, HelperProcessor(), inputs, test_processors, "F", functional)
    )
    assert torch.equal(forward(sage, inputs), before) and counted(sage) == {"called": 2, "patched": 1}


def test_what_was_replaced_before_the_swap_is_what_the_model_has(monkeypatch):
    """As ever: who swaps then has looked at it."""
    model, inputs = MODELS["flux"]()
    monkeypatch.setattr(transformer_flux, "apply_rotary_emb", louder_rotary)
    monkeypatch.setattr(F, SDPA, lambda *args, **kwargs: OWN_SDPA(*args, **kwargs))
    stock = forward(model, inputs)
    with sp.apply(model, CONFIG) as handle:
        assert sqnr_db(forward(model, inputs), stock) > 40
        assert handle.report().calls and not handle.report().fallbacks


def test_a_swap_after_a_patch_that_is_undone_is_as_ever(monkeypatch):
    model, inputs = MODELS["flux"]()
    sage_class._sage_class.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(transformer_flux, "dispatch_attention_fn", louder_dispatch)
        with pytest.raises(ValueError, match="no attention processor"):
            sp.apply(model, CONFIG)
    with sp.apply(model, CONFIG) as handle:
        forward(model, inputs)
        assert handle.report().calls and not handle.report().fallbacks


def test_a_processor_whose_handle_is_gone_runs_what_is_there(monkeypatch):
    attention, inputs = attention_inputs()
    model = torch.nn.Module()
    model.attention = attention
    with sp.apply(model, CONFIG):
        held = attention.processor
    attention.processor = held
    after = patched_forward(monkeypatch, attention, {"hidden_states": inputs}, F, SDPA, louder_sdpa)
    assert not torch.equal(after, forward(attention, {"hidden_states": inputs}))
    assert sum(held._sage.events.numbers()) == 0


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("names", [["dispatch_attention_fn"], ["__call__", SDPA]])
def test_compiled_code_follows(names, monkeypatch):
    model, inputs = MODELS["flux"]()
    rotary = (transformer_flux, "apply_rotary_emb", louder_rotary)
    patches = [rotary, *(ATTENTION[name] for name in names)]
    expected = [patched_forward(monkeypatch, model, inputs, *patch) for patch in patches]
    with sp.apply(model, CONFIG) as handle:
        model.compile(backend="eager", fullgraph=True)
        before = forward(model, inputs)
        for patch, one in zip(patches, expected, strict=True):
            calls = handle.report().calls
            assert sqnr_db(patched_forward(monkeypatch, model, inputs, *patch), one) > 40, patch[1]
            assert (handle.report().calls == calls) == (patch is not rotary), patch[1]
            torch.testing.assert_close(forward(model, inputs), before)
    torch._dynamo.reset()


@pytest.mark.parametrize("patch", [(transformer_flux, "apply_rotary_emb", louder_rotary), *ATTENTION.values()])
def test_a_captured_forward_is_captured_anew(patch, monkeypatch):
    model, inputs = MODELS["flux"]()
    with sp.apply(model, CONFIG) as handle:
        graphs, recorder = captures(handle)
        for _ in range(8):
            before = forward(model, inputs)
        assert graphs.replays and recorder.captures == 1
        after = patched_forward(monkeypatch, model, inputs, *patch)
        assert graphs.eager["changed"] == 1 and not torch.equal(after, before)


def test_graphs_notice_a_method_that_a_forward_calls(monkeypatch):
    from diffusers.models.activations import GELU

    model, _ = MODELS["flux"]()
    watch, own = watch_of(model.modules()), GELU.gelu
    assert not watch.changed()
    monkeypatch.setattr(GELU, "gelu", lambda self, x: own(self, x))
    assert watch.changed()
    monkeypatch.undo()
    assert not watch.changed()
