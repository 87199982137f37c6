"""Loaded layers and SageAttnProcessor: formats stay, conflicts raise, remove() leaves the layers. LoRA on top."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import sage_processors as sp
from sage_processors.linears.swap import swap_of
from tests.loading.test_loading import BUILD, run


@pytest.fixture
def loaded(tmp_path):
    model, inputs = BUILD["flux"]()
    model.save_pretrained(tmp_path)
    config = sp.SageConfig(min_features=0, layers={"*.ff.net.2": "none"})
    return type(model).from_pretrained(tmp_path, quantization_config=config), inputs


def test_attention_comes_from_the_processor_and_remove_leaves_the_layers(loaded, caplog):
    model, inputs = loaded
    swap, expected = swap_of(model), run(*loaded)
    rules = {"*.ff.net.2": {"linears": "none"}}
    for options in ({}, {"linears": "int8"}, {"linears": "int8", "layers": rules}, {"preset": "small"}):
        handle = sp.apply(model, sp.SageAttnProcessor(**options))
        run(model, inputs)
        report = handle.report()
        formats = {row["layer"]: row["format"] for row in report.linears.rows}
        assert formats["transformer_blocks.0.attn.to_q"] == "int8" and formats["transformer_blocks.0.ff.net.2"] is None
        assert report.calls > 0 and swap_of(model) is swap
        with caplog.at_level(logging.WARNING):
            handle.remove()
        assert "stay in 8 bit" in caplog.text
        assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"linears": "fp8"},
        {"linears": sp.Linears("int8", min_features=8)},
        {"linears": "int8", "layers": {"*.attn.to_q": {"linears": "none"}}},
        {"layers": {"*.ff.net.2": {"linears": "int8"}}},
    ],
)
def test_other_formats_are_refused_and_nothing_changes(loaded, options):
    model, inputs = loaded
    expected, swap = run(model, inputs), swap_of(model)
    with pytest.raises(RuntimeError, match="other 8-bit layers than .* was loaded with .SageConfig"):
        sp.apply(model, sp.SageAttnProcessor(**options))
    assert swap_of(model) is swap and torch.equal(run(model, inputs), expected)


def test_a_lora_is_added_on_top(loaded):
    peft = pytest.importorskip("peft")
    model, inputs = loaded
    expected = run(model, inputs)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    with_lora = run(model, inputs)
    assert not torch.equal(with_lora, expected) and with_lora.isfinite().all()
    model.disable_adapters()
    torch.testing.assert_close(run(model, inputs), expected)


def test_a_copy_runs_and_a_dropped_model_is_not_saved(loaded, tmp_path):
    model, inputs = loaded
    assert torch.equal(run(copy.deepcopy(model), inputs), run(model, inputs))
    stock, _ = BUILD["flux"]()
    sp.quantize_linears(stock, min_features=0, drop_weights=True)
    with pytest.raises(RuntimeError, match="quantization_config=sage_processors.SageConfig"):
        stock.save_pretrained(tmp_path / "x")


def test_a_pipeline_is_loaded_saved_and_read(tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, PipelineQuantizationConfig

    model, inputs = BUILD["flux"]()
    parts = dict.fromkeys(["vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])
    FluxPipeline(FlowMatchEulerDiscreteScheduler(), transformer=model, **parts).save_pretrained(tmp_path / "stock")
    mapping = PipelineQuantizationConfig(quant_mapping={"transformer": sp.SageConfig(min_features=0)})
    pipe = FluxPipeline.from_pretrained(tmp_path / "stock", quantization_config=mapping, **parts)
    expected = run(pipe.transformer, inputs)
    assert swap_of(pipe.transformer).dropped
    pipe.save_pretrained(tmp_path / "small")
    again = FluxPipeline.from_pretrained(tmp_path / "small", **parts)
    assert torch.equal(run(again.transformer, inputs), expected)
    handle = again.set_attn_processor(sp.SageAttnProcessor(layers={"*.attn.to_q": {"linears": "int8"}}))
    assert again.transformer.transformer_blocks[0].attn.to_q._sage.dropped and handle.report()
