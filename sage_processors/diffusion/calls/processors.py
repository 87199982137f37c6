"""Run a Sage processor's attention calls in INT8, or in 16 bit with the reason counted.

Inside a Sage class (sage_class.py) the names `F` (torch.nn.functional) and `dispatch_attention_fn` lead here. Each
call is decided by shapes, dtypes and flags alone. That needs no device sync, and torch.compile traces one branch.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

import sage_kernels

from ...postponed.tensor import ordinary_in
from ...reporting.fallbacks import Fallbacks
from ...torch_modes import autocast
from ...unsupported import REMEDIES, UnsupportedAttentionError
from ..heads.nested_rotary import replaced
from ..heads.postponed_heads import compute_heads
from ..heads.rotary import is_rotary, rotary
from ..host.dispatcher import exact, is_native, without_ours
from ..host.rebind import dispatch_attention_fn, stand_ins
from ..steps.windows import CHOSEN
from . import context_parallel
from .call_reasons import REASONS, call_reason, is_short, needs_gradient, training_reason
from .context_parallel import degrees, first_head, sent_bytes
from .fallback import fallback_attention
from .mixed_calls import attend_mixed, is_mixed
from .processor_state import ProcessorState
from .row_maxima_op import attention_keeping


# Slots of a processor's event counter. "called": INT8 calls without a state; a state counts its own calls. "rotated":
# all INT8 calls with the Hadamard rotation. "sent": bytes to other devices. The others: reasons for 16-bit attention.
CALLS = ("called", "rotated", "sent")
EVENTS = (
    *CALLS, *REASONS, "training", "no_backward", "replaced", "patched", "backend", "context_parallel",
    "attention_kwargs", "window", "kept", "unfollowed", "other",
)  # fmt: skip
_fallbacks = Fallbacks(EVENTS, "layer %s runs without INT8 (reason: %s%s); handle.report() lists all layers", REMEDIES)
_CALLED, _ROTATED, _SENT = (_fallbacks.slots[name] for name in CALLS)


class _Running(threading.local):
    """The processor that runs in this thread, with counts of its attention calls."""

    def __init__(self) -> None:
        # Called once in every thread. With class attributes, Dynamo would guard on the instance's dict being empty,
        # and recompile.
        self.processor: Any = None
        self.calls, self.short, self.training = 0, 0, False


_running = _Running()


def _reason_against(own: ProcessorState, *call: Any) -> str | None:
    """Return the reason to run a call in 16 bit, or None. call: as for `call_reason`."""
    window = own.window
    if own.config.training == "int8":
        reason = training_reason(*call)
    else:
        reason = "training" if _running.training else call_reason(*call)
    if reason is None and own.kept:
        return "kept"
    if reason is None and call[3] is not None and is_mixed(own.config):
        return "mixed_mask"
    if reason is None and window is not None and window.in_16bit:
        return "unfollowed" if window.is_lost else "window"
    return reason


def _fall_back(own: ProcessorState, reason: str, remedy: str = "") -> None:
    """Count a call that falls back to the model's own attention; raise with on_unsupported="raise".

    Args: remedy: advice for the message, instead of the usual one for this reason.
    """
    if own.config.on_unsupported == "raise" and reason not in CHOSEN:
        raise UnsupportedAttentionError(own.layer, reason, remedy)
    own.events.add(_fallbacks.slot(reason))
    if reason == "short" and not torch.compiler.is_compiling():
        _running.short += 1
    if not torch.compiler.is_compiling() and reason not in CHOSEN:
        _fallbacks.log(own.layer, reason, remedy=remedy)


def count_short(own: ProcessorState, calls: int) -> None:
    """Count attention calls known to be short (short_calls.py), which run outside of this module."""
    for _ in range(calls):
        own.events.add(_fallbacks.slot("short"))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool,
    scale: Any, own: ProcessorState, index: int, parallel: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Run INT8 attention: query [B, S_q, H, D], key and value [B, S_kv, H_kv, D] -> [B, S_q, H, D].

    Any strides.
    Args: index: place of the call among those of the processor's code. parallel: diffusers' ParallelConfig if the
        tensors were gathered from several devices. return_lse: also return lse [B, S_q, H].
    """
    query, key = compute_heads(query, key)
    config = own.config
    if _trains(own, query, key, value):
        return _attend_training(query, key, value, attn_mask, is_causal, scale, own)
    site = own.sites[index] if index < len(own.sites) else None
    state = None
    attend: Callable[..., torch.Tensor] = sage_kernels.sage_attention
    if site is not None:
        site.elements = query.numel() + key.numel()
        site.seen_kv_heads, site.seen_head_dim = key.shape[2], key.shape[3]
        site.seen_batch, site.seen_seq_q, site.seen_seq_kv = query.shape[0], query.shape[1], key.shape[1]
        kind_of_mask = None
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] == attn_mask.shape[2] == 1:
            kind_of_mask = attn_mask.dtype
        site.seen_kind = query.dtype, "top_left" if is_causal else "", kind_of_mask
        shared_by = 1 if parallel is None else degrees(parallel)[0]
        if site.state is not None and (key.shape[2] * shared_by, key.shape[3]) == (site.kv_heads, site.head_dim):
            if site.state.plan.device == query.device:
                state = site.state if shared_by == 1 else site.state_of(first_head(parallel, key.shape[2]))
                if (site.keeps_rows or site.skip_lists is not None) and parallel is None:
                    attend = attention_keeping
                elif site.skip_lists is not None and not torch.compiler.is_compiling():
                    site.skip_lists.leave_out(site.skip_site, "parallel")
    if state is None:
        own.events.add(_CALLED)
    if is_mixed(config):
        out = attend_mixed(query, key, value, is_causal, scale, config, site, return_lse)
        probe = own.probe
        if probe is not None and probe.shared.on and parallel is None:
            probe.compare(index, out, query, key, value, attn_mask, is_causal, scale)
        return out
    rotation = "none"
    if own.rotated:
        own.events.add(_ROTATED)
        rotation = "hadamard"
    # A state counts in its own tensors. Another thread's run reads and clears them between its steps.
    with nullcontext() if state is None or torch.compiler.is_compiling() else own.lock:
        out = attend(
            query, key, value, attn_mask=attn_mask, causal="top_left" if is_causal else False,
            recipe=config.recipe, scaling=config.scaling.of_call, rotation=rotation, scale=scale, state=state,
            **({"return_lse": True} if return_lse else {}),
        )  # fmt: skip
    probe = own.probe
    if probe is not None and probe.shared.on and parallel is None:
        tried = {"recipe": config.recipe, "scaling": config.scaling.of_call}
        # an empty state: rotated as planned calls are, without a centre and a balance before
        if state is not None and probe.trial:
            tried["state"] = sage_kernels.new_head_state(key.shape[2], key.shape[3], query.device)
        probe.compare(index, out, query, key, value, attn_mask, is_causal, scale, tried)
    return out


def _trains(own: ProcessorState, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True for a call of training that may run in INT8."""
    return own.config.training == "int8" and (_running.training or needs_gradient(query, key, value))


def _attend_parallel(call: tuple[Any, ...], own: ProcessorState, index: int, parallel: Any) -> torch.Tensor:
    """Run a call with tokens spread over devices, in INT8 if possible.

    Some reasons against INT8 show only after diffusers has gathered the tensors. Such calls fall back to 16 bit there.
    """

    def attend(given: tuple[Any, ...], return_lse: bool) -> Any:
        query, key, value, attn_mask, _, is_causal, scale, _ = given
        reason = call_reason(*given)
        if reason is None and attn_mask is not None and is_mixed(own.config):
            reason = "mixed_mask"
        if reason is None:
            return _attend(query, key, value, attn_mask, is_causal, scale, own, index, parallel, return_lse)
        _fall_back(own, reason)
        return fallback_attention(given, return_lse)

    call = (*compute_heads(*call[:2]), *call[2:])
    out: torch.Tensor = context_parallel.run_in_parallel(call, False, parallel, attend)
    _count_sent(own, sent_bytes(call, parallel))
    return out


def _count_sent(own: ProcessorState, sent: int) -> None:
    if not torch.compiler.is_compiling():  # a guard on a growing number would fail in every call
        own.events.add(_SENT, sent)


def _attend_training(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool,
    scale: Any, own: ProcessorState,
) -> torch.Tensor:  # fmt: skip
    """Run a differentiable INT8 call of training.

    It uses no plan: noise levels in training are not those of a run, and gradient checkpointing makes each call twice.
    """
    config = own.config
    own.events.add(_CALLED)
    if own.rotated:
        own.events.add(_ROTATED)
    return sage_kernels.differentiable_attention(
        query, key, value, attn_mask=attn_mask, causal="top_left" if is_causal else False, recipe=config.recipe,
        scaling=config.scaling.of_call, rotation="hadamard" if own.rotated else "none", scale=scale,
    )  # fmt: skip


def _next_call() -> tuple[ProcessorState, int]:
    """Return the running processor's state, and the place of this call among those of its code."""
    index = _running.calls
    _running.calls = index + 1
    own: ProcessorState = _running.processor._sage
    return own, index


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Replace F.scaled_dot_product_attention inside a Sage class: [B, H, S, D] in and out."""
    own, index = _next_call()
    reason: str | None
    if own.config is not None:
        if is_short(own.config, query, key, 2, 1, is_causal):
            reason = "short"
        elif query.dim() == key.dim() == value.dim() == 4:
            q, k, v = autocast(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
            options = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
            reason = _reason_against(own, q, k, v, *options)
        else:
            reason = "rank"
        if reason is None:
            made: torch.Tensor = _attend(q, k, v, attn_mask, is_causal, scale, own, index)
            return made.transpose(1, 2)
        _fall_back(own, reason)
    query, key, value = ordinary_in((query, key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip


def _dispatch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
    attention_kwargs: Any = None, *, backend: Any = None, parallel_config: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Replace diffusers' dispatch_attention_fn inside a Sage class: [B, S, H, D] in and out."""
    own, index = _next_call()
    reason: str | None
    if own.config is not None:
        backend = without_ours(backend)  # "sage_int8" knows neither layer nor step: here its name has no effect
        if attention_kwargs:
            reason = "attention_kwargs"
        elif backend != own.backend:
            reason = "backend"  # set_attention_backend() was called after the swap: the later choice wins
        elif is_short(own.config, query, key, 1, 2, is_causal, parallel_config):
            reason = "short"
        else:
            q, k, v = autocast(query, key, value)
            # under context parallelism, masks are checked after diffusers has gathered them
            mask = attn_mask if parallel_config is None else None
            reason = _reason_against(own, q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
            if reason is None and parallel_config is not None and _trains(own, q, k, v):
                reason = "context_parallel"
        if reason is None:
            if parallel_config is not None:
                call = (q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
                return _attend_parallel(call, own, index, parallel_config)
            made: torch.Tensor = _attend(q, k, v, attn_mask, is_causal, scale, own, index)
            return made
        _fall_back(own, reason)
        if parallel_config is not None:
            _count_sent(own, sent_bytes((query, key, value), parallel_config))
            in_ring = degrees(parallel_config)[1] > 1 and is_native(exact(backend))
            if in_ring and not attention_kwargs and not needs_gradient(query, key, value):
                call = (*ordinary_in((query, key, value)), attn_mask, dropout_p, is_causal, scale, enable_gqa)
                merged: torch.Tensor = context_parallel.run_fallback_in_parallel(call, parallel_config)
                return merged
        backend = exact(backend)
    query, key, value = ordinary_in((query, key, value))
    out: torch.Tensor = dispatch_attention_fn(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs, backend=backend,
        parallel_config=parallel_config,
    )  # fmt: skip
    return out


def _other(value: Any) -> Any:
    return rotary(value, lambda: _running.processor) if is_rotary(value) else None


def _nested(code: types.CodeType, scope: dict[str, Any]) -> tuple[types.CodeType, dict[str, Any]]:
    """Replace a rotary embedding that a processor's code defines."""
    return replaced(code, scope, lambda: _running.processor)


STAND_INS = stand_ins(_sdpa, _dispatch, _other, _nested)
