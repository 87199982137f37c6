"""Small video pipelines of diffusers with random weights. They run offline in seconds and draw noise.

They have no text encoder. `random_video(family)` returns a pipeline and its call arguments: random prompt embeddings
and a small size, with 128 tokens or more in the attention over the video.
"""

from __future__ import annotations

import torch


TEXT_TOKENS, TEXT_WIDTH = 16, 32
_BLOCK = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2}


def _text(*shape: int) -> torch.Tensor:
    return torch.randn(1, *(shape or (TEXT_TOKENS, TEXT_WIDTH)), dtype=torch.float32, device="cpu")


def _wan():
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        transformer=WanTransformer3DModel(
            text_dim=TEXT_WIDTH, freq_dim=32, ffn_dim=128, rope_max_seq_len=32, **_BLOCK
        ),
    ), {"height": 128, "width": 128, "num_frames": 9, "prompt_embeds": _text(), "negative_prompt_embeds": _text()}


def _cogvideox():
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    transformer = CogVideoXTransformer3DModel(
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=TEXT_WIDTH,
        max_text_seq_length=TEXT_TOKENS,
        sample_width=16,
        sample_height=16,
        sample_frames=9,
        **_BLOCK,
    )
    return CogVideoXPipeline(
        tokenizer=None,
        text_encoder=None,
        scheduler=CogVideoXDDIMScheduler(),
        vae=AutoencoderKLCogVideoX(
            block_out_channels=(8,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2
        ),
        transformer=transformer,
    ), {"height": 128, "width": 128, "num_frames": 9, "prompt_embeds": _text(), "negative_prompt_embeds": _text()}


def _ltx():
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    transformer = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, cross_attention_dim=64, caption_channels=TEXT_WIDTH, **_BLOCK
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05)
    mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool, device="cpu")
    text = {"prompt_embeds": _text(), "negative_prompt_embeds": _text()}
    masks = {"prompt_attention_mask": mask, "negative_prompt_attention_mask": mask}
    pipe = LTXPipeline(tokenizer=None, text_encoder=None, scheduler=scheduler, vae=vae, transformer=transformer)
    return pipe, {"height": 256, "width": 256, "num_frames": 9, **text, **masks}


def _hunyuan_video():
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )

    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=TEXT_WIDTH,
        pooled_projection_dim=16,
        rope_axes_dim=(8, 12, 12),
        **_BLOCK,
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
    )
    pipe = HunyuanVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        tokenizer_2=None,
        text_encoder_2=None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=vae,
        transformer=transformer,
    )
    mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool, device="cpu")
    text = {"prompt_embeds": _text(), "pooled_prompt_embeds": _text(16), "prompt_attention_mask": mask}
    return pipe, {"height": 128, "width": 128, "num_frames": 9, **text}


FAMILIES = {"wan": _wan, "cogvideox": _cogvideox, "ltx": _ltx, "hunyuan_video": _hunyuan_video}


def random_video(family: str, *, device: str | torch.device = "cpu"):
    """Return a small pipeline of a video family with random weights, and its call arguments.

    Weights and embeddings are fp32 and always the same. The caller's random state does not change.

    Args:
        family: a key of FAMILIES.
        device: device of the models and the prompt embeddings.
    Returns: the DiffusionPipeline; a dict of call arguments without steps, generator and output type.
    Raises: ValueError for another family.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: got {family!r}, expected one of {sorted(FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, arguments = FAMILIES[family]()
    for model in pipe.components.values():
        if isinstance(model, torch.nn.Module):
            model.eval()  # as from_pretrained does; in training mode attention runs without INT8
    arguments = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    return pipe.to(device), arguments
