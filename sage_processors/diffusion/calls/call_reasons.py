"""Reasons why attention of a denoiser can't run in INT8: of a single call, and of a whole layer.

Swapped processors (processors.py) and the back end (backend.py) ask about calls. Shapes, dtypes and flags alone
decide. That needs no device sync, and torch.compile traces one branch.
"""

from __future__ import annotations

from typing import Any

import torch

import sage_kernels
from sage_kernels.checks import MAX_HEAD_DIM
from sage_kernels.compat import function_modes
from sage_kernels.facts import crossover

from ...options import SageAttnProcessor
from ...unsupported import REMEDIES
from ..host.discovery import discover_sites
from .context_parallel import lengths_in_parallel


# modules that define the function modes of torch.export
EXPORTING = ("torch.export.", "torch._export.", "torch.fx.experimental.proxy_tensor")
# results of `call_reason`, and "short"
REASONS = (*sage_kernels.REASONS, "short", "block_mask", "function_mode", "softmax_scale", "mixed_mask")


def _foreign_function_mode() -> bool:
    """True if an active TorchFunctionMode may act on attention.

    Those of perturbed-attention guidance (PAG, SEG) and of profilers do. The modes of torch.set_default_device and
    torch.export don't count: they leave attention alone.
    """
    return any(not type(mode).__module__.startswith(EXPORTING) for mode in function_modes())


def is_short(
    config: SageAttnProcessor, query: torch.Tensor, key: torch.Tensor, tokens: int, heads: int, is_causal: bool,
    parallel: Any = None,
) -> bool:  # fmt: skip
    """True if 16 bit is faster than INT8 for a call.

    Asked before all other reasons, because a short call should cost the host next to nothing.
    Args: tokens, heads: dimensions of query and key that hold these. parallel: diffusers' ParallelConfig if tokens are
        spread over devices; the tokens of all of them then count.
    """
    if query.dim() != 4 or key.dim() != 4 or query.shape[3] > MAX_HEAD_DIM:
        return False
    seq_q, seq_kv, head_count = query.shape[tokens], key.shape[tokens], query.shape[heads]
    if parallel is not None:
        seq_q, seq_kv, head_count = lengths_in_parallel(query, key, parallel)
    return crossover.is_short(
        query.device, batch=query.shape[0], heads=head_count, seq_q=seq_q, seq_kv=seq_kv, head_dim=query.shape[3],
        causal=is_causal, recipe=config.recipe, min_tokens=config.min_tokens,
    )  # fmt: skip


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """True if PyTorch will compute a gradient for one of the tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def training_reason(query: Any, key: Any, value: Any, attn_mask: Any, *others: Any) -> str | None:
    """Return the reason to run a call of training in 16 bit: as `call_reason`, or "no_backward"; or None.

    Gradients of query, key and value are no reason. A mask that needs one is.
    """
    with torch.no_grad():
        reason = call_reason(query, key, value, attn_mask, *others)
    if reason is None and attn_mask is not None and needs_gradient(attn_mask):
        return "requires_grad"
    if reason is None and needs_gradient(query, key, value):
        return None if sage_kernels.has_fused_backward(query, attn_mask) else "no_backward"
    return reason


def call_reason(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, dropout_p: Any, is_causal: bool,
    scale: Any, enable_gqa: Any,
) -> str | None:  # fmt: skip
    """Return one of REASONS, or None if the INT8 op can run the call. query, key, value: [B, S, H, D]."""
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        return "block_mask"
    if _foreign_function_mode():
        return "function_mode"
    if scale is not None and (isinstance(scale, torch.Tensor) or scale < 0):
        return "softmax_scale"  # reading the value of a tensor would sync
    return sage_kernels.unsupported(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
    )


def layer_reason(layer: Any) -> str:
    """Return why no call of a layer can run in INT8, in words; "" if nothing speaks against it.

    Only facts that are known before the first call count. Args: layer: a denoiser's `Layer`.
    """
    if layer.module.training and layer.own.config.training != "int8":
        return REMEDIES["training"]
    if layer.own.kept:
        return "kept in 16 bit by the options"
    weight = next((p for p in layer.module.parameters() if p.is_floating_point()), None)
    if weight is not None and weight.dtype == torch.float64:
        return f"{weight.dtype}: cast the model to float16, bfloat16 or float32"
    if weight is not None and weight.device.type not in ("cpu", "cuda", "meta"):
        return f"no kernel for the device {weight.device.type}"
    shapes = [shape for shape in discover_sites(layer.module, layer.sage) if shape]
    if shapes and all(head_dim > MAX_HEAD_DIM for _, head_dim in shapes):
        return f"head_dim {shapes[0][1]}, at most {MAX_HEAD_DIM} is possible"
    return ""
