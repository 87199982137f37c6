"""Folders of transformers models whose files have other names than the modules: saved, loaded again, checked."""

from __future__ import annotations

import builtins
import json
import sys

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import sage_processors as sp
from sage_processors.loading import measured
from sage_processors.loading.files import as_named, check_files
from tests.loading.test_loading import layers_of, llama, run, same
from tests.support.placing import placed
from tests.support.tiny_language_models import MODELS, tokens, weigh


TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
IMAGE, VIDEO, START, END = 93, 94, 95, 96


def prompt():
    """30 tokens, of which 4 are an image's, between marks."""
    ids = tokens(1, 30).clamp(max=IMAGE - 1)
    ids[0, 2], ids[0, 3:7], ids[0, 7] = START, IMAGE, END
    return ids


def llava():
    vision = tf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
        projection_dim=32,
    )  # fmt: skip
    config = tf.LlavaConfig(
        vision_config=vision, text_config=tf.LlamaConfig(**TEXT), image_token_index=IMAGE, image_seq_length=4,
        vision_feature_layer=-1,
    )  # fmt: skip
    inputs = {"input_ids": prompt(), "pixel_values": torch.randn(1, 3, 28, 28)}
    return tf.LlavaForConditionalGeneration(config), inputs


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    config = tf.Qwen2VLConfig(
        vision_config=vision, text_config={**TEXT, "rope_parameters": rope}, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    ids = prompt()
    inputs = {
        "input_ids": ids, "pixel_values": torch.randn(16, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == IMAGE).long(),
    }  # fmt: skip
    return tf.Qwen2VLForConditionalGeneration(config), inputs


def built(name):
    torch.manual_seed(0)
    if name == "vit":
        return MODELS["vit"]()
    model, inputs = {"llava": llava, "qwen2_vl": qwen2_vl}[name]()
    weigh(model)
    return placed((model.float().eval().requires_grad_(False), inputs))


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "vit"])
def test_saved_under_the_names_of_a_checkpoint_and_loaded_again(name, tmp_path):
    model, inputs = built(name)
    kind = type(model)
    model.save_pretrained(tmp_path / "stock")
    loaded = kind.from_pretrained(tmp_path / "stock", quantization_config=sp.SageConfig(min_features=16))
    for folder, options in (("small", {}), ("own_names", {"save_original_format": False})):
        loaded.save_pretrained(tmp_path / folder, **options)
        again = kind.from_pretrained(tmp_path / folder)
        same(layers_of(again), layers_of(loaded))
        assert torch.equal(run(again, inputs), run(loaded, inputs))
    files = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("small", "own_names")]
    assert files[0] != files[1]  # else this model tests nothing


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    model, _ = built("llava")
    folder = tmp_path_factory.mktemp("llava")
    model.save_pretrained(folder / "stock")
    config = sp.SageConfig(min_features=16)
    type(model).from_pretrained(folder / "stock", quantization_config=config).save_pretrained(folder / "small")
    return type(model), folder / "small"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lost", "got no tensors .*language_model.*weight_scale"),
        ("foreign", "got 8-bit layers .*foreign.* does not name"),
        ("16_bit", r"got F32 .* for model\.language_model\."),
        ("unnamed", "does not name, expected the same ones in both"),
    ],
)
def test_renamed_layers_are_checked_too(small, change, words, tmp_path):
    kind, folder = small
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    weight = next(name for name in tensors if name.endswith("q_proj.weight") and "language_model" in name)
    if change == "lost":
        del tensors[f"{weight}_scale"]
    elif change == "foreign":
        tensors["language_model.model.layers.0.foreign.weight_scale"] = tensors[f"{weight}_scale"].clone()
    elif change == "16_bit":
        tensors[weight] = tensors[weight][0].float()
    else:
        modules = config["quantization_config"]["modules"]
        modules.pop(next(name for name in modules if name.endswith("o_proj") and "language_model" in name))
        config["quantization_config"]["balanced"] = []
        for name in [name for name in tensors if name.endswith(".weight_balance")]:
            del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        kind.from_pretrained(tmp_path)


def test_without_transformers_renaming_nothing_is_refused_by_name(small, monkeypatch):
    kind, folder = small
    real = builtins.__import__

    def without(name, globals=None, locals=None, fromlist=(), level=0):
        if "rename_source_key" in (fromlist or ()) and sys._getframe(1).f_globals["__name__"].startswith("sage_"):
            raise ImportError(name)
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", without)
    assert layers_of(kind.from_pretrained(folder))


def test_tensors_that_are_joined_or_split_are_found_but_not_compared(tmp_path):
    save_file({"qkv.weight": torch.zeros(3, 4, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    expected = {f"{name}.weight": (torch.int8, (1, 4, 4)) for name in "qkv"}
    files = [tmp_path / "model.safetensors"]
    check_files(files, expected, lambda _: (list(expected), False))
    with pytest.raises(ValueError, match="got no tensors"):
        check_files(files, expected, as_named)


def test_weights_that_were_renamed_are_not_rounded_twice(tmp_path, monkeypatch):
    model, _ = llama()
    tensors = {name.replace("layers.", "blocks."): tensor for name, tensor in model.state_dict().items()}
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found, real = [], measured._is_weight_of
    monkeypatch.setattr(measured, "_is_weight_of", lambda *args: found.append(real(*args)) or found[-1])
    config = sp.SageConfig(min_features=0)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=config, key_mapping={"blocks": "layers"})
    if not torch.cuda.is_available():  # else a model on the CPU is not run
        assert found and all(found)
    loaded.save_pretrained(tmp_path / "small")
    same(
        layers_of(type(model).from_pretrained(tmp_path / "small", key_mapping={"blocks": "layers"})), layers_of(loaded)
    )


@pytest.mark.parametrize("head", [{}, {"layers": {"lm_head": "int8"}}], ids=["head_in_16_bit", "head_in_8_bit"])
def test_a_folder_opens_as_its_base_model_and_as_a_model_with_another_head(head, tmp_path):
    model, inputs = MODELS["llama"]()
    ids = {"input_ids": inputs["input_ids"]}
    model.save_pretrained(tmp_path / "16")
    config = sp.SageConfig("int8", min_features=0, **head)
    whole = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "16", quantization_config=config)
    whole.save_pretrained(tmp_path / "whole")
    want = run(whole.model, ids)
    base = tf.AutoModel.from_pretrained(tmp_path / "whole")
    base.save_pretrained(tmp_path / "base")
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    other = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole")
    for opened in (base, again.model, other.model):
        torch.testing.assert_close(run(opened, ids), want, rtol=0, atol=0)
    # of the same class a layer that is missing is still an error
    file = tmp_path / "whole" / "config.json"
    read = json.loads(file.read_text())
    read["quantization_config"]["modules"]["other_head"] = "int8"
    file.write_text(json.dumps(read))
    with pytest.raises(ValueError, match="got 8-bit layer 'other_head'"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    read["quantization_config"]["modules"]["model.layers.0.other"] = "int8"
    file.write_text(json.dumps(read))
    with pytest.raises(ValueError, match="got 8-bit layer 'model.layers.0.other'"):
        tf.AutoModel.from_pretrained(tmp_path / "whole")
