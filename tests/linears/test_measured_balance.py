"""Norms' outputs balanced by a run, and layers behind gated activations that keep prompts in 16 bit."""

from __future__ import annotations

import logging

import pytest
import torch


pytest.importorskip("transformers")

import sage_processors as sp
from sage_kernels.facts import few_rows
from sage_processors.linears.balance import Balance
from sage_processors.linears.measured_balance import measured_balances
from sage_processors.linears.random_run import random_run
from sage_processors.linears.weights.few_rows import in_16_bit_rows
from sage_processors.linears.weights.layers import follows_gate, is_in_attention, linear_layers
from sage_processors.linears.weights.linear_state import linear_state
from tests.linears.counting import relative_error
from tests.support.tiny_language_models import MODELS


LINEARS = sp.Linears("int8", min_features=1)
CONFIG = sp.SageAttnProcessor(linears=LINEARS, recipe="16bit")


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def states(model):
    return {name: module._sage for name, module in model.named_modules() if linear_state(module) is not None}


@pytest.fixture
def hard():
    """A llama with channels of its norms' outputs 64 times larger, too many for their small columns to be outliers."""
    model, inputs = MODELS["llama"]()
    for layer in model.model.layers:
        for norm, first, part in (
            (layer.input_layernorm, 3, layer.self_attn), (layer.post_attention_layernorm, 1, layer.mlp)
        ):  # fmt: skip
            norm.weight.data[first::5] *= 64
            for name, module in part.named_children():
                if name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                    module.weight.data[:, first::5] /= 64
    return model, inputs


def test_channels_that_only_a_run_shows_cost_a_third_of_the_error(hard):
    model, inputs = hard
    want, far = logits(model, inputs), {}
    for name, calibration in (("weights", None), ("run", lambda: logits(model, inputs))):
        with sp.quantize_linears(model, min_features=1, gated="16bit", calibration=calibration):
            far[name] = relative_error(logits(model, inputs), want)
    with sp.apply(model, CONFIG):  # on random tokens
        far["apply"] = relative_error(logits(model, inputs), want)
    assert far["run"] < far["weights"] / 3 and far["apply"] < far["weights"] / 3
    assert torch.equal(logits(model, inputs), want)


def test_layers_of_one_norm_share_a_balance_finer_than_powers_of_two(hard):
    model, inputs = hard
    with sp.apply(model, CONFIG):
        found = states(model)
        for i in range(len(model.model.layers)):
            own = {name.split(".")[-1]: s for name, s in found.items() if f"layers.{i}." in name}
            shared = [{id(own[f"{x}_proj"].balance) for x in names} for names in (("q", "k", "v"), ("gate", "up"))]
            assert [len(x) for x in shared] == [1, 1] and not shared[0] & shared[1]
            assert own["down_proj"].balance is None
            assert own["o_proj"].balance is not None and id(own["o_proj"].balance) not in shared[0] | shared[1]
            vector = own["q_proj"].balance.vector
            places = (16 * vector.log2()).round()
            assert torch.equal(vector, torch.exp2(places / 16).bfloat16().float())
            assert (places % 16).ne(0).float().mean() > 0.5
            assert vector.median() == 1 and (vector[3::5] <= 1 / 16).all()


def test_the_same_bits_every_time_and_no_trace_of_the_run(hard):
    model, inputs = hard
    seen, before = [], torch.get_rng_state()
    for _ in range(2):
        with sp.apply(model, CONFIG) as handle:
            seen.append(logits(model, inputs))
            report = handle.report()
    assert torch.equal(*seen) and torch.equal(torch.get_rng_state(), before)
    assert {row["calls"] + sum(row["fallbacks"].values()) for row in report.linears.rows if row["format"]} == {1}
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_model_that_cannot_be_run_is_balanced_by_its_weights_and_says_so(hard, caplog):
    model, inputs = hard
    stock = model.forward
    model.forward = lambda *a, use_cache=None, **k: stock(*a, **k) if "attention_mask" in k else 1 / 0
    inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    with caplog.at_level(logging.WARNING, "sage_processors"), sp.apply(model, CONFIG) as handle:
        logits(model, inputs)
        assert any("balanced by their weights alone" in note for note in handle.report().notes)
    assert sum("balanced by their weights alone" in record.message for record in caplog.records) == 1


def test_an_option_that_is_wrong_raises_alone_and_is_not_taken_for_a_failed_run(hard, caplog):
    model, inputs = hard
    want = logits(model, inputs)
    wrong = {"layers": {"*.down_prj": {"linears": "none"}}}
    with caplog.at_level(logging.WARNING, "sage_processors"), pytest.raises(ValueError, match="down_prj") as raised:
        sp.apply(model, sp.SageAttnProcessor(linears=LINEARS, recipe="16bit", **wrong))
    assert caplog.records == [] and raised.value.__context__ is None
    assert torch.equal(logits(model, inputs), want)


def test_another_format_than_a_model_was_loaded_in_raises_alone(hard, tmp_path, caplog):
    hard[0].save_pretrained(tmp_path)
    model = type(hard[0]).from_pretrained(tmp_path, quantization_config=sp.SageConfig("int8", min_features=0))
    caplog.clear()
    with (
        caplog.at_level(logging.WARNING, "sage_processors"),
        pytest.raises(RuntimeError, match="SageConfig") as raised,
    ):
        sp.apply(model, sp.SageAttnProcessor(linears="fp8"))
    assert caplog.records == [] and raised.value.__context__ is None


# --- behind gated activations ---

GATED = {"llama": {"down_proj"}, "gemma3": {"down_proj"}, "t5": set(), "bert": set(), "whisper": set(), "vit": set()}


@pytest.mark.parametrize("name", GATED)
def test_layers_behind_gates_are_found_by_the_layers_beside_them(name):
    model, _ = MODELS[name]()
    owners = dict(model.named_modules())
    found = {layer.split(".")[-1] for layer, _ in linear_layers(model) if follows_gate(layer, owners)}
    assert found == GATED[name] or (name == "t5" and found <= {"wo"})


def test_prompts_run_in_16_bit_behind_a_gate_and_few_rows_do_not(monkeypatch):
    model, inputs = MODELS["llama"]()
    with sp.apply(model, CONFIG) as handle:
        logits(model, inputs)
        monkeypatch.setattr(few_rows, "gpu_class", lambda device: "ada")
        few_rows.most_rows.cache_clear()
        one = {"input_ids": inputs["input_ids"][:1, :2]}
        model.bfloat16()
        logits(model, one)
        few_rows.most_rows.cache_clear()
        rows = {row["layer"].split(".")[-1]: row for row in handle.report().linears.rows}
    assert (rows["down_proj"]["calls"], rows["down_proj"]["few_row_calls"]) == (0, 1)
    assert rows["down_proj"]["fallbacks"] == {"gated": 1} and rows["up_proj"]["calls"] == 1
    assert rows["up_proj"]["few_row_calls"] == 1 and rows["up_proj"]["fallbacks"] == {}


@pytest.mark.parametrize("way", ["rule", "dropped", "strict"])
def test_a_rule_ends_it_and_a_dropped_weight_or_strictness_does_not(way):
    model, inputs = MODELS["llama"]()
    stock = logits(model, inputs)
    options = {"rule": {"layers": {"*.down_proj": {"linears": "int8"}}}, "strict": {"on_unsupported": "raise"}}
    linears = sp.Linears("int8", min_features=1, drop_weights=way == "dropped")
    handle = sp.apply(model, sp.SageAttnProcessor(linears=linears, recipe="16bit", **options.get(way, {})))
    found = logits(model, inputs)
    rows = [row for row in handle.report().linears.rows if row["layer"].endswith("down_proj")]
    assert {row["calls"] for row in rows} == {1 if way == "rule" else 0}
    if way == "dropped":  # the 8-bit weight, by 16-bit rows
        for layer in model.model.layers:
            state = layer.mlp.down_proj._sage
            codes, scale = state.storage.plain_rows(state.index)
            assert torch.equal(state.storage.dequantized(state.index, torch.float32, None), codes * scale[:, None])
    else:
        handle.remove()
    assert relative_error(found, stock) < 0.05


def test_balanced_rows_of_few_row_calls_have_the_bits_of_a_norm_times_its_balance(hard, monkeypatch):
    """The balance is folded into the norm's weight: powers of two, which round nothing."""
    model, inputs = hard
    model.bfloat16()
    monkeypatch.setattr(few_rows, "gpu_class", lambda device: "ada")
    few_rows.most_rows.cache_clear()
    one = {"input_ids": inputs["input_ids"][:1, :2]}
    want = logits(model, one)
    with sp.apply(model, CONFIG) as handle:
        for _ in range(3):
            got = logits(model, one)
        assert all(row["few_row_calls"] == 3 for row in handle.report().linears.rows if row["format"])
    few_rows.most_rows.cache_clear()
    assert relative_error(got, want) < 0.05


def test_what_attention_returns_is_balanced_by_its_own_sizes():
    model, inputs = MODELS["llama"]()
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data[5] *= 100
    with sp.quantize_linears(model, min_features=1, calibration=lambda: logits(model, inputs)):
        found = {name: state for name, state in states(model).items() if name.endswith("o_proj")}
        assert len(found) == len(model.model.layers)
        width = model.config.head_dim
        for state in found.values():  # channel 5 of the first KV head stands in all heads that read it
            heads = model.config.num_attention_heads // model.config.num_key_value_heads
            large = [5 + width * head for head in range(heads)]
            others = [i for i in range(len(state.balance.vector)) if i not in large]
            assert state.balance.vector[large].max() < state.balance.vector[others].min() / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_balanced_rows_are_rounded_once_and_are_a_tensor_of_their_own(dtype):
    x, balance = torch.randn(5, 48).to(dtype), torch.exp2(torch.randn(48))
    rows = in_16_bit_rows(x, dtype, balance)
    assert torch.equal(rows, (x.float() * balance).to(dtype)) and rows.data_ptr() != x.data_ptr()
    assert in_16_bit_rows(x, dtype, None) is x


def test_the_factors_of_a_run_are_exact_in_bf16_and_others_stay_in_fp32():
    model, inputs = MODELS["llama"]()
    vector = next(iter(measured_balances(model, lambda: logits(model, inputs)).values()))
    x, balance = torch.randn(5, len(vector)).bfloat16(), Balance(vector)
    factors = balance.for_rows(torch.bfloat16)
    assert factors.dtype == torch.bfloat16 and len(set(vector.tolist())) > 4
    assert torch.equal(in_16_bit_rows(x, torch.bfloat16, factors), in_16_bit_rows(x, torch.bfloat16, vector))
    assert balance.for_rows(torch.float16) is vector
    vector[3] *= 1 + 2**-9
    assert balance.for_rows(torch.bfloat16) is vector


def test_models_whose_blocks_end_in_a_norm_are_not_balanced():
    for name, has_balances in (("bert", False), ("llama", True)):
        model, inputs = MODELS[name]()
        inputs = {key: value for key, value in inputs.items() if key in ("input_ids", "attention_mask")}
        assert bool(measured_balances(model, lambda model=model, inputs=inputs: model(**inputs))) == has_balances


def test_states_that_several_layers_read_are_not_taken_for_what_attention_returns():
    """Keys and values of an encoder's states, whose norm is long ago: they read one tensor, and would share none."""
    model, inputs = MODELS["t5"]()
    found = measured_balances(model, lambda: model(**inputs))
    cross = "decoder.block.{}.layer.1.EncDecAttention.{}"
    assert cross.format(1, "o") in found and cross.format(0, "k") in found
    assert found[cross.format(0, "k")] is found[cross.format(0, "v")]
    assert not [name for name in found if name in (cross.format(1, "k"), cross.format(1, "v"))]


def tiny(kind: str):
    """A model of transformers by the name of its config, with heads of 16 channels."""
    import transformers

    shape = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, head_dim=16)
    config = getattr(transformers, f"{kind}Config")(**shape)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def test_layers_of_one_norm_share_a_balance_though_norms_of_heads_run_in_between():
    model = tiny("Qwen3")
    found = measured_balances(model, lambda: model(torch.randint(97, (1, 40)), use_cache=False))
    own = [found[f"model.layers.0.self_attn.{name}_proj"] for name in ("q", "k", "v")]
    assert own[0] is own[1] is own[2] and "model.layers.0.self_attn.o_proj" in found


def test_a_decoder_layer_that_is_called_attention_is_not_taken_for_attention():
    model = MODELS["llama"]()[0]
    owners = dict(model.named_modules())
    name = "model.layers.0.mlp.down_proj"
    assert is_in_attention("model.layers.0.self_attn.o_proj", owners) and not is_in_attention(name, owners)
    layer = owners["model.layers.0"]
    layer.__class__ = type("TinySelfAttentionDecoderLayer", (type(layer),), {})
    assert follows_gate(name, owners) and not is_in_attention(name, owners)


def test_a_first_token_beyond_the_vocabulary_is_left_out():
    model = tiny("Llama")
    model.config.bos_token_id = 128_000
    assert random_run(model)().logits.isfinite().all()


def test_a_model_that_was_not_run_says_why(caplog):
    reasons = {
        "t5": "an encoder with a decoder",
        "vit": "other inputs than the ids of tokens",
        "whisper": "other inputs than the ids of tokens",
        "siglip": "a run on random tokens failed",
        "llama": "training mode",
    }
    for name, reason in reasons.items():
        model, _ = MODELS[name]()
        model.train(name == "llama")
        with sp.apply(model, CONFIG) as handle:
            [note] = [note for note in handle.report().notes if reason in note]
        assert ("perplexity" in note) == (name in ("t5", "llama")), name


@pytest.mark.parametrize("where", ["applied", "applied and called"])
def test_balances_that_are_measured_in_inference_mode_serve_every_call(where):
    model = tiny("Llama")
    ids = torch.randint(97, (1, 40))
    want = logits(model, {"input_ids": ids})
    with torch.inference_mode():
        sp.apply(model, CONFIG)
        if where != "applied":
            assert relative_error(model(ids, use_cache=False).logits.clone(), want) < 0.1
    assert relative_error(logits(model, {"input_ids": ids}), want) < 0.1


def test_a_measurement_needs_no_layer_that_a_norm_feeds():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    x = torch.randn(5, 8)
    assert set(measured_balances(model, lambda: model(x * torch.nan))) == set()
    model[1].weight.data[2] = 100.0
    found = measured_balances(model, lambda: model(x))
    assert set(found) == {"2"} and found["2"][2] < 0.25
    assert set(measured_balances(model, lambda: model(x[0]))) == {"2"}
