"""The attention implementations under our names: how transformers finds them, what they run, what they refuse."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import sage_kernels
import sage_processors as sp
from sage_kernels.testing import relative_l2
from sage_processors.language import attention, names
from sage_processors.language.masks import sage_mask
from sage_processors.language.report import counted
from tests.support.language_calls import ANY_LENGTH, STRICT, exact_op, forward, llama_attention, tiny
from tests.support.tiny_language_models import MODELS, padded, tokens


STANDARD = {"sage_int8", "sage_int8_causal", "sage_qk_int8_pv_bf16", "sage_qk_int8_pv_fp8", "sage_qk_int8_pv_int8"}
STANDARD |= {
    "sage_qk_fp8_pv_fp8",
    "sage_int_fa_half",
    "sage_int_fa_full",
    "sage_int_fa_full_fp32_sum",
}
STANDARD |= {f"{name}_strict" for name in STANDARD}


def tiny_and_stock():
    """(model, inputs, its logits by eager attention)."""
    model, inputs = tiny()
    return model, inputs, forward(*MODELS["llama"]())


@pytest.fixture
def op_calls(monkeypatch):
    """The options of every call of the op, which is exact here; shapes of q and k under "shape"."""
    calls = []

    def recorded(q, k, v, **options):
        calls.append(options | {"shape": (tuple(q.shape), tuple(k.shape)), "views": (q, k, v)})
        return exact_op(q, k, v, **options)

    monkeypatch.setattr(sage_kernels, "sage_attention", recorded)
    return calls


# being found


def test_a_transformers_we_can_not_serve_stays_importable(monkeypatch, caplog):
    def missing(name):
        raise ImportError(f"cannot import name 'sdpa_mask' for {name}")

    monkeypatch.setattr(sp.importlib, "import_module", missing)
    with caplog.at_level(logging.WARNING, "sage_processors"):
        sp._meet_transformers()
    assert "not available in this transformers" in caplog.text and "sdpa_mask" in caplog.text


def test_M12_attention_and_mask_function_are_registered_together():
    assert set(sp.register_transformers()) == STANDARD
    before = {name: AttentionInterface._global_mapping[name] for name in STANDARD}
    sp.register_transformers()
    assert {name: AttentionInterface._global_mapping[name] for name in STANDARD} == before  # nothing was made anew
    for name in [*STANDARD, ANY_LENGTH, STRICT]:
        assert name in AttentionInterface._global_mapping
        assert AttentionMaskInterface._global_mapping[name] is sage_mask


@pytest.mark.parametrize("name", ["my_flash", "org/sage", "sdpa_sage", "my_flex_attention", "paged|sage", "eager", ""])
def test_names_that_mean_something_to_transformers_are_refused(name):
    with pytest.raises(ValueError, match="name: got"):
        sp.register_transformers(name)
    assert name not in names.IMPLEMENTATIONS


@pytest.mark.parametrize(
    "options", [{"recipe": "int3"}, {"on_unsupported": "maybe"}, {"min_tokens": -1}, {"min_tokens": True}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        sp.register_transformers("sage_never", **options)
    with pytest.raises(ValueError, match="name"):
        sp.register_transformers(**options)


def test_from_pretrained_takes_the_name_and_the_folder_stays_stock(tmp_path):
    model, inputs = tiny()
    wanted = forward(model, inputs)
    model.save_pretrained(tmp_path)
    assert "sage" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=ANY_LENGTH)
    assert torch.equal(forward(loaded, inputs), wanted)
    assert sp.attention_report(loaded).calls == 2


# what reaches the op


def test_prefill_is_causal_without_a_mask_and_heads_are_not_repeated(op_calls):
    model, inputs = tiny()
    forward(model, inputs)
    call = op_calls[0]
    assert call["attn_mask"] is None and call["causal"] == "top_left" and call["window"] is None
    assert call["shape"] == ((2, 37, 4, 16), (2, 37, 2, 16))
    assert all(x._base is not None for x in call["views"])  # nothing was copied on the way


def test_a_prompt_behind_a_cache_is_causal_from_the_bottom_right(op_calls):
    model, inputs, stock = tiny_and_stock()
    cache = transformers.DynamicCache(config=model.config)
    ids = inputs["input_ids"]
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        rest = model(ids[:, 20:], past_key_values=cache).logits
    assert [call["causal"] for call in op_calls] == ["top_left"] * 2 + ["bottom_right"] * 2
    assert all(call["attn_mask"] is None for call in op_calls)
    assert relative_l2(rest, stock[:, 20:]) < 1e-5


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_windows_sinks_and_soft_caps_reach_the_op(name, op_calls):
    model, inputs = tiny(name)
    forward(model, inputs)
    window = [call["window"] for call in op_calls]
    assert window == ([11, 11] if name == "mistral" else [11, None])
    assert all(call["attn_mask"] is None and call["causal"] for call in op_calls)
    assert all((call["sinks"] is not None) == (name == "gpt_oss") for call in op_calls)


def test_an_empty_static_cache_is_cut_to_what_was_written(op_calls):
    model, inputs, stock = tiny_and_stock()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    ids = inputs["input_ids"]
    with torch.no_grad():
        first = model(ids[:, :20], past_key_values=cache).logits
        rest = model(ids[:, 20:], past_key_values=cache).logits
    assert op_calls[0]["shape"][1][1] == 20 and op_calls[0]["causal"] == "bottom_right"
    assert op_calls[2]["shape"][1][1] == 37 and op_calls[2]["causal"] == "bottom_right"
    assert relative_l2(torch.cat([first, rest], 1), stock) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_the_user_are_used(dtype, op_calls):
    model, inputs = MODELS["llama"]()
    seen = (torch.rand(2, 1, 37, 37, generator=torch.Generator().manual_seed(3)) < 0.6) | torch.eye(
        37, dtype=torch.bool
    )
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    stock = forward(model, inputs | {"attention_mask": bias})
    model.set_attn_implementation(ANY_LENGTH)
    mask = seen if dtype == torch.bool else bias
    swapped = forward(model, inputs | {"attention_mask": mask})
    assert relative_l2(swapped, stock) < 1e-5
    assert all(call["attn_mask"] is mask for call in op_calls)


# what stays exact, and what is refused


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5", "whisper"])
def test_attention_weights_come_from_the_models_own_function(name):
    model, inputs = MODELS[name]()
    with torch.no_grad():
        stock = model(**inputs, output_attentions=True)
        model.set_attn_implementation(ANY_LENGTH)
        out = model(**inputs, output_attentions=True)
    for key in ("attentions", "decoder_attentions", "cross_attentions", "encoder_attentions"):
        if key in stock:
            assert all(torch.equal(a, b) for a, b in zip(out[key], stock[key], strict=True))
    report = sp.attention_report(model)
    assert report.calls == 0 and set(report.fallbacks) == {"output_attentions"}


@pytest.mark.parametrize("name", MODELS)
def test_short_calls_are_the_models_own_exact_attention(name):
    """Two prompts of which one is padded: also the way to exact attention takes every mask."""
    model, inputs = MODELS[name]()
    if "decoder_input_ids" not in inputs and "input_ids" in inputs:
        inputs = padded(inputs, "left")
    stock = forward(model, inputs)
    name = sp.register_transformers("sage_strict_from_513", min_tokens=513, on_unsupported="raise")[0]
    model.set_attn_implementation(name)  # short is no failure
    real = slice(None)
    if "attention_mask" in inputs and stock.shape[1] == inputs["attention_mask"].shape[1]:
        real = inputs["attention_mask"].bool()
    assert relative_l2(forward(model, inputs)[real], stock[real]) < 1e-4
    report = sp.attention_report(model)
    assert report.calls == 0 and set(report.fallbacks) == {"short"}


@pytest.mark.parametrize("length", [512, 513])
def test_min_tokens_is_the_first_length_that_runs_in_int8(length):
    model, _ = tiny(implementation=sp.register_transformers("sage_from_513", min_tokens=513)[0])
    forward(model, {"input_ids": tokens(1, length)})
    report = sp.attention_report(model)
    assert (report.calls, report.fallbacks) == ((0, {"short": 2}) if length == 512 else (2, {}))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"some_new_option": 3}, "unknown_argument"),
        ({"sliding_window": 4}, "window_without_mask"),
        ({"scaling": torch.tensor(0.3)}, "softmax_scale"),
        ({"attention_mask": torch.zeros(2, 1, 9, 9).double()}, "mask_type"),
    ],
)
def test_what_the_op_can_not_do_is_exact_and_counted(arguments, reason, caplog):
    attend, module, query, key, value = llama_attention()
    attention.FALLBACKS.logged.clear()
    if reason == "mask_type":
        with pytest.raises(RuntimeError, match="mask dtype"):  # by PyTorch: its own function can't do it either
            attend(module, query, key, value, **arguments)
    else:
        with caplog.at_level(logging.WARNING, "sage_processors"), torch.no_grad():
            for _ in range(2):
                out, weights = attend(module, query, key, value, **arguments)
        scaling = arguments.get("scaling")
        plain = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)[0]
        assert relative_l2(out, plain) < 1e-6
        assert [reason in record.getMessage() for record in caplog.records] == [True]  # once
    assert set(counted(module)) == {reason}
    strict = AttentionInterface._global_mapping[STRICT]
    with pytest.raises(sp.UnsupportedAttentionError, match=f"LlamaAttention 0.*{reason}.*_strict") as caught:
        strict(module, query, key, value, **arguments)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("head_dim", "value_dim", "reason"), [(264, 264, "head_dim"), (24, 16, "value_head_dim")])
def test_head_dims_of_no_kernel_are_exact(head_dim, value_dim, reason):
    attend, module, *_ = llama_attention()
    query, key, value = torch.randn(1, 4, 9, head_dim), torch.randn(1, 2, 9, head_dim), torch.randn(1, 2, 9, value_dim)
    out, _ = attend(module, query, key, value)
    plain, _ = sdpa_attention_forward(module, query, key, value, None)
    assert torch.equal(out, plain) and counted(module) == {reason: 1}


def test_a_paged_cache_is_refused():
    attend, module, query, key, value = llama_attention()
    with pytest.raises(NotImplementedError, match="cache of LlamaAttention 0: got a paged cache"):
        attend(module, query, key, value, cache=object())


# the report


def test_the_report_reads_like_the_one_of_pipelines():
    model, inputs = tiny()
    forward(model, inputs)
    text = str(sp.attention_report(model))
    assert (
        text.startswith("100 % of attention calls in INT8")
        and "layers of model" in text
        and "layers.0-1.self_attn" in text
    )
    assert "2 layers active: sage_any_length, qk_int8_pv_bf16, per_token" in text
    model.set_attn_implementation("sdpa")
    assert {row["status"] for row in sp.attention_report(model).rows} == {"not selected", "earlier"}
    assert not [key for key in model.state_dict() if "sage" in key]
    with pytest.raises(TypeError, match="model: got"):
        sp.attention_report("llama")
