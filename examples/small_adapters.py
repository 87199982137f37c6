"""tiny_sd with what users add to it, as random weights: an IP-Adapter, a LoRA, a ControlNet.

Each returns what `CommandLine.loading` takes: an object with save_pretrained, and call arguments.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import diffusers
import peft
import torch
import transformers
from safetensors.torch import save_file

import sage_processors as sp


IMAGE_WIDTH = 24  # channels of a picture's embedding


@dataclass
class WithFiles:
    """A pipeline and the files of its adapters, saved into one folder: {path: tensors}."""

    pipe: diffusers.DiffusionPipeline
    files: dict[str, dict[str, torch.Tensor]]
    image_encoder: transformers.PreTrainedModel

    def save_pretrained(self, folder: str) -> None:
        self.pipe.save_pretrained(folder)
        for name, tensors in self.files.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            save_file(tensors, path)
        self.image_encoder.save_pretrained(Path(folder) / "models" / "image_encoder")


def _ip_adapter(unet) -> dict[str, torch.Tensor]:
    """For each cross-attention a key and a value projection of 4 tokens that a projection makes of a picture."""
    width = unet.config.cross_attention_dim
    tensors = {
        "image_proj.proj.weight": torch.randn(4 * width, IMAGE_WIDTH) * 0.2,
        "image_proj.proj.bias": torch.zeros(4 * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    crossing = [name.removesuffix(".processor") for name in unet.attn_processors if name.endswith("attn2.processor")]
    for i, name in enumerate(crossing):
        channels = unet.get_submodule(name).to_q.out_features
        tensors |= {f"ip_adapter.{2 * i + 1}.to_{x}_ip.weight": torch.randn(channels, width) * 0.02 for x in "kv"}
    return tensors


def _lora(unet) -> dict[str, torch.Tensor]:
    """Rank 4 for queries and values, scaled so that it shows."""
    twin = copy.deepcopy(unet)  # whose layers stay wrapped
    twin.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    found = peft.get_peft_model_state_dict(twin)
    return {f"unet.{name}": 0.05 * x for name, x in found.items()}


def sd15():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(sp.pipelines.path("tiny_sd"))
        config = transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32,
            patch_size=8, projection_dim=IMAGE_WIDTH,
        )  # fmt: skip
        encoder = transformers.CLIPVisionModelWithProjection(config)
        size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        pipe.register_modules(feature_extractor=transformers.CLIPImageProcessor(**size))
        files = {
            "models/ip-adapter_sd15.safetensors": _ip_adapter(pipe.unet),
            "pytorch_lora_weights.safetensors": _lora(pipe.unet),
        }
    return WithFiles(pipe, files, encoder), {}


def sd15_controlnet():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = diffusers.StableDiffusionPipeline.from_pretrained(sp.pipelines.path("tiny_sd")).components
        sizes = {"conditioning_embedding_out_channels": (16, 32, 96), "load_weights_from_unet": False}
        extra = diffusers.ControlNetModel.from_unet(parts["unet"], **sizes).eval()
        for block in (*extra.controlnet_down_blocks, extra.controlnet_mid_block):
            torch.nn.init.normal_(block.weight, std=0.02)  # zeros, until it is trained: nothing would be seen of it
    pipe = diffusers.StableDiffusionControlNetPipeline(**parts, controlnet=extra, requires_safety_checker=False)
    return pipe, {}
