"""Small offline models in the place of the checkpoints that the documentation names, so that its code runs as it is.

`stand_in(monkeypatch)` replaces `from_pretrained` of the classes that the pages use, has "cuda" mean the CPU, and
makes calls small: fewer steps, frames and pixels. What a page does with them is untouched.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

import sage_processors as sp
from sage_processors.evaluation import language
from tests.support.repository import ROOT


sys.path.insert(0, str(ROOT / "examples"))

from small_random_videos import random_video


SMALL = {"height": 128, "width": 128, "num_frames": 9, "max_sequence_length": 32}


@functools.cache
def _loaded(name: str) -> dict:
    return DiffusionPipeline.from_pretrained(sp.pipelines.path(name)).components


def _embedded(name: str) -> dict:
    """The components of an embedded pipeline: copies, since a block may swap, compile or train them."""
    return copy.deepcopy(_loaded(name))


def flux(*_, **__):
    return diffusers.FluxPipeline(**_embedded("tiny_flux"))


def sd_controlnet(*_, controlnet, **__):
    parts = _embedded("tiny_sd") | {"controlnet": controlnet}
    return diffusers.StableDiffusionControlNetPipeline(**parts, requires_safety_checker=False)


def controlnet(*_, **__):
    unet = _embedded("tiny_sd")["unet"]
    sizes = {"conditioning_embedding_out_channels": (16, 32, 96), "load_weights_from_unet": False}
    return diffusers.ControlNetModel.from_unet(unet, **sizes).eval()


def sdxl(*_, **__):
    small = _embedded("tiny_sd")
    encoder = small["text_encoder"]
    width = encoder.config.hidden_size
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(**encoder.config.to_dict() | {"projection_dim": 64})
    unet = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        layers_per_block=1,
        attention_head_dim=(2, 4),
        cross_attention_dim=2 * width,
        transformer_layers_per_block=1,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 64,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )
    second = transformers.CLIPTextModelWithProjection(config)
    return diffusers.StableDiffusionXLPipeline(
        vae=small["vae"],
        text_encoder=encoder,
        text_encoder_2=second.eval(),
        tokenizer=small["tokenizer"],
        tokenizer_2=small["tokenizer"],
        unet=unet.eval(),
        scheduler=diffusers.EulerDiscreteScheduler(),
        force_zeros_for_empty_prompt=True,
    )


def wan(*_, **__):
    pipe, _ = random_video("wan")
    tokenizer = _embedded("tiny_flux")["tokenizer_2"]
    config = transformers.UMT5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2
    )
    pipe.register_modules(tokenizer=tokenizer, text_encoder=transformers.UMT5EncoderModel(config).eval())
    return pipe


def wan_vae(*_, **__):
    return random_video("wan")[0].vae


def modular(*_, **__):
    from diffusers.modular_pipelines.flux import FluxAutoBlocks

    pipe = FluxAutoBlocks().init_pipeline()
    pipe.update_components(**{k: x for k, x in _embedded("tiny_flux").items() if k in pipe.components and x})
    return pipe


@functools.cache
def _language_model():
    return language.load()


def causal(*_, attn_implementation=None, **__):
    model, _ = _language_model()
    model.set_attn_implementation(attn_implementation or "sdpa")
    return model


def seq2seq(*_, attn_implementation=None, **__):
    tokenizer = _language_model()[1]
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    if attn_implementation:
        model.set_attn_implementation(attn_implementation)
    return model


def tokenizer(*_, **__):
    return _language_model()[1]


STAND_INS = {
    diffusers.FluxPipeline: flux,
    diffusers.StableDiffusionXLPipeline: sdxl,
    diffusers.StableDiffusionControlNetPipeline: sd_controlnet,
    diffusers.ControlNetModel: controlnet,
    diffusers.WanPipeline: wan,
    diffusers.AutoencoderKLWan: wan_vae,
    diffusers.ModularPipeline: modular,
    transformers.AutoModelForCausalLM: causal,
    transformers.AutoModelForSeq2SeqLM: seq2seq,
    transformers.AutoTokenizer: tokenizer,
}


def _steps(given: int | None) -> int:
    """2 to 4 in the place of some dozens."""
    return 2 if given is None else max(2, min(given // 7, 4))


def _smaller(call):
    """A pipeline's `__call__` that draws small, whatever sizes it is given."""
    known = set(inspect.signature(call).parameters)
    if call is diffusers.ModularPipeline.__call__:  # whose blocks say what it takes
        known = set(SMALL) - {"num_frames"}

    @functools.wraps(call)
    def made(self, *args, **kwargs):
        kwargs |= {name: size for name, size in SMALL.items() if name in known}
        return call(self, *args, **kwargs | {"num_inference_steps": _steps(kwargs.get("num_inference_steps"))})

    return made


def _on_cpu(to):
    @functools.wraps(to)
    def moved(self, *args, **kwargs):
        args = ["cpu" if isinstance(x, str) and x.startswith("cuda") else x for x in args]
        return to(self, *args, **kwargs)

    return moved


def stand_in(monkeypatch) -> None:
    """Put the small models in place until the test ends."""
    _language_model()  # by the classes that are replaced
    for owner, made in STAND_INS.items():
        monkeypatch.setattr(owner, "from_pretrained", made)
    pipelines = [owner for owner in STAND_INS if owner.__name__.endswith("Pipeline")]
    for owner in pipelines:
        monkeypatch.setattr(owner, "__call__", _smaller(owner.__call__))
        monkeypatch.setattr(owner, "to", _on_cpu(owner.to))
    monkeypatch.setattr(diffusers.ModularPipeline, "load_components", lambda *_, **__: None)
    for owner in (torch.nn.Module, transformers.BatchEncoding, transformers.PreTrainedModel):
        monkeypatch.setattr(owner, "to", _on_cpu(owner.to))
    # the real one needs a video library
    monkeypatch.setattr("diffusers.utils.export_to_video", _saved_frames)
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, *a, **k: compiled(self, *a, **k | {"backend": "eager"})
    )


def _saved_frames(frames, path, fps=10):
    from diffusers.utils import export_to_gif
    from PIL import Image

    return export_to_gif([Image.fromarray((frame * 255).round().astype("uint8")) for frame in frames], f"{path}.gif")
