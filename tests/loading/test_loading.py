"""Models of both libraries that SageConfig loads straight into 8 bit, saved and loaded again: the same bits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import sage_processors as sp
from sage_processors.evaluation.hard_linears import inject_channel_outliers
from sage_processors.linears.swap import swap_of
from tests.support.tiny_models import MODELS


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 60}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    return model.eval().requires_grad_(False), {"input_ids": torch.arange(12)[None]}


BUILD = {name: MODELS[name] for name in ("flux", "unet_sd15", "wan_t2v")} | {"llama": llama}


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0] + 0


def layers_of(model):
    return {state.label: state.storage.plain_rows(state.index) for state in swap_of(model).states()}


def same(found, expected):
    assert found.keys() == expected.keys() and found
    for name, rows in expected.items():
        for mine, part in zip(found[name], rows, strict=True):
            assert torch.equal(mine.view(torch.uint8), part.contiguous().view(torch.uint8)), name


@pytest.fixture(params=BUILD)
def stock(request, tmp_path):
    """(folder of a model in 16 bit, in several files; the model; its inputs)."""
    model, inputs = BUILD[request.param]()
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "stock", max_shard_size=size // 3)
    assert len(list((tmp_path / "stock").glob("*.safetensors"))) > 2
    return tmp_path / "stock", model, inputs


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_loaded_saved_and_loaded_again_are_the_bits_of_the_swap(stock, format, tmp_path):
    folder, model, inputs = stock
    kind = type(model)
    config = sp.SageConfig(format, min_features=0)
    loaded = kind.from_pretrained(folder, quantization_config=config)
    with torch.no_grad():
        sp.quantize_linears(model, format, min_features=0, drop_weights=True)
    same(layers_of(loaded), layers_of(model))
    expected = run(model, inputs)
    torch.testing.assert_close(run(loaded, inputs), expected)
    assert not any(x.is_meta for x in (*loaded.parameters(), *loaded.buffers()))
    assert config.modules == {}  # the user's object serves several models
    loaded.save_pretrained(tmp_path / "small", max_shard_size=sum(p.nbytes for p in loaded.parameters()) // 2)
    again = kind.from_pretrained(tmp_path / "small")
    same(layers_of(again), layers_of(loaded))
    assert torch.equal(run(again, inputs), run(loaded, inputs))
    again.save_pretrained(tmp_path / "twice")
    cast = {"dtype" if isinstance(model, PreTrainedModel) else "torch_dtype": torch.bfloat16}
    third = kind.from_pretrained(tmp_path / "twice", **cast)
    same(layers_of(third), layers_of(loaded))  # scales stay in fp32
    assert third.dtype == torch.bfloat16
    assert third.config.quantization_config.modules == again.config.quantization_config.modules


def test_a_folder_is_ordinary_safetensors_with_codes_of_their_own_shape(tmp_path):
    model, _ = MODELS["flux"]()
    model.save_pretrained(tmp_path / "stock")
    kind, name = type(model), "transformer_blocks.0.attn.to_q"
    config = sp.SageConfig(min_features=0, layers={"*.to_k": "none", "*.to_v": {"linears": "fp8"}})
    kind.from_pretrained(tmp_path / "stock", quantization_config=config).save_pretrained(tmp_path / "small")
    tensors = load_file(tmp_path / "small" / "diffusion_pytorch_model.safetensors")
    shape = model.get_submodule(name).weight.shape
    assert tensors[f"{name}.weight"].shape == (1, *shape) and tensors[f"{name}.weight"].dtype == torch.int8
    assert tensors[f"{name}.weight_scale"].shape == shape[:1]
    assert tensors["transformer_blocks.0.attn.to_v.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(tensors["transformer_blocks.0.attn.to_k.weight"], model.transformer_blocks[0].attn.to_k.weight)
    written = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "sage_processors" and written["layers"][0] == ["*.to_k", "none"]
    assert written["modules"][name] == "int8" and "transformer_blocks.0.attn.to_k" not in written["modules"]


def test_balances_are_shared_and_saved(tmp_path):
    model, inputs = MODELS["flux"]()
    kind = type(model)
    with inject_channel_outliers(model):
        model.save_pretrained(tmp_path / "stock", max_shard_size=sum(p.nbytes for p in model.parameters()) // 3)
    model = kind.from_pretrained(tmp_path / "stock")
    loaded = kind.from_pretrained(tmp_path / "stock", quantization_config=sp.SageConfig(min_features=0))
    sp.quantize_linears(model, min_features=0, drop_weights=True)
    same(layers_of(loaded), layers_of(model))
    assert loaded.config.quantization_config.balanced
    loaded.save_pretrained(tmp_path / "small")
    again = kind.from_pretrained(tmp_path / "small")
    assert torch.equal(run(again, inputs), run(loaded, inputs))
    known = [{id(s.balance) for s in swap_of(m).states() if s.balance is not None} for m in (model, loaded, again)]
    assert len({len(ids) for ids in known}) == 1 and known[0]
