"""The op `differentiable_attention`: an INT8 forward with a backward in 16 bit."""

from __future__ import annotations

from typing import Any

import torch

from ..checks.attention import check_attention_inputs, check_masking, check_options
from ..checks.tensors import check_called_below, check_no_tangent
from ..facts.recipe import DEFAULT_RECIPE, RECIPES
from .attention import sage_attention
from .backward import attention_backward
from .dispatch import fake_out_lse, register, register_backward


def differentiable_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    causal: bool | str = False,
    recipe: str = DEFAULT_RECIPE,
    scaling: str = "per_token",
    scale: float | None = None,
    smooth_k: bool | None = None,
    rotation: str = "none",
) -> torch.Tensor:
    """`sage_attention` with gradients for q, k and v: forward in INT8, backward in 16 bit.

    The gradients are those of softmax attention at the output and the log-sum-exp of the INT8 forward: rounding counts
    as the identity. On N(0, 1) they are within 2 % (relative L2) of unquantised attention's. Source of the formula:
    FlashAttention-2 (arXiv:2307.08691). PyTorch's own backward kernels compute it where they can
    (`has_fused_backward`); elsewhere plain PyTorch does, slowly.

    Args: as of `sage_attention`. attn_mask gets no gradient: one that requires it is refused.
    Returns: out [B, S_q, H, D], contiguous, in q.dtype.
    Raises: TypeError, ValueError, NotImplementedError before any launch; NotImplementedError in the backward of a
        backward (torch.autograd.grad(create_graph=True), differentiated again).
    """
    check_options(recipe, scaling, scale, None, 0.0, None, rotation, smooth_k)
    smooth_k = not RECIPES[recipe].plain if smooth_k is None else smooth_k
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, torch.Tensor):
            check_no_tangent(name, x)
    with torch.no_grad():  # here q, k and v may require gradients, which the check refuses
        check_attention_inputs(q, k, v)
    check_masking(q, k, attn_mask, causal, None, None)
    causal = ("top_left" if causal else "") if isinstance(causal, bool) else causal
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    arguments = (q, k, v, attn_mask, scale, scaling, smooth_k, causal, recipe, rotation)
    out: torch.Tensor = torch.ops.sage_kernels.attention_training(*arguments)[0]
    return out


def _forward(*arguments: Any) -> Any:
    """Run the op's checked arguments."""
    check_called_below("attention_training")
    q, k, v, attn_mask, scale, scaling, smooth_k, causal, recipe, rotation = arguments
    with torch.no_grad():
        return sage_attention(
            q, k, v, attn_mask=attn_mask, causal=causal or False, recipe=recipe, scaling=scaling, scale=scale,
            smooth_k=smooth_k, rotation=rotation, return_lse=True,
        )  # fmt: skip


def _backward(*arguments: Any) -> Any:
    """Run the op of the backward."""
    grad_out, q, k, v, attn_mask, out, lse, scale, causal = arguments
    # a backward may run under the autocast of its caller, which would cast the formula's matmuls
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return attention_backward(grad_out, q, k, v, out, lse, scale=scale, attn_mask=attn_mask, causal=causal)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, attn_mask, scale, _, _, causal, _, _ = inputs
    ctx.save_for_backward(q, k, v, attn_mask, *output)
    ctx.scale, ctx.causal = scale, causal


def _differentiate(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
    """Backward of the op. The gradient of the log-sum-exp is not used, since no caller gets it."""
    q, k, v, attn_mask, out, lse = ctx.saved_tensors
    op = torch.ops.sage_kernels.attention_backward
    grads = op(grad_out, q, k, v, attn_mask, out, lse, ctx.scale, ctx.causal)
    return (*grads, *(None,) * 7)


def _refuse(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    raise NotImplementedError(
        "differentiable_attention: got a gradient that is differentiated again, expected first derivatives alone; use "
        "scaled_dot_product_attention for that"
    )


register(
    "attention_training(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float scale, str scaling, bool smooth_k, "
    "str causal, str recipe, str rotation) -> (Tensor, Tensor)",
    _forward, fake_out_lse,
)  # fmt: skip
register(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor out, Tensor lse, "
    "float scale, str causal) -> (Tensor, Tensor, Tensor)",
    _backward, lambda grad_out, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)  # fmt: skip
register_backward("attention_training", _differentiate, _save)
register_backward("attention_backward", _refuse, lambda ctx, inputs, output: None)
