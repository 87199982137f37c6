"""sp.apply on a transformers model: all on by one line, all back by `remove`, typed errors for the rest."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers
import transformers.modeling_utils  # noqa: F401

import sage_processors as sp
from tests.support.tiny_language_models import MODELS, VOCABULARY


def ids_of():
    return torch.randint(3, VOCABULARY, (1, 70), generator=torch.Generator().manual_seed(0))


def text(model, **options):
    return model.generate(ids_of(), max_new_tokens=6, do_sample=False, return_dict_in_generate=True, **options)


def cache_of(output):
    return output.get("cache", output.get("past_key_values"))


def test_one_line_and_back():
    model = MODELS["llama"]()[0]
    want, names = text(model).sequences, {name: type(module) for name, module in model.named_modules()}
    config = sp.SageAttnProcessor("fast", linears=sp.Linears("int8", min_features=1), min_tokens=0)
    handle = sp.apply(model, config)
    assert sp.handle_of(model) is handle and isinstance(handle, sp.LanguageHandle)
    output = text(model)
    assert isinstance(cache_of(output), sp.Int8KVCache)
    report = handle.report()
    assert str(report).startswith('Preset "fast"') and "decode steps came from CUDA graphs" in report.notes[0]
    assert all(row["calls"] == 6 and row["cache_calls"] == 5 for row in report.rows)
    assert any(row["calls"] for row in report.linears.rows)
    handle.remove()
    handle.remove()
    assert torch.equal(text(model).sequences, want) and isinstance(cache_of(text(model)), transformers.DynamicCache)
    assert {name: type(module) for name, module in model.named_modules()} == names
    assert model._compiled_call_impl is None and "_sage" not in vars(model) and sp.handle_of(model) is None
    assert model.config._attn_implementation == "eager"


def test_applying_again_replaces_and_a_with_block_ends_it():
    model = MODELS["llama"]()[0]
    first = sp.apply(model, sp.SageAttnProcessor("fast"))
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=0)) as second:
        assert sp.handle_of(model) is second and second.graphs is None and second.linears is None
        assert not first._active and sp.attention_report(model).linears is None
    assert sp.handle_of(model) is None and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "int8"}])
def test_generate_makes_an_int8_cache(options):
    model = MODELS["gemma3"]()[0]
    with sp.apply(model, sp.SageAttnProcessor()):
        assert isinstance(cache_of(text(model, **options)), sp.Int8KVCache)
        mine = sp.Int8KVCache(model.config, 128)
        assert cache_of(text(model, past_key_values=mine)) is mine
        assert isinstance(cache_of(text(model, cache_implementation="dynamic")), transformers.DynamicCache)
        assert cache_of(text(model, use_cache=False)) is None


def test_cache_implementation_int8_without_our_attention_names_what_is_meant():
    model = MODELS["llama"]()[0]
    sp.apply(model, sp.SageAttnProcessor()).remove()
    with pytest.raises(ValueError, match="sage_processors.apply"):
        text(model, cache_implementation="int8")


@pytest.mark.parametrize(
    "options",
    [
        {"scaling": "delayed"},
        {"scaling": sp.Scaling("timestep", margin=0.5)},
        {"keep": sp.Keep(first_steps=1)},
        {"skip": sp.Skip(limit=0.1)},
        {"mixed": {"budget": 0.5}},
        {"rotation": "auto"},
        {"recipe": "mixed"},
        {"layers": {"*0*": {"recipe": "16bit"}}},
        {"layers": {"*0*": {"scaling": "per_head"}}},
    ],
    ids=str,
)
def test_options_of_denoisers_are_refused_by_name(options):
    (name,) = options
    config, model = sp.SageAttnProcessor(**options), MODELS["llama"]()[0]
    with pytest.raises(ValueError, match=f"^{name}: got .* for a transformers model"):
        sp.apply(model, config)
    assert model.config._attn_implementation == "eager" and "_sage" not in vars(model)


def test_options_of_language_models_arrive():
    model = MODELS["llama"]()[0]
    rules = {"*.down_proj": {"linears": "none"}}
    linears = sp.Linears("int8", min_features=1)
    config = sp.SageAttnProcessor(
        recipe="qk_int8_pv_int8", rotation="hadamard", min_tokens=3, layers=rules, linears=linears
    )
    with sp.apply(model, config) as handle:
        text(model)
        rows = handle.report().rows
        assert all(row["recipe"] == "qk_int8_pv_int8" and "hadamard" in row["numbers"] for row in rows)
        formats = {row["layer"]: row["format"] for row in handle.report().linears.rows}
        assert {kind for name, kind in formats.items() if name.endswith("down_proj")} == {None}
        assert {kind for name, kind in formats.items() if name.endswith("gate_proj")} == {"int8"}
        name = model.config._attn_implementation
    with sp.apply(model, config):
        assert model.config._attn_implementation == name  # the same options, the same name
    with sp.apply(model, sp.SageAttnProcessor(recipe="16bit")) as handle:
        text(model)
        rows = [row for row in handle.report().rows if row["status"] == "active"]
        assert all(row["fallbacks"] == {"short": 1} and row["cache_calls"] == 5 for row in rows)


def test_dropped_weights_stay_dropped_and_a_copy_has_no_handle():
    model = MODELS["llama"]()[0]
    handle = sp.apply(model, sp.SageAttnProcessor(linears=sp.Linears("int8", min_features=1), graphs="auto"))
    want = text(model).sequences
    twin = copy.deepcopy(model)
    assert sp.handle_of(twin) is None and twin._compiled_call_impl is None
    assert torch.equal(text(twin, past_key_values=sp.Int8KVCache(twin.config, 128)).sequences, want)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert sp.handle_of(torch.load(file, weights_only=False)) is None
    handle.remove()
    dropping = sp.Linears("int8", min_features=1, drop_weights=True)
    handle = sp.apply(model, sp.SageAttnProcessor(linears=dropping))
    handle.remove()
    assert sp.handle_of(model) is None and "stay in 8 bit" in handle.report().notes[-1]
    again = sp.apply(model, sp.SageAttnProcessor(linears=dropping))
    assert again.linears is handle.linears and again.linears.dropped


def test_a_model_without_attention_is_refused():
    config = transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(sp.UnsupportedAttentionError):
        sp.apply(transformers.MambaForCausalLM(config), sp.SageAttnProcessor("fast"))
