"""The two embedded pipelines before training: diffusers' and transformers' own classes, built from small configs.

`tiny_sd` is a StableDiffusionPipeline (UNet with text cross-attention, v-prediction), `tiny_flux` a FluxPipeline
(joint-attention transformer, flow matching). Both draw 128x128 pixels, have 1024 image tokens in their largest
attention and heads of 64 channels.
"""

from __future__ import annotations

import json

from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tiny_data import captions
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast


PIXELS = 128
TEXT_WIDTH = 128
CLIP_TOKENS = 77
T5_TOKENS = 32  # what the embedded FluxPipeline needs; FluxPipeline itself pads to 512 unless told otherwise


def build(name: str) -> DiffusionPipeline:
    """An untrained `tiny_sd` or `tiny_flux`, fp32 on the CPU."""
    words = captions()
    return _build_sd(words) if name == "tiny_sd" else _build_flux(words)


def _build_sd(words: list[str]) -> StableDiffusionPipeline:
    tokenizer = clip_tokenizer(words)
    unet = UNet2DConditionModel(
        sample_size=PIXELS // 4,
        in_channels=4,
        out_channels=4,
        block_out_channels=(128, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=2,  # diffusers' name for the NUMBER of heads: 2 heads of 64 channels
        cross_attention_dim=TEXT_WIDTH,
        time_embedding_dim=256,
    )
    # With these betas the last step keeps 0.6 % of the signal: near enough to pure noise that flat backgrounds come
    # out right, and finite for every scheduler a user may swap in (a zero terminal SNR is not).
    scheduler = DDIMScheduler(
        beta_start=1e-4,
        beta_end=0.02,
        beta_schedule="linear",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )
    return StableDiffusionPipeline(
        vae=_vae((32, 40, 48)),
        text_encoder=_clip_encoder(tokenizer, TEXT_WIDTH, layers=2, heads=2),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _build_flux(words: list[str]) -> FluxPipeline:
    tokenizer, tokenizer_2 = clip_tokenizer(words), t5_tokenizer(words)
    transformer = FluxTransformer2DModel(
        in_channels=16,  # 2x2 patches of 4 latent channels
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=64,
        num_attention_heads=3,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=64,
        guidance_embeds=False,
        axes_dims_rope=(16, 24, 24),
    )
    t5 = T5Config(
        vocab_size=len(tokenizer_2),
        d_model=TEXT_WIDTH,
        d_kv=64,
        d_ff=256,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer_2.pad_token_id,
        eos_token_id=tokenizer_2.eos_token_id,
        use_cache=False,
    )
    # FLUX.1-dev's own shift of the noise levels with the number of tokens.
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    return FluxPipeline(
        scheduler=scheduler,
        vae=_vae((32, 48)),
        text_encoder=_clip_encoder(tokenizer, 64, layers=1, heads=1),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )


def _vae(channels: tuple[int, ...]) -> AutoencoderKL:
    levels = len(channels)
    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=PIXELS,
    )


def _clip_encoder(tokenizer: CLIPTokenizer, width: int, layers: int, heads: int) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=CLIP_TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,  # the pooled output is read at the first of these
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def clip_tokenizer(words: list[str]) -> CLIPTokenizer:
    """Byte-level BPE in which every word of the captions is one token and any other text is spelled in bytes."""
    trainer = trainers.BpeTrainer(
        vocab_size=2048,  # never reached: merging stops when every word is one token
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    bpe.train_from_iterator([" ".join(_vocabulary(words))], trainer)
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = letters + [letter + "</w>" for letter in letters] + ["".join(pair) for pair in merges]
    tokens = list(dict.fromkeys(tokens)) + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_TOKENS)


def t5_tokenizer(words: list[str]) -> T5TokenizerFast:
    """Unigram pieces: the words of the captions, and printable ASCII one by one for everything else."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("\u2581" + word, -2.0) for word in _vocabulary(words)]
    pieces += [("\u2581", -8.0)] + [(chr(code), -8.0) for code in range(33, 127)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=T5_TOKENS)


def _vocabulary(words: list[str]) -> list[str]:
    return sorted({word for caption in words for word in caption.split()})
