"""Small pipelines for the examples of pictures, each of diffusers' own classes, which run offline in seconds.

`sd15` and `flux` are the trained ones that come with the project and draw coloured shapes. The others have random
weights, always the same ones: they draw noise, by the same path as a checkpoint, from the prompt to the picture.
Each returns what `CommandLine.loading` takes: a folder or a pipeline, and call arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import diffusers
import torch
import transformers

import sage_processors as sp


PIXELS = {"height": 128, "width": 128}


def always_the_same(make: Callable) -> Callable:
    """Random weights of a fixed seed, in eval mode, as loaded ones are; the caller's random state is left alone."""

    @functools.wraps(make)
    def made():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            source, arguments = make()
        models = [source] if isinstance(source, torch.nn.Module) else source.components.values()
        for model in models:
            if isinstance(model, torch.nn.Module):
                model.eval()
        return source, arguments

    return made


def _tiny_sd() -> dict:
    return diffusers.DiffusionPipeline.from_pretrained(sp.pipelines.path("tiny_sd")).components


def clip(tokenizer, kind=transformers.CLIPTextModelWithProjection, width: int = 32):
    """A text encoder of CLIP's kind."""
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length, projection_dim=32, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return kind(config)


def t5(kind=transformers.T5EncoderModel, width: int = 64):
    """(tokenizer, encoder) of T5's kind."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(sp.pipelines.path("tiny_flux") / "tokenizer_2")
    config = kind.config_class(
        vocab_size=len(tokenizer), d_model=width, d_kv=16, d_ff=32, num_layers=1, num_heads=2, is_encoder_decoder=False
    )
    return tokenizer, kind(config)


def words():
    """A tokenizer with a byte-level vocabulary, in the place of a language model's."""
    return transformers.AutoTokenizer.from_pretrained(sp.pipelines.folder("tiny_lm"))


def sd15():
    return sp.pipelines.path("tiny_sd"), {}


def flux():
    longest = {"max_sequence_length": 32}
    return sp.pipelines.path("tiny_flux"), PIXELS | longest | sp.pipelines.call_arguments("tiny_flux")


def flux_kontext():
    """The weights of tiny_flux, which has never seen an image to change: it draws, but doesn't change it sensibly."""
    source, arguments = flux()
    return source, arguments | {"max_area": 128 * 128, "_auto_resize": False}


@always_the_same
def sdxl():
    parts = _tiny_sd()
    tokenizer = parts["tokenizer"]
    unet = diffusers.UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64), norm_num_groups=8, layers_per_block=1, attention_head_dim=(2, 4),
        cross_attention_dim=64, transformer_layers_per_block=1, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + 32,
        down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2,
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        vae=parts["vae"], text_encoder=clip(tokenizer, transformers.CLIPTextModel), text_encoder_2=clip(tokenizer),
        tokenizer=tokenizer, tokenizer_2=tokenizer, unet=unet, scheduler=diffusers.EulerDiscreteScheduler(),
    ), dict(PIXELS)  # fmt: skip


@always_the_same
def sd3():
    parts = _tiny_sd()
    tokenizer, (tokenizer_3, encoder_3) = parts["tokenizer"], t5()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=64, caption_projection_dim=64, pooled_projection_dim=64,
        pos_embed_max_size=32,
    )  # fmt: skip
    vae = parts["vae"]
    vae.register_to_config(shift_factor=0.0)
    return diffusers.StableDiffusion3Pipeline(
        vae=vae, text_encoder=clip(tokenizer), text_encoder_2=clip(tokenizer), text_encoder_3=encoder_3,
        tokenizer=tokenizer, tokenizer_2=tokenizer, tokenizer_3=tokenizer_3, transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    ), PIXELS | {"max_sequence_length": 32}  # fmt: skip


@always_the_same
def qwen_image():
    tokenizer = words()
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=eyes)
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=64, out_channels=16, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=64, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae, text_encoder=encoder,
        tokenizer=tokenizer, transformer=transformer,
    ), {"height": 256, "width": 256, "max_sequence_length": 64}  # fmt: skip
