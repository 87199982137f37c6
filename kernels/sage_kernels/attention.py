"""The public op: check, then the Triton kernels on a GPU or the reference on the CPU."""

from __future__ import annotations

import torch

from . import reference
from .checks import check_attention_inputs, check_options, check_state
from .recipe import DEFAULT_RECIPE
from .state import HeadState


_library = torch.library.Library("sage_kernels", "DEF")
# Two schemas of fixed arity instead of an optional LSE: optional tensor returns are unreliable before torch 2.15.
_ARGUMENTS = "Tensor q, Tensor k, Tensor v, float scale, str scaling, bool smooth_k"
_STATE = "Tensor plan, Tensor plan_scale, Tensor(a!) stats, Tensor(b!) counts, Tensor row"
_library.define(f"attention({_ARGUMENTS}) -> Tensor")
_library.define(f"attention_lse({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(f"attention_planned({_ARGUMENTS}, {_STATE}) -> Tensor")
_library.define(f"attention_planned_lse({_ARGUMENTS}, {_STATE}) -> (Tensor, Tensor)")


def sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    recipe: str = DEFAULT_RECIPE,
    scaling: str = "per_token",
    scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    state: HeadState | None = None,
):
    """Softmax attention with an INT8 score matmul: O = softmax(scale · Q Kᵀ) V, no mask.

    Args:
        q: [B, S_q, H, D] fp16, bf16 or fp32, any strides, 1 <= D <= 128. fp32 is quantised from fp32; P and V then
            run in bf16.
        k, v: [B, S_kv, H_kv, D], same dtype and device; H_kv divides H (head h reads key/value head h // (H / H_kv)).
        recipe: a key of RECIPES.
        scaling: tokens that share one INT8 scale of Q and of K: "per_token", "per_block" (the kernel's tile) or
            "per_head". Computed from the inputs. With `state` it is not used: Q then has a scale per token, K its
            planned scale per head, or one per tile where a head has no plan.
        scale: softmax scale, a Python number >= 0; D ** -0.5 if None.
        smooth_k: subtract from K a vector shared by all keys of a head; exact for softmax, and the LSE is corrected.
        return_lse: also return the log-sum-exp of the scaled scores.
        state: planned per-head scales of this call site; this call's statistics are recorded into it. Two calls that
            share
            a row must not run at the same time on different streams.
    Returns: out [B, S_q, H, D] contiguous, in q.dtype; with return_lse also lse [B, S_q, H] fp32, natural log.
        S_kv = 0 gives zeros and -inf.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks.py.
    Source: SageAttention (arXiv:2410.02367) for INT8 scores and smoothed K; the planned scales are ours. Maths:
        kernels/README.md.
    """
    check_options(recipe, scaling, scale, state)
    check_attention_inputs(q, k, v)
    arguments = (q, k, v, q.shape[3] ** -0.5 if scale is None else float(scale), scaling, smooth_k)
    ops = torch.ops.sage_kernels
    if state is None:
        return (ops.attention_lse if return_lse else ops.attention)(*arguments)
    check_state(state, k.shape[2], k.shape[3], q.device)
    return (ops.attention_planned_lse if return_lse else ops.attention_planned)(*arguments, *state)


def _run(q, k, v, scale, scaling, smooth_k, state, return_lse):
    if 0 in q.shape or 0 in k.shape:
        out = q.new_zeros(q.shape)
        return (out, q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)) if return_lse else out
    if q.is_cuda:
        from ._triton.attention_fwd import launch_attention_fwd

        out, lse = launch_attention_fwd(
            q, k, v, scale=scale, scaling=scaling, smooth_k=smooth_k, state=state, return_lse=return_lse
        )
    else:
        out, lse = reference.ref_attention(q, k, v, scale=scale, scaling=scaling, smooth_k=smooth_k, state=state)
    return (out, lse) if return_lse else out


def _attention(q, k, v, scale, scaling, smooth_k):
    return _run(q, k, v, scale, scaling, smooth_k, None, False)


def _attention_lse(q, k, v, scale, scaling, smooth_k):
    return _run(q, k, v, scale, scaling, smooth_k, None, True)


def _attention_planned(q, k, v, scale, scaling, smooth_k, *state):
    return _run(q, k, v, scale, scaling, smooth_k, HeadState(*state), False)


def _attention_planned_lse(q, k, v, scale, scaling, smooth_k, *state):
    return _run(q, k, v, scale, scaling, smooth_k, HeadState(*state), True)


def _fake(q, k, v, scale, scaling, smooth_k, *state):
    return q.new_empty(q.shape)


def _fake_lse(q, k, v, scale, scaling, smooth_k, *state):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


for _name, _implementation, _fake_implementation in (
    ("attention", _attention, _fake),
    ("attention_lse", _attention_lse, _fake_lse),
    ("attention_planned", _attention_planned, _fake),
    ("attention_planned_lse", _attention_planned_lse, _fake_lse),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _device)
    torch.library.register_fake(f"sage_kernels::{_name}", _fake_implementation, lib=_library)
