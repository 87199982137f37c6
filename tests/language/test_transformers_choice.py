"""A name of ours on a model in which nothing can run it: said when it is chosen, an error where it is strict."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers as tf
from transformers import modeling_utils

import sage_processors as sp
from sage_kernels.testing import relative_l2
from sage_processors.evaluation import language
from sage_processors.language.choice import watch_choices
from tests.support.language_calls import ANY_LENGTH, forward
from tests.support.tiny_language_models import MODELS, weigh


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
WITHOUT = {
    "mamba": lambda: tf.MambaForCausalLM(tf.MambaConfig(**SMALL, state_size=4)),
    "rwkv": lambda: tf.RwkvForCausalLM(tf.RwkvConfig(**SMALL, attention_hidden_size=32, context_length=64)),
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)),
    "resnet": lambda: tf.ResNetModel(tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])),
}
STRICT = "sage_int8_strict"


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "sage_processors" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", WITHOUT)
def test_P53_a_model_without_our_kind_of_attention_says_that_nothing_can_run(name, caplog):
    model = WITHOUT[name]()
    before = model.config._attn_implementation
    with pytest.raises(sp.UnsupportedAttentionError, match=f"{type(model).__name__}.*{STRICT}.*nothing can run") as no:
        model.set_attn_implementation(STRICT)
    assert no.value.reason == "no_attention" and model.config._attn_implementation == before
    with caplog.at_level(logging.WARNING, "sage_processors"):
        model.set_attn_implementation("sage_int8")
    assert len(said(caplog)) == 1 and "nothing can run in INT8" in said(caplog)[0]
    assert "can run in INT8" in str(sp.attention_report(model)) and not sp.attention_report(model).calls


@pytest.mark.parametrize("way", ["from_config", "class", "from_pretrained"])
@pytest.mark.parametrize("name", ["bloom", "falcon", "longformer"])
def test_P59_attention_that_asks_for_no_implementation_is_not_given_our_masks(name, way, tmp_path, caplog):
    """Without a mask, which our attention would make up for, Bloom is not causal."""
    kinds = {"bloom": (tf.BloomForCausalLM, tf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))}
    kinds["falcon"] = tf.FalconForCausalLM, tf.FalconConfig(**SMALL, num_attention_heads=4)
    extra = {"num_attention_heads": 4, "intermediate_size": 32, "attention_window": 8}
    kinds["longformer"] = tf.LongformerForMaskedLM, tf.LongformerConfig(**SMALL, **extra)
    kind, config = kinds[name]
    torch.manual_seed(0)
    stock = kind._from_config(config, attn_implementation="eager").eval()
    weigh(stock)
    stock.save_pretrained(tmp_path)
    make = {"from_config": lambda name: kind._from_config(copy.deepcopy(config), attn_implementation=name)}
    make["from_pretrained"] = lambda name: kind.from_pretrained(tmp_path, attn_implementation=name)

    def by_class(name):
        named = copy.deepcopy(config)
        named._attn_implementation = name
        return kind(named)

    make["class"] = by_class
    with pytest.raises(sp.UnsupportedAttentionError, match="nothing can run in INT8"):
        make[way](STRICT)
    with caplog.at_level(logging.WARNING, "sage_processors"):
        model = make[way]("sage_int8").eval()
    model.load_state_dict(stock.state_dict())
    inputs = {"input_ids": torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(2))}
    assert relative_l2(forward(model, inputs), forward(stock, inputs)) < 1e-5
    assert "nothing can run in INT8" in said(caplog)[0]


def test_P53_loading_such_a_model_says_it_too(tmp_path, caplog):
    WITHOUT["mamba"]().save_pretrained(tmp_path)
    for load in (tf.MambaForCausalLM.from_pretrained, tf.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(sp.UnsupportedAttentionError, match="MambaForCausalLM.*nothing can run"):
            load(tmp_path, attn_implementation=STRICT)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "sage_processors"):
            model = load(tmp_path, attn_implementation="sage_int8")
        assert type(model) is tf.MambaForCausalLM and len(said(caplog)) == 1
    model, info = tf.MambaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is tf.MambaForCausalLM and "missing_keys" in info


def test_P53_attention_in_a_part_of_the_model_is_enough(caplog):
    layers = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32, "num_experts": 2}
    hybrid = tf.JambaForCausalLM(tf.JambaConfig(**SMALL, **layers, attn_layer_period=2, attn_layer_offset=1))
    both, inputs = MODELS["siglip"]()
    with caplog.at_level(logging.WARNING, "sage_processors"):
        hybrid.set_attn_implementation(STRICT)
        both.set_attn_implementation({"text_config": ANY_LENGTH, "vision_config": "eager"})
    assert not said(caplog) and [row["status"] for row in sp.attention_report(hybrid).rows] == ["active"]
    forward(both, inputs)
    assert sp.attention_report(both).calls == 2


def test_P53_a_part_without_attention_is_named_and_the_others_stay_as_they_were():
    both, _ = MODELS["siglip"]()
    vision = both.vision_model
    for module in list(vision.modules()):  # a tower of convolutions
        for name, child in list(module.named_children()):
            if "Attention" in type(child).__name__:
                setattr(module, name, torch.nn.Identity())
    before = both.config._attn_implementation, both.config.text_config._attn_implementation
    with pytest.raises(sp.UnsupportedAttentionError, match="nothing can run"):
        both.set_attn_implementation({"text_config": ANY_LENGTH, "vision_config": STRICT})
    assert (both.config._attn_implementation, both.config.text_config._attn_implementation) == before
    assert both.config.vision_config._attn_implementation == "eager"


def test_P53_names_of_others_and_names_without_a_meaning_are_left_to_transformers(caplog):
    model = WITHOUT["mamba"]()
    with caplog.at_level(logging.WARNING, "sage_processors"):
        model.set_attn_implementation("eager")
        model.set_attn_implementation({"": "eager"})
        with pytest.raises(ValueError, match="sage_nonsense"):
            model.set_attn_implementation("sage_nonsense")
    assert not said(caplog) and model.config._attn_implementation == "eager"


def test_the_methods_are_watched_once():
    before = modeling_utils.PreTrainedModel.set_attn_implementation
    watch_choices(modeling_utils.PreTrainedModel, {})
    assert modeling_utils.PreTrainedModel.set_attn_implementation is before
    assert before.__name__ == "set_attn_implementation" and "attn_implementation" in before.__doc__


def test_P53_attention_behind_a_helper_of_forward_counts():
    class Attention(tf.models.llama.modeling_llama.LlamaAttention):
        def attend(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

        def forward(self, *args, **kwargs):
            return self.attend(*args, **kwargs)

    model, inputs = MODELS["llama"]()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Attention
    model.set_attn_implementation(ANY_LENGTH)
    forward(model, inputs)
    assert sp.attention_report(model).calls == 2


def test_P53_no_figures_of_a_model_in_which_nothing_runs():
    windows = torch.randint(3, 97, (2, 16))
    with pytest.raises(sp.UnsupportedAttentionError, match="MambaForCausalLM.*nothing can run"):
        language.evaluate(WITHOUT["mamba"]().eval(), windows, windows, new_tokens=2)
