"""Why none of a layer's calls can run in INT8, as far as that is known before any of them."""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels.checks import MAX_HEAD_DIM

from ...unsupported import REMEDIES
from ..host.discovery import discover_sites


def reason_against(layer: Any) -> str:
    """A sentence for messages; "" where nothing is known against the layer. layer: a denoiser's `Layer`."""
    if layer.module.training and layer.sage._sage_config.training != "int8":
        return REMEDIES["training"]
    if layer.sage._sage_kept:
        return "kept in 16 bit by the options"
    weight = next((p for p in layer.module.parameters() if p.is_floating_point()), None)
    if weight is not None and weight.dtype == torch.float64:
        return f"{weight.dtype}: cast the model to float16, bfloat16 or float32"
    if weight is not None and weight.device.type not in ("cpu", "cuda", "meta"):
        return f"no kernel for the device {weight.device.type}"
    shapes = [shape for shape in discover_sites(layer.module, layer.sage) if shape]
    if shapes and all(head_dim > MAX_HEAD_DIM for _, head_dim in shapes):
        return f"heads of {shapes[0][1]} channels, at most {MAX_HEAD_DIM} are possible"
    return ""
