"""Tiny pipelines of diffusers with random weights. Each function returns (pipeline, function that draws with it)."""

from __future__ import annotations

import diffusers
import torch

from tests.support.placing import placed
from tests.support.tiny_models import MODELS


ABSENT = {"text_encoder": None, "tokenizer": None}
OF_SD = ABSENT | {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


def _with_drawing(pipe, usual_steps, **usual):
    """(pipe, draw), in which draw(steps, seed, **more) returns latents; usual and more: arguments of the call."""
    placed(list(pipe.components.values()))
    pipe.set_progress_bar_config(disable=True)

    def draw(steps=usual_steps, seed=0, **more):
        given = {"height": 16, "width": 16, "output_type": "latent"} | usual | more
        given = {n: x.to(pipe._execution_device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        return pipe(**given, num_inference_steps=steps, generator=torch.Generator().manual_seed(seed)).images

    return pipe, draw


def tiny_vae(channels=4):
    torch.manual_seed(0)
    blocks = {
        "block_out_channels": (8, 8), "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }  # fmt: skip
    return diffusers.AutoencoderKL(**blocks, norm_num_groups=4, latent_channels=channels, sample_size=8).eval()


def ddpm_pipe():
    pipe = diffusers.DDPMPipeline(MODELS["unet_unconditional"]()[0], diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe, lambda steps=4, seed=0: torch.as_tensor(
        pipe(num_inference_steps=steps, generator=torch.Generator().manual_seed(seed), output_type="np").images
    )


def flux_pipe():
    torch.manual_seed(0)
    model, inputs = MODELS["flux"]()
    model = diffusers.FluxTransformer2DModel.from_config(dict(model.config) | {"in_channels": 16}).eval()
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=tiny_vae(), transformer=model,
        text_encoder_2=None, tokenizer_2=None, **ABSENT,
    )  # fmt: skip
    words = {"prompt_embeds": inputs["encoder_hidden_states"], "pooled_prompt_embeds": inputs["pooled_projections"]}
    return _with_drawing(pipe, 4, **words)


def _words():
    torch.manual_seed(0)
    embeds = torch.randn(2, 7, 32)
    return {"prompt_embeds": embeds[:1], "negative_prompt_embeds": embeds[1:]}


def sd_pipe(kind=diffusers.StableDiffusionPipeline, **options):
    scheduler = diffusers.EulerDiscreteScheduler(steps_offset=1)
    pipe = kind(vae=tiny_vae(), unet=MODELS["unet_sd15"]()[0], scheduler=scheduler, **OF_SD, **options)
    return _with_drawing(pipe, 3, **_words())


def sd_controlnet_pipe():
    pipe = diffusers.StableDiffusionControlNetPipeline(
        vae=tiny_vae(), unet=MODELS["unet_sd15"]()[0], controlnet=MODELS["controlnet"]()[0],
        scheduler=diffusers.EulerDiscreteScheduler(), **OF_SD,
    )  # fmt: skip
    return _with_drawing(pipe, 3, **_words(), image=torch.rand(1, 3, 16, 16))


PIPES = {"ddpm": ddpm_pipe, "flux": flux_pipe, "sd_controlnet": sd_controlnet_pipe}
