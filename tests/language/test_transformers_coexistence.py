"""Beside others: an INT8 cache, torch.compile, accelerate's hooks, LoRA adapters, quantised linear layers."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import relative_l2
from sage_processors.language import report as transformers_counts
from sage_processors.reporting.event_counter import shared_numbers
from tests.support.language_calls import ANY_LENGTH, SAME, exact_op, forward, tiny
from tests.support.tiny_language_models import MODELS, VOCABULARY, tokens


# Wiring, not accuracy (test_transformers_models.py and test_kv_cache.py measure that): without its mask or its window,
# or with a wrong scale, these Llama, Mistral and GPT-OSS logits are off by 0.3 to 0.6 (relative L2).
NEAR, NEAR_INT8_CACHE = 0.05, 0.1


def assert_all_int8(model, calls):
    report = sp.attention_report(model)
    assert report.calls == calls and not report.fallbacks, str(report)


# the INT8 cache


def test_a_prompt_in_chunks_is_causal_over_the_INT8_cache():
    """The band of a chunk becomes causality and window of the decode op: other tokens behind it change nothing, once
    the first 64 tokens have said what a cache's vectors are. Until then they change how earlier ones are rounded."""
    for name in ("llama", "mistral"):
        model, _ = tiny(name)
        ids = tokens(2, 64 + 16 + 12)
        whole = forward(model, {"input_ids": ids})
        for max_cache_len in (None, 100):
            for chunks, at in (((64, 16, 12), 79), ((9, 16, 67), 24)):
                cache = sp.Int8KVCache(model.config, max_cache_len)
                with torch.no_grad():
                    parts = [model(part, past_key_values=cache).logits for part in ids.split(chunks, 1)]
                assert relative_l2(torch.cat(parts, 1), whole) < NEAR_INT8_CACHE
                altered = ids.clone()
                altered[:, at] = (altered[:, at] + 1) % VOCABULARY
                cache = sp.Int8KVCache(model.config, max_cache_len)
                with torch.no_grad():
                    again = [model(part, past_key_values=cache).logits for part in altered.split(chunks, 1)]
                assert not torch.equal(again[1], parts[1])
                before, after = parts[1][:, :-1], again[1][:, :-1]
                assert torch.equal(before, after) if chunks[0] == 64 else relative_l2(after, before) < NEAR_INT8_CACHE


def test_an_INT8_cache_refuses_what_needs_keys():
    model, inputs = tiny()
    cache = sp.Int8KVCache(model.config)
    ids = inputs["input_ids"]
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)
        with pytest.raises(NotImplementedError, match="output_attentions of LlamaAttention 0.*INT8 cache"):
            model(ids[:, 9:10], past_key_values=cache, output_attentions=True)


# torch.compile


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize(("name", "counted_before"), [("llama", True), ("gpt_oss", False)])
def test_T04_decoding_on_a_static_cache_compiles_into_one_graph(name, counted_before, monkeypatch):
    model, inputs = tiny(name)
    ids, eager = inputs["input_ids"], copy.deepcopy(model)
    if counted_before:
        sp.attention_report(model)
    shared = sum(map(sum, shared_numbers(transformers_counts.SHARED_COUNTER).values()))

    def decode(run):
        cache = transformers.StaticCache(config=model.config, max_cache_len=48)
        with torch.no_grad():
            yield run(ids[:, :33], past_key_values=cache).logits[:, -1]
            for i in range(33, 37):
                yield run(ids[:, i : i + 1], past_key_values=cache).logits[:, -1]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    steps, frames = [], []
    for logits in decode(torch.compile(model, backend="aot_eager", fullgraph=True)):
        steps.append(logits)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert not torch._dynamo.utils.counters["graph_break"]
    assert frames[1:] == frames[1:2] * 4  # one graph for decoding
    assert relative_l2(torch.stack(steps), torch.stack(list(decode(eager)))) < SAME
    calls = sp.attention_report(model).calls
    unnamed = sum(map(sum, shared_numbers(transformers_counts.SHARED_COUNTER).values())) - shared
    assert (calls, unnamed) == ((2 * 5, 0) if counted_before else (0, 2 * 5))
    assert counted_before or any("before torch.compile" in note for note in sp.attention_report(model).notes)


@pytest.mark.slow("compiles a model")
def test_layers_compile_one_by_one_with_a_band_as_their_mask():
    model, inputs = tiny("mistral")
    wanted = forward(model, inputs)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert relative_l2(forward(model, inputs), wanted) < SAME


# accelerate


def test_a_device_map_changes_nothing(tmp_path):
    pytest.importorskip("accelerate")
    model, inputs = tiny()
    wanted = forward(model, inputs)
    model.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    mapped = load(tmp_path, attn_implementation=ANY_LENGTH, device_map="cpu")
    assert torch.equal(forward(mapped, inputs), wanted)
    assert_all_int8(mapped, 2)
    layers = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    layers |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    on_disk = load(tmp_path, attn_implementation=ANY_LENGTH, device_map=layers, offload_folder=tmp_path / "offload")
    assert torch.equal(forward(on_disk, inputs), wanted)
    assert_all_int8(on_disk, 2)


def test_offloading_changes_nothing():
    accelerate = pytest.importorskip("accelerate")
    model, inputs = tiny("mistral")  # its mask is a band, which the hooks send along
    wanted = forward(model, inputs)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(forward(model, inputs), wanted)
    assert_all_int8(model, 4)


# LoRA


def test_LoRA_adapters_train_exactly_and_run_in_INT8(monkeypatch):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, inputs = tiny(implementation="eager")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    stock = forward(adapted, inputs)
    model.set_attn_implementation(ANY_LENGTH)
    assert relative_l2(adapted(**inputs).logits, stock) < SAME  # with gradients, so exact
    assert sp.attention_report(adapted).fallbacks == {"gradient": 2}
    adapted.train()
    torch.nn.functional.cross_entropy(adapted(**inputs).logits.flatten(0, 1), tokens().flatten()).backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained and all("lora_" in name for name in trained)
    assert sp.attention_report(adapted).fallbacks == {"gradient": 2, "training": 2}
    adapted.eval()
    int8 = forward(adapted, inputs)
    assert 0 < relative_l2(int8, stock) < NEAR
    report = sp.attention_report(adapted)
    assert report.calls == 2 and report.rows[0]["layer"].endswith("layers.0.self_attn")
    merged = adapted.merge_and_unload()
    assert relative_l2(forward(merged, inputs), int8) < 0.02  # codes may flip: the sum of weights is rounded
    monkeypatch.setattr(sage_kernels, "sage_attention", exact_op)
    assert relative_l2(forward(merged, inputs), stock) < SAME


# quantised linear layers


def assert_attention_is_swapped_alone(model, inputs, monkeypatch, same=SAME):
    """Of a model with eager attention: exact attention as the op changes nothing, INT8 a little, and all calls ran."""
    stock = forward(model, inputs)
    model.set_attn_implementation(ANY_LENGTH)
    assert 0 < relative_l2(forward(model, inputs), stock) < NEAR
    assert_all_int8(model, 2)
    monkeypatch.setattr(sage_kernels, "sage_attention", exact_op)
    assert relative_l2(forward(model, inputs), stock) < same


def test_torchao_weights(monkeypatch):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model, inputs = tiny(implementation="eager")
    before = forward(model, inputs)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    assert relative_l2(forward(model, inputs), before) > 1e-4  # it is quantised
    assert_attention_is_swapped_alone(model, inputs, monkeypatch)


def test_bitsandbytes_weights(monkeypatch, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model, inputs = tiny(implementation="eager")
    model.save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu", attn_implementation="eager", dtype=torch.float32
    )
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear8bitLt"
    # it quantises activations too: a rounding of fp32 can move one by a step of a 127th
    assert_attention_is_swapped_alone(model, inputs, monkeypatch, same=0.02)


def test_handles_of_a_model_and_of_its_part_give_back_what_was_there_before_both():
    model, _ = MODELS["llama"]()
    before = model.config._attn_implementation
    for config in (sp.SageAttnProcessor(), sp.SageAttnProcessor("fast")):
        inner, outer = sp.apply(model.model, config), sp.apply(model, config)
        inner.remove()
        outer.remove()
        assert model.config._attn_implementation == before and sp.handle_of(model) is None


def test_a_name_that_the_user_sets_over_ours_stays():
    model, _ = MODELS["llama"]()
    handle = sp.apply(model, sp.SageAttnProcessor())
    model.set_attn_implementation("sdpa")
    handle.remove()
    assert model.config._attn_implementation == "sdpa"


def test_a_model_inside_of_an_adapter_of_peft_is_found():
    peft = pytest.importorskip("peft")
    model, inputs = MODELS["llama"]()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).eval()
    for target in (wrapped, wrapped.base_model):
        with sp.apply(target, sp.SageAttnProcessor(min_tokens=0)) as handle, torch.no_grad():
            assert sp.handle_of(target) is handle
            wrapped(**inputs)
            assert handle.report().calls
        assert sp.handle_of(target) is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_may_grow_and_shrink_under_an_int8_head(tied):
    shape = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, tie_word_embeddings=tied)
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(80, (1, 40))
    options = {"linears": sp.Linears("int8", min_features=1), "layers": {"lm_head": {"linears": "int8"}}}
    with torch.no_grad(), sp.apply(model, sp.SageAttnProcessor(**options)) as handle:
        for size in (110, 90):
            model(ids)
            model.resize_token_embeddings(size)
            found = model(ids).logits
            handle.remove()
            assert relative_l2(found, model(ids).logits) < 0.05
            handle = sp.apply(model, sp.SageAttnProcessor(**options))
