"""Small pipelines for the examples of videos, each of diffusers' own classes, which run offline in seconds.

`trained` is tiny_wan, which draws moving shapes, where its weights are there. The others have random weights and draw
noise: those of small_random_videos.py with small text encoders, so that prompts are read, too. Each
returns what `CommandLine.loading` takes.
"""

from __future__ import annotations

import sys

import diffusers
import transformers
from small_pictures import always_the_same, clip, t5, words
from small_random_videos import TEXT_TOKENS, TEXT_WIDTH, random_video

import sage_processors as sp


def _prompted(family: str, **more):
    """The random pipeline of a family, with parts that read prompts instead of embeddings of them."""
    pipe, arguments = random_video(family)
    kind = transformers.UMT5EncoderModel if family == "wan" else transformers.T5EncoderModel
    if not more:
        more["tokenizer"], more["text_encoder"] = t5(kind, TEXT_WIDTH)
    pipe.register_modules(**more)
    return pipe, {name: arguments[name] for name in ("height", "width", "num_frames")}


@always_the_same
def cogvideox():
    pipe, arguments = _prompted("cogvideox")
    return pipe, arguments | {"max_sequence_length": TEXT_TOKENS}


@always_the_same
def ltx_video():
    pipe, arguments = _prompted("ltx")
    return pipe, arguments | {"max_sequence_length": 32}


@always_the_same
def hunyuan_video():
    tokenizer, short = words(), transformers.AutoTokenizer.from_pretrained(sp.pipelines.path("tiny_sd") / "tokenizer")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=TEXT_WIDTH, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return _prompted(
        "hunyuan_video", tokenizer=tokenizer, text_encoder=transformers.LlamaModel(config), tokenizer_2=short,
        text_encoder_2=clip(short, transformers.CLIPTextModel, width=16),
    )  # fmt: skip


TRAINED = "tiny_wan"
BOUNDARY = 0.875  # of the noise levels, between the two experts


def _has_weights() -> bool:
    """Whether there is a trained pipeline; if not, says so."""
    if TRAINED in sp.pipelines.video_names():
        return True
    print(
        f"{TRAINED} has no weights here (examples/train_tiny_wan.py trains it): random ones, which draw noise",
        file=sys.stderr,
    )
    return False


def trained():
    """tiny_wan, one denoiser; or `wan_one_expert`."""
    if _has_weights():
        return sp.pipelines.path(TRAINED), sp.pipelines.call_arguments(TRAINED)
    return wan_one_expert()


def wan_two_experts():
    """tiny_wan as both experts of Wan 2.2 A14B; or `wan`."""
    if not _has_weights():
        return wan()
    pipe = diffusers.WanPipeline.from_pretrained(sp.pipelines.path(TRAINED))
    second = diffusers.WanTransformer3DModel.from_pretrained(sp.pipelines.path(TRAINED) / "transformer")
    parts = pipe.components | {"transformer_2": second}
    return diffusers.WanPipeline(**parts, boundary_ratio=BOUNDARY), sp.pipelines.call_arguments(TRAINED)


@always_the_same
def wan():
    """Two experts, as Wan 2.2 A14B: the second one draws below 0.875 of the noise."""
    pipe, arguments = _prompted("wan")
    second = diffusers.WanTransformer3DModel.from_config(pipe.transformer.config)
    parts = pipe.components | {"transformer_2": second}
    return diffusers.WanPipeline(**parts, boundary_ratio=BOUNDARY), arguments | {"max_sequence_length": TEXT_TOKENS}


@always_the_same
def wan_one_expert():
    """One denoiser, as Wan 2.1; 384 tokens, of which half is still long enough for INT8."""
    pipe, arguments = _prompted("wan")
    return pipe, arguments | {"height": 256, "max_sequence_length": TEXT_TOKENS}


@always_the_same
def wan_image():
    """Two experts, which get the first picture as channels beside the noise."""
    pipe, arguments = _prompted("wan")
    config = {name: x for name, x in pipe.transformer.config.items() if not name.startswith("_")}
    experts = [diffusers.WanTransformer3DModel(**config | {"in_channels": 16 + 4 + 16}) for _ in range(2)]
    parts = pipe.components | dict(zip(("transformer", "transformer_2"), experts, strict=True))
    pipe = diffusers.WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None, boundary_ratio=0.9)
    return pipe, arguments | {"max_sequence_length": TEXT_TOKENS}
