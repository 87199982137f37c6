"""Bytes of a model's weights with and without the 16-bit ones, computed from shapes: of FLUX, which is on no disk."""

from __future__ import annotations

import pytest
import torch

import sage_processors as sp


# of black-forest-labs/FLUX.1-dev
FLUX = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
}  # fmt: skip
IN_16_BIT = ("*norm*.linear", "time_text_embed.*")  # its layers of one row a sample


def computed(model, swap) -> tuple[int, int, dict[str, int]]:
    """Bytes of all parameters and buffers as they were, and with swapped layers in 8 bit alone; weights by format."""
    own = [x for name, x in model.named_buffers() if "_sage_" not in name]
    before = sum(x.nbytes for x in (*model.parameters(), *own))
    after, elements = before, {}
    for choice in swap.choices:
        weight = choice.module._parameters["weight"]
        elements[choice.format] = elements.get(choice.format, 0) + weight.numel()
        if choice.format != "none":  # codes, and a scale an output channel
            after += weight.numel() + 4 * weight.shape[0] - weight.nbytes
    return before, after, elements


def flux_on_meta(**options):
    """FLUX.1-dev in bf16 without numbers, and its swap."""
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(**FLUX).to(torch.bfloat16).eval().requires_grad_(False)
    assert all(x.is_meta for x in model.parameters())
    return model, sp.quantize_linears(model, "int8", **options)
