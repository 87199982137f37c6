"""sp.apply on a transformers model: all on by one line, all back by `remove`, typed errors for the rest."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers
import transformers.modeling_utils  # noqa: F401

import sage_processors as sp
from sage_kernels.testing import relative_l2
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


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("then", ["goes on", "applies again", "raises"])
def test_a_generate_goes_on_after_remove(given, then):
    model = MODELS["gemma3"]()[0]
    stock = text(model).sequences
    with sp.apply(model, sp.SageAttnProcessor()):
        want = text(model).sequences
    handle = sp.apply(model, sp.SageAttnProcessor())

    def removes(ids, scores):
        if ids.shape[1] == 73:
            handle.remove()
            assert sp.handle_of(model) is None
            if then == "applies again":
                sp.apply(model, sp.SageAttnProcessor())
            if then == "raises":
                raise RuntimeError("injected")
        return scores

    cache = {"past_key_values": sp.Int8KVCache(model.config)} if given else {}
    if then == "raises":
        with pytest.raises(RuntimeError, match="injected"):
            text(model, logits_processor=[removes], **cache)
    else:
        output = text(model, logits_processor=[removes], **cache)
        assert torch.equal(output.sequences, want) and isinstance(cache_of(output), sp.Int8KVCache)
    if then == "applies again":
        output = text(model)
        assert torch.equal(output.sequences, want) and isinstance(cache_of(output), sp.Int8KVCache)
        sp.handle_of(model).remove()
    assert model.config._attn_implementation == "eager" and not hasattr(model, "_sage")
    assert torch.equal(text(model).sequences, stock)


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


@pytest.mark.parametrize(
    ("held", "cast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
def test_generate_under_autocast_is_near_stock(name, held, cast):
    """Rotary embeddings give keys another dtype than values there."""
    model = MODELS[name]()[0].to(held)
    with torch.autocast("cpu", cast):
        stock = text(model, output_logits=True)
        sp.apply(model, sp.SageAttnProcessor())
        for cache in (None, sp.Int8KVCache(model.config), sp.Int8KVCache(model.config, 128)):
            output = text(model, output_logits=True, past_key_values=cache)
            assert isinstance(cache_of(output), sp.Int8KVCache) and output.sequences.shape == (1, 76)
            for step, (got, want) in enumerate(zip(output.logits, stock.logits, strict=True)):
                assert relative_l2(got.float(), want.float()) < 0.03
                if not torch.equal(output.sequences[:, : 71 + step], stock.sequences[:, : 71 + step]):
                    break  # a near tie: from here on it is another text


@pytest.mark.parametrize("where", ["call", "generation_config"])
def test_attentions_are_those_of_stock(where):
    """An INT8 cache has none, so `generate` makes an ordinary one where they are wanted."""
    model = MODELS["llama"]()[0]
    stock = text(model, output_attentions=True)
    with sp.apply(model, sp.SageAttnProcessor()):
        if where == "call":
            output = text(model, output_attentions=True)
        else:
            model.generation_config.output_attentions = True
            output = text(model)
            model.generation_config.output_attentions = False
        assert isinstance(cache_of(output), transformers.DynamicCache)
        pairs = [pair for x in zip(output.attentions, stock.attentions, strict=True) for pair in zip(*x, strict=True)]
        assert len(pairs) == 12
        for got, want in pairs:
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert isinstance(cache_of(text(model)), sp.Int8KVCache)
        with pytest.raises(NotImplementedError, match="output_attentions of LlamaAttention 0"):
            text(model, output_attentions=True, cache_implementation="int8")


def test_a_config_that_asks_for_attentions_gets_an_ordinary_cache():
    model = MODELS["llama"]()[0]
    model.config.output_attentions = True
    want = text(model).sequences
    with sp.apply(model, sp.SageAttnProcessor()):
        output = text(model)
    assert isinstance(cache_of(output), transformers.DynamicCache) and torch.equal(output.sequences, want)


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


def test_the_model_inside_of_data_parallel_wrappers(tmp_path):
    model = MODELS["llama"]()[0]
    with pytest.raises(TypeError, match=r"got DataParallel.*target.module"):
        sp.apply(torch.nn.DataParallel(model), sp.SageAttnProcessor())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model.requires_grad_(True))
        handle = sp.apply(wrapped, sp.SageAttnProcessor(min_tokens=0))
        assert sp.handle_of(wrapped) is sp.handle_of(model) is handle
        with torch.no_grad():
            wrapped(ids_of())
        assert handle.report().calls
        handle.remove()
    finally:
        torch.distributed.destroy_process_group()


def test_refresh_sees_a_weight_that_was_written_to_uncounted():
    model = MODELS["llama"]()[0]
    handle = sp.apply(model, sp.SageAttnProcessor("fast", linears=sp.Linears("int8", min_features=1), min_tokens=0))
    with torch.no_grad():
        before = model(ids_of()).logits
        weight = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
        weight.data.neg_()
        assert torch.equal(model(ids_of()).logits, before)
        handle.refresh()
        assert not torch.allclose(model(ids_of()).logits, before)
    handle.remove()
    with pytest.raises(RuntimeError, match="expected a live one"):
        handle.refresh()
