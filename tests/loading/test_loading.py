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
from sage_processors.loading import measured
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
    if not isinstance(model, PreTrainedModel):  # a loaded one is balanced by a run of the model in 8 bit
        same(layers_of(loaded), layers_of(model))
        torch.testing.assert_close(run(loaded, inputs), run(model, inputs))
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


# --- what language models get beside that ---


@pytest.fixture
def hard(tmp_path):
    """(folder, model, inputs) of a llama with channels of its norms' outputs that are 64 times larger."""
    model, inputs = llama()
    for layer in model.model.layers:
        for norm, part in ((layer.input_layernorm, layer.self_attn), (layer.post_attention_layernorm, layer.mlp)):
            norm.weight.data[3::5] *= 64
            for name, module in part.named_children():
                if name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                    module.weight.data[:, 3::5] /= 64
    model.save_pretrained(tmp_path / "hard", max_shard_size=sum(p.nbytes for p in model.parameters()) // 3)
    return tmp_path / "hard", model, inputs


def balances_of(model):
    return {s.label: s.balance.vector for s in swap_of(model).states() if s.balance is not None}


def test_a_language_model_is_balanced_by_a_run_and_gated_as_apply_does_it(hard, tmp_path):
    folder, model, inputs = hard
    loaded = type(model).from_pretrained(folder, quantization_config=sp.SageConfig("int8", min_features=0))
    assert {row["calls"] for row in swap_of(loaded).report().rows} == {0}  # the run is counted nowhere
    saved = (loaded.save_pretrained(tmp_path / "small"), type(model).from_pretrained(tmp_path / "small"))[1]
    many = {"input_ids": torch.randint(0, 60, (16, 12), generator=torch.Generator().manual_seed(0))}
    stock = run(model, many)
    sp.apply(model, sp.SageAttnProcessor(linears=sp.Linears("int8", min_features=0), recipe="16bit"))
    assert len(balances_of(model)) == 12
    same(layers_of(saved), layers_of(loaded))
    for other in (loaded, saved):
        assert balances_of(other).keys() == balances_of(model).keys()
        for name, vector in balances_of(other).items():  # measured on weights in 8 bit, so not quite the same
            apart = (vector / balances_of(model)[name]).log2()
            assert apart.abs().max() < 0.26, name
        assert (run(other, many) - stock).norm() < 1.1 * (run(model, many) - stock).norm() + 1e-6
        assert swap_of(other).report().fallbacks == {"gated": 2}
    torch.testing.assert_close(run(saved, inputs), run(loaded, inputs), rtol=0, atol=0)


def test_a_weight_that_the_files_have_otherwise_is_rounded_twice(hard, monkeypatch):
    folder, model, inputs = hard
    stock, far, config = run(model, inputs), {}, sp.SageConfig("int8", min_features=0)
    changes = {
        "once": (),
        "twice": ("_is_weight_of", lambda *_: False),
        "never": ("random_run", lambda _: "no"),
    }
    for name, change in changes.items():
        with monkeypatch.context() as patch:
            if change:
                patch.setattr(measured, *change)
            loaded = type(model).from_pretrained(folder, quantization_config=config)
        far[name] = float((run(loaded, inputs) - stock).norm() / stock.norm())
    assert far["once"] < far["twice"] < far["never"] / 2


@pytest.mark.parametrize("options", [{"gated": "8bit"}, {"layers": {"*.down_proj": "int8"}}])
def test_an_option_or_a_rule_runs_prompts_behind_gates_in_8_bit(hard, options, tmp_path):
    folder, model, inputs = hard
    loaded = type(model).from_pretrained(folder, quantization_config=sp.SageConfig(min_features=0, **options))
    loaded.save_pretrained(tmp_path / "small")
    for other in (loaded, type(model).from_pretrained(tmp_path / "small")):
        run(other, inputs)
        assert swap_of(other).report().fallbacks == {}


def test_a_folder_of_the_first_format_runs_as_it_did(hard, tmp_path):
    folder, model, inputs = hard
    loaded = type(model).from_pretrained(folder, quantization_config=sp.SageConfig(min_features=0))
    loaded.save_pretrained(tmp_path / "small")
    path = tmp_path / "small" / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["gated"]
    config["quantization_config"]["format_version"] = 1
    path.write_text(json.dumps(config))
    again = type(model).from_pretrained(tmp_path / "small")
    run(again, inputs)
    assert swap_of(again).report().fallbacks == {}
