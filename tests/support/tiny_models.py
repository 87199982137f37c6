"""Tiny real diffusers models from config, of every attention family that the swap claims, with inputs for a forward.

`MODELS[name]()` returns (model, kwargs). Random weights, seeded; all-zero weights are filled, so that attention
reaches the output. Head dims are multiples of 8, a few tokens to a few hundred.
"""

from __future__ import annotations

import functools

import diffusers
import pytest
import torch
from packaging.version import Version

from tests.support.placing import placed


MODELS = {}
OLDEST = Version(diffusers.__version__) < Version("0.37")  # 0.36: the oldest that we claim; what it lacks is skipped


def rand(*shape):
    """N(0, 1) of this shape."""
    return torch.randn(shape)


def model(class_name):
    """Register a function that returns (config, inputs) as the tiny model of its name."""

    def register(fn):
        @functools.wraps(fn)
        def build():
            if not hasattr(diffusers, class_name):
                pytest.skip(f"diffusers {diffusers.__version__} has no {class_name}")
            torch.manual_seed(0)
            config, inputs = fn()
            made = getattr(diffusers, class_name)(**config).eval().requires_grad_(False)
            for parameter in made.parameters():
                if not parameter.any():
                    torch.nn.init.normal_(parameter, std=0.05)
            return placed((made, inputs))

        MODELS[fn.__name__] = build
        return fn

    return register


def t(value=500.0):
    """A timestep, [1]."""
    return torch.tensor([value])


# fmt: off
# Tables of numbers: one entry a line would make them four times as long.


_UNET = {
    "block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1, "in_channels": 4, "out_channels": 4,
    "sample_size": 8, "cross_attention_dim": 32, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


def _sd_inputs(size=8):
    return {"sample": rand(1, 4, size, size), "timestep": 10, "encoder_hidden_states": rand(1, 7, 32)}


@model("UNet2DConditionModel")
def unet_sd15():
    return _UNET | {"attention_head_dim": 2}, _sd_inputs()


@model("UNet2DConditionModel")
def unet_sdxl():
    config = _UNET | {
        "attention_head_dim": (2, 4), "transformer_layers_per_block": (1, 2), "use_linear_projection": True,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D",
            "UpBlock2D"),
    }
    added = {"text_embeds": rand(1, 32), "time_ids": torch.arange(6.0)[None]}
    return config, _sd_inputs() | {"added_cond_kwargs": added}


@model("UNet2DConditionModel")
def unet_simple_cross():
    config = _UNET | {
        "attention_head_dim": 8, "down_block_types": ("SimpleCrossAttnDownBlock2D",) * 2,
        "up_block_types": ("SimpleCrossAttnUpBlock2D",) * 2, "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    }
    return config, _sd_inputs()


@model("UNet2DModel")
def unet_unconditional():
    config = {
        "block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1, "in_channels": 3,
        "out_channels": 3, "sample_size": 16, "attention_head_dim": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return config, {"sample": rand(1, 3, 16, 16), "timestep": 10}


@model("ControlNetModel")
def controlnet():
    names = ("block_out_channels", "norm_num_groups", "layers_per_block", "in_channels", "cross_attention_dim",
        "down_block_types")
    config = {name: _UNET[name] for name in names} | {"attention_head_dim": 2,
        "conditioning_embedding_out_channels": (8, 16)}
    return config, _sd_inputs() | {"controlnet_cond": rand(1, 3, 16, 16), "return_dict": False}


@model("UNet3DConditionModel")
def unet_3d():
    config = _UNET | {
        "attention_head_dim": 8, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    }
    return config, {"sample": rand(1, 4, 3, 8, 8), "timestep": 10, "encoder_hidden_states": rand(1, 4, 32)}


@model("UNetMotionModel")
def unet_motion():
    config = _UNET | {
        "num_attention_heads": 2, "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "motion_num_attention_heads": 2,
    }
    return config, {"sample": rand(1, 4, 3, 8, 8), "timestep": 10, "encoder_hidden_states": rand(3, 4, 32)}


@model("UNetSpatioTemporalConditionModel")
def unet_svd():
    config = {
        "block_out_channels": (32, 64), "cross_attention_dim": 32, "num_attention_heads": (4, 8), "in_channels": 4,
        "out_channels": 4, "layers_per_block": 1, "sample_size": 8, "projection_class_embeddings_input_dim": 24,
        "addition_time_embed_dim": 8,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    }
    inputs = {"sample": rand(1, 2, 4, 8, 8), "timestep": t(10), "encoder_hidden_states": rand(1, 2, 32)}
    return config, inputs | {"added_time_ids": torch.tensor([[6.0, 127.0, 0.02]])}


@model("Kandinsky3UNet")
def kandinsky3():
    config = {
        "in_channels": 4, "time_embedding_dim": 8, "groups": 2, "attention_head_dim": 8, "layers_per_block": 2,
        "block_out_channels": (16, 16, 32, 32), "cross_attention_dim": 8, "encoder_hid_dim": 32,
    }
    inputs = {"sample": rand(1, 4, 16, 16), "timestep": 10, "encoder_hidden_states": rand(1, 7, 32)}
    return config, inputs | {"encoder_attention_mask": torch.ones(1, 7)}


from tests.support import tiny_image_models, tiny_video_models  # noqa: E402, F401 (they register their models)
