"""Whole pictures and clips: text encoders, denoiser, scheduler and VAE at published shapes, with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from model_cases import CASES, ModelCase, make_model
from published_models import SUITE, WAN_14B


@dataclass(frozen=True)
class Drawing:
    """One pipeline that draws one picture or clip a call.

    Attributes:
        denoiser: the case whose model denoises.
        pipeline: name of the class of diffusers. part: its argument for the denoiser.
        scheduler: (class, options). vae: (class, options, dtype).
        texts: {name: (module, class, options, class of the config, tokens)} of text encoders.
        encoded: function of ({name: output of an encoder}) that returns the pipeline's arguments for the prompt.
        given: other arguments of the pipeline's call, which has `steps` denoising steps.
        tiny_texts (by encoder), tiny_vae, tiny_given: what differs in a pipeline that a CPU runs in a moment.
    """

    denoiser: ModelCase
    pipeline: str
    scheduler: tuple
    vae: tuple
    texts: dict
    encoded: Callable[[dict], dict]
    steps: int
    given: dict
    suite: str = "picture"
    part: str = "transformer"
    tiny_texts: dict = field(default_factory=dict)
    tiny_vae: dict = field(default_factory=dict)
    tiny_given: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.denoiser.name

    def tiny(self) -> Drawing:
        """Return a drawing of the same classes so small that a CPU makes it in a moment."""
        case, (kind, options, dtype) = self.denoiser.tiny(), self.vae
        texts = {
            name: (cls, config | self.tiny_texts[name], of, min(tokens, case.sizes["text"]))
            for name, (cls, config, of, tokens) in self.texts.items()
        }
        return dataclasses.replace(
            self, denoiser=case, vae=(kind, options | self.tiny_vae, dtype), texts=texts, steps=3,
            given=self.given | self.tiny_given,
        )  # fmt: skip


class Painter:
    """A drawing's pipeline on a device."""

    def __init__(self, drawing: Drawing, device: torch.device):
        import diffusers
        import transformers

        def made(build: Callable[[], Any], dtype=torch.bfloat16):
            return make_model(SimpleNamespace(build=build), device, dtype)

        self.drawing, self.device = drawing, device
        self.texts = {
            name: made(partial(getattr(transformers, cls), getattr(transformers, of)(**config)))
            for name, (cls, config, of, _) in drawing.texts.items()
        }
        kind, options, dtype = drawing.vae
        vae = made(partial(getattr(diffusers, kind), **options), dtype)
        self.denoiser = make_model(drawing.denoiser, device, torch.bfloat16)
        cls, options = drawing.scheduler
        empty = {name: None for name in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")}
        kinds = getattr(diffusers, drawing.pipeline)
        known = kinds._get_signature_keys(kinds)[0]
        parts = {name: value for name, value in empty.items() if name in known}
        self.pipe = kinds(
            vae=vae, scheduler=getattr(diffusers, cls)(**options), **{drawing.part: self.denoiser}, **parts
        )
        self.pipe.set_progress_bar_config(disable=True)

    def arguments(self) -> dict:
        """Run the text encoders over the ids of one prompt, and return what the pipeline makes of them."""
        outs = {}
        for name, (_, config, _, tokens) in self.drawing.texts.items():
            ids = torch.arange(1, tokens + 1, device=self.device)[None] * 7 % (config["vocab_size"] - 1)
            outs[name] = self.texts[name](ids, output_hidden_states=True)
        return self.drawing.encoded(outs)

    def draw(self, steps: int, output_type: str = "pil", on_step: Callable[[], object] | None = None):
        """Draw from a prompt's ids to pixels, as `output_type` says, or to latents.

        on_step(): called in front of the first step and after each.
        """
        arguments = self.arguments()
        if on_step is not None:
            on_step()
        generator = torch.Generator(self.device).manual_seed(0)
        told = {} if on_step is None else {"callback_on_step_end": lambda *_: on_step() or {}}
        return self.pipe(
            **arguments, **self.drawing.given, num_inference_steps=steps, generator=generator,
            output_type=output_type, return_dict=False, **told,
        )[0]  # fmt: skip


def _two(positive: dict) -> dict:
    """Add a negative prompt of the same length to a prompt's arguments."""
    return positive | {f"negative_{name}": value.clone() for name, value in positive.items()}


def _flux(outs):
    return {"prompt_embeds": outs["t5"].last_hidden_state, "pooled_prompt_embeds": outs["clip"].pooler_output}


def _sdxl(outs):
    both = [outs[name].hidden_states[-2] for name in ("clip", "clip_g")]
    return _two({"prompt_embeds": torch.cat(both, -1), "pooled_prompt_embeds": outs["clip_g"].text_embeds})


def _wan(outs):
    return _two({"prompt_embeds": outs["t5"].last_hidden_state})


def _qwen(outs):
    embeds = outs["qwen"].last_hidden_state
    mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    return _two({"prompt_embeds": embeds, "prompt_embeds_mask": mask})


# Published configurations: text_encoder*/config.json and vae/config.json of the checkpoints that model_cases.py and
# published_models.py name. Of Qwen-Image's text encoder only what a prompt runs, the language model.
_CLIP_L = {
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "max_position_embeddings": 77, "projection_dim": 768,
}  # fmt: skip
_CLIP_G = _CLIP_L | {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
_T5 = {
    "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_QWEN_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip
_KL = {
    "block_out_channels": (128, 256, 512, 512), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 2, "sample_size": 1024,
}  # fmt: skip
_FLUX_VAE = _KL | {
    "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159, "use_quant_conv": False,
    "use_post_quant_conv": False,
}  # fmt: skip
_FLOW = "FlowMatchEulerDiscreteScheduler"
_TINY_CLIP = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TINY_QWEN = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
_TINY_T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


def _flux_drawing(name: str, pixels: int) -> Drawing:
    return Drawing(
        CASES[name], "FluxPipeline", (_FLOW, {"use_dynamic_shifting": True}),
        ("AutoencoderKL", _FLUX_VAE, torch.bfloat16),
        {
            "clip": ("CLIPTextModel", _CLIP_L, "CLIPTextConfig", 77),
            "t5": ("T5EncoderModel", _T5, "T5Config", 512),
        },
        _flux, 28, {"height": pixels, "width": pixels, "guidance_scale": 3.5},
        tiny_texts={"clip": _TINY_CLIP, "t5": _TINY_T5},
        tiny_vae={"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1},
        tiny_given={"height": 128, "width": 128},
    )  # fmt: skip


def _wan_drawing(case: ModelCase) -> Drawing:
    return Drawing(
        case, "WanPipeline", (_FLOW, {"shift": 3.0}), ("AutoencoderKLWan", {}, torch.float32),
        {"t5": ("UMT5EncoderModel", _T5 | {"vocab_size": 256384}, "UMT5Config", 512)},
        _wan, 50, {"height": 480, "width": 832, "num_frames": 81, "guidance_scale": 5.0}, suite="clip",
        tiny_texts={"t5": _TINY_T5}, tiny_vae={"base_dim": 4, "num_res_blocks": 1},
        tiny_given={"height": 64, "width": 64, "num_frames": 5},
    )  # fmt: skip


def _whole(case: ModelCase, layers: int) -> ModelCase:
    """Return a case of published_models.py with all its blocks."""
    return dataclasses.replace(case, config=case.config | {"num_layers": layers})


DRAWINGS = {
    drawing.name: drawing
    for drawing in (
        _flux_drawing("flux_1024", 1024),
        _flux_drawing("flux_2048", 2048),
        Drawing(
            CASES["sdxl_1024"], "StableDiffusionXLPipeline",
            ("EulerDiscreteScheduler", {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}),
            ("AutoencoderKL", _KL | {"latent_channels": 4, "scaling_factor": 0.13025}, torch.bfloat16),
            {
                "clip": ("CLIPTextModel", _CLIP_L, "CLIPTextConfig", 77),
                "clip_g": ("CLIPTextModelWithProjection", _CLIP_G, "CLIPTextConfig", 77),
            },
            _sdxl, 30, {"height": 1024, "width": 1024, "guidance_scale": 5.0}, part="unet",
            tiny_texts=dict.fromkeys(("clip", "clip_g"), _TINY_CLIP | {"projection_dim": 16}),
            tiny_vae={"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1},
            tiny_given={"height": 64, "width": 64},
        ),
        Drawing(
            _whole(SUITE["qwen_image_1328"], 60), "QwenImagePipeline", (_FLOW, {"use_dynamic_shifting": True}),
            ("AutoencoderKLQwenImage", {"z_dim": 16}, torch.bfloat16),
            {"qwen": ("Qwen2Model", _QWEN_7B, "Qwen2Config", 256)},
            _qwen, 50, {"height": 1328, "width": 1328, "true_cfg_scale": 4.0},
            tiny_texts={"qwen": _TINY_QWEN},
            tiny_vae={"base_dim": 4, "num_res_blocks": 1}, tiny_given={"height": 64, "width": 64},
        ),
        _wan_drawing(CASES["wan21_1_3b_480p81"]),
        _wan_drawing(dataclasses.replace(_whole(SUITE["wan_14b_480p81"], 40), config=WAN_14B | {"num_layers": 40})),
    )
}  # fmt: skip
