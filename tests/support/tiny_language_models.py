"""Tiny real transformers models from config, of every attention family, with inputs for a forward.

`MODELS[name]()` returns (model, inputs): eager attention, fp32, random weights of unit gain (so that attention decides
something), eval mode, no gradients. Odd lengths; heads of 16 channels. Names in DECODERS generate text.
"""

from __future__ import annotations

import functools

import torch
import transformers as tf

from tests.support.placing import placed


MODELS, DECODERS = {}, []
TOKENS, VOCABULARY = 37, 97
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 30,
    "patch_size": 5,
}  # fmt: skip


def tokens(batch=2, length=TOKENS) -> torch.Tensor:
    """Random token ids without special ones, [batch, length]."""
    return placed(torch.randint(3, VOCABULARY, (batch, length)))


def weigh(model) -> None:
    """Random weights that keep the size of what goes through them: with transformers' own, attention is a mean."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            gain = 1.0 if "embed" in name or "shared" in name else parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter, std=gain)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(parameter)


def model(class_name, *, generates=False):
    """Register a function that returns (config, inputs) as the tiny model of its name."""

    def register(fn):
        @functools.wraps(fn)
        def build():
            torch.manual_seed(0)
            config, inputs = fn()
            made = getattr(tf, class_name)._from_config(config, attn_implementation="eager")
            weigh(made)
            return placed((made.float().eval().requires_grad_(False), inputs))

        MODELS[fn.__name__] = build
        if generates:
            DECODERS.append(fn.__name__)
        return fn

    return register


@model("LlamaForCausalLM", generates=True)
def llama():
    return tf.LlamaConfig(**_DECODER), {"input_ids": tokens()}


@model("Qwen3ForCausalLM", generates=True)
def qwen3():
    return tf.Qwen3Config(**_DECODER), {"input_ids": tokens()}


@model("MistralForCausalLM", generates=True)
def mistral():
    return tf.MistralConfig(**_DECODER, sliding_window=11), {"input_ids": tokens()}


@model("Gemma2ForCausalLM", generates=True)
def gemma2():
    extra = {"sliding_window": 11, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}
    return tf.Gemma2Config(**_DECODER, **extra), {"input_ids": tokens()}


@model("Gemma3ForCausalLM", generates=True)
def gemma3():
    extra = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
    return tf.Gemma3TextConfig(**_DECODER, **extra), {"input_ids": tokens()}


@model("GptOssForCausalLM", generates=True)
def gpt_oss():
    extra = {"sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 2}
    return tf.GptOssConfig(**_DECODER, **extra), {"input_ids": tokens()}


@model("PhiForCausalLM", generates=True)
def phi():
    return tf.PhiConfig(**{**_DECODER, "num_key_value_heads": 4}), {"input_ids": tokens()}


@model("WhisperForConditionalGeneration")
def whisper():
    config = tf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=41,
        max_target_positions=48, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    return config, {"input_features": torch.randn(2, 8, 82), "decoder_input_ids": tokens(2, 13)}


@model("T5ForConditionalGeneration")
def t5():
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return config, {"input_ids": tokens(), "decoder_input_ids": tokens(2, 13)}


@model("BartForConditionalGeneration")
def bart():
    config = tf.BartConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return config, {"input_ids": tokens(), "decoder_input_ids": tokens(2, 13)}


@model("BertForMaskedLM")
def bert():
    return tf.BertConfig(**_ENCODER), {"input_ids": tokens()}


@model("ModernBertForMaskedLM")
def modernbert():
    extra = {"local_attention": 10, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
    return tf.ModernBertConfig(**_ENCODER, **extra), {"input_ids": tokens()}


@model("ViTModel")
def vit():
    return tf.ViTConfig(**_VISION), {"pixel_values": torch.randn(2, 3, 30, 30)}


@model("SiglipModel")
def siglip():
    config = tf.SiglipConfig(text_config={**_ENCODER, "max_position_embeddings": TOKENS}, vision_config=_VISION)
    return config, {"input_ids": tokens(), "pixel_values": torch.randn(2, 3, 30, 30)}


@model("CLIPTextModel")
def clip_text():
    return tf.CLIPTextConfig(**_ENCODER), {"input_ids": tokens()}


def padded(inputs: dict, side: str, count: int = 5) -> dict:
    """`inputs` whose first sample has `count` tokens of padding on that side; needs input_ids."""
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, slice(count) if side == "left" else slice(-count, None)] = 0
    return inputs | {"input_ids": inputs["input_ids"].masked_fill(mask == 0, 0), "attention_mask": mask}


def result(output) -> torch.Tensor:
    """What a model is for: its logits, else its last hidden state or its embeddings; [B, S, ...]."""
    for name in ("logits", "last_hidden_state", "text_embeds"):
        if getattr(output, name, None) is not None:
            return output[name]
    raise KeyError(list(output))
