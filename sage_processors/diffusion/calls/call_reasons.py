"""Why an attention call of a denoiser must stay exact, as far as the call itself says: the two doors of diffusers ask.

Shapes, dtypes and flags alone decide (no device sync, one traced branch).
"""

from __future__ import annotations

from typing import Any

import torch

import sage_kernels
from sage_kernels.checks import MAX_HEAD_DIM
from sage_kernels.compat import function_modes
from sage_kernels.facts import crossover

from ...options import SageAttnProcessor
from .context_parallel import lengths_in_parallel


# modules of the function modes of torch.export
EXPORTING = ("torch.export.", "torch._export.", "torch.fx.experimental.proxy_tensor")
# what `call_reason` returns, and "short"
REASONS = (*sage_kernels.REASONS, "short", "block_mask", "function_mode", "softmax_scale", "mixed_mask")


def _foreign_function_mode() -> bool:
    """Whether a TorchFunctionMode is active that may want to see scaled_dot_product_attention (PAG, SEG, profilers).

    torch.set_default_device and torch.export are function modes too, but have no business with attention.
    """
    return any(not type(mode).__module__.startswith(EXPORTING) for mode in function_modes())


def is_short(
    config: SageAttnProcessor,
    query: torch.Tensor,
    key: torch.Tensor,
    tokens: int,
    heads: int,
    is_causal: bool,
    parallel: Any = None,
) -> bool:
    """Whether 16 bit is the faster one for a call. tokens, heads: which dimensions of query and key these are.

    parallel: where the tokens are spread over devices: judged is what each device then computes.

    Asked first: a call that would have been too short anyway should cost the host next to nothing.
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
    """Whether PyTorch will ask for the gradient of one of them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def training_reason(query: Any, key: Any, value: Any, attn_mask: Any, *others: Any) -> str | None:
    """As `call_reason`, where gradients are welcome: one of its reasons, "no_backward", or None."""
    with torch.no_grad():
        reason = call_reason(query, key, value, attn_mask, *others)
    if reason is None and attn_mask is not None and needs_gradient(attn_mask):
        return "requires_grad"
    if reason is None and needs_gradient(query, key, value):
        return None if sage_kernels.has_fused_backward(query, attn_mask) else "no_backward"
    return reason


def call_reason(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any,
    dropout_p: Any,
    is_causal: bool,
    scale: Any,
    enable_gqa: Any,
) -> str | None:
    """One of REASONS, or None: the op can do this call. query, key, value: [B, S, H, D]."""
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        return "block_mask"
    if _foreign_function_mode():
        return "function_mode"
    if scale is not None and (isinstance(scale, torch.Tensor) or scale < 0):
        return "softmax_scale"  # reading a tensor would sync
    return sage_kernels.unsupported(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
    )
