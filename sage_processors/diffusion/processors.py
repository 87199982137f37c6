"""Swap the attention op inside any diffusers attention processor, without re-implementing the processor.

A Sage class is a subclass of the processor class whose `__call__` runs the SAME code object with other globals: the
names `F` (torch.nn.functional) and `dispatch_attention_fn` lead to this module. Projections, norms, RoPE and masks
stay the model's own. What runs where is decided per call, by shapes, dtypes and flags alone (no device sync, one
traced branch).
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import types
from contextlib import nullcontext

import torch
import torch.nn.functional as F

import sage_kernels
from sage_kernels import crossover
from sage_kernels.checks import MAX_HEAD_DIM
from sage_kernels.compat import function_modes

from ..autocast import autocast
from ..event_counter import EventCounter
from ..options import PAG_REMEDY, REMEDIES, SageAttnProcessor, UnsupportedAttentionError
from .class_lists import list_beside
from .rebind import dispatch_attention_fn, rebind, stand_ins
from .row_maxima_op import attention_keeping
from .windows import CHOSEN


logger = logging.getLogger("sage_processors")

# Slots of a processor's event counter. "called" counts calls of the op without a state (a state counts its own calls),
# "rotated" all rotated ones; the others are reasons for exact attention.
CALLS = ("called", "rotated")
EVENTS = (
    *CALLS,
    *sage_kernels.REASONS,
    "training",
    "replaced",
    "short",
    "block_mask",
    "function_mode",
    "backend",
    "context_parallel",
    "attention_kwargs",
    "softmax_scale",
    "window",
    "kept",
    "unfollowed",
    "other",
)
_EVENT = {name: i for i, name in enumerate(EVENTS)}

# modules of the function modes of torch.export
EXPORTING = ("torch.export.", "torch._export.", "torch.fx.experimental.proxy_tensor")

_logged: set[tuple[str, str]] = set()


class CallSite:
    """One attention call inside a processor: what is planned for it and what was last seen there.

    Attributes:
        state: sage_kernels.HeadState or None (scales computed from the inputs).
        kv_heads, head_dim: layout that `state` was made for.
        keeps_rows: whether its calls keep row maxima, where `keeping_op.keep_rows_of` was told to.
        seen_kv_heads, seen_head_dim, seen_batch, seen_seq_q, seen_seq_kv, elements: of the latest call; elements =
            numel(Q) + numel(K). Written in forward and never read there: a read would make Dynamo guard on the value,
            and recompile.
        seen_kind: of the latest call, None before: dtype of Q, causal as the op takes it, dtype of its mask of keys.
    """

    def __init__(self, state=None, kv_heads: int = 0, head_dim: int = 0):
        self.state, self.kv_heads, self.head_dim = state, kv_heads, head_dim
        self.keeps_rows = False
        self.seen_kv_heads, self.seen_head_dim, self.elements = 0, 0, 0
        self.seen_batch, self.seen_seq_q, self.seen_seq_kv = 0, 0, 0
        self.seen_kind = None


class _Running(threading.local):
    """Which processor runs in this thread, how many attention calls it made so far, whether its module trains."""

    def __init__(self):
        # runs in every thread; with class attributes Dynamo guards on the instance's dict being empty, and recompiles
        self.processor, self.calls, self.training = None, 0, False


_running = _Running()


def _log_once(layer: str, reason: str, remedy: str) -> None:
    key = (layer, reason)
    if key not in _logged:
        first_of_reason = all(seen != reason for _, seen in _logged)
        _logged.add(key)
        # one warning for a reason, details of every further layer only for those who ask
        logger.log(
            logging.WARNING if first_of_reason else logging.DEBUG,
            "layer %s runs exact attention (reason: %s%s); handle.report() lists all layers",
            layer,
            reason,
            f"; {remedy or REMEDIES[reason]}" if remedy or reason in REMEDIES else "",
        )


def _foreign_function_mode() -> bool:
    """Whether a TorchFunctionMode is active that may want to see scaled_dot_product_attention (PAG, SEG, profilers).

    torch.set_default_device and torch.export are function modes too, but have no business with attention.
    """
    return any(not type(mode).__module__.startswith(EXPORTING) for mode in function_modes())


def _is_short(processor, query, key, tokens: int, heads: int, is_causal) -> bool:
    """Whether 16 bit is the faster one for a call. tokens, heads: which dimensions of query and key these are.

    Asked first: a call that would have been too short anyway should cost the host next to nothing.
    """
    if query.dim() != 4 or key.dim() != 4 or query.shape[3] > MAX_HEAD_DIM:
        return False
    config, shape = processor._sage_config, query.shape
    return crossover.is_short(
        query.device, batch=shape[0], heads=shape[heads], seq_q=shape[tokens], seq_kv=key.shape[tokens],
        head_dim=shape[3], causal=is_causal, recipe=config.recipe, min_tokens=config.min_tokens,
    )  # fmt: skip


def _reason_against(processor, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> str | None:
    """Why this call must stay exact, or None. query, key, value: [B, S, H, D]."""
    window = processor._sage_window
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        return "block_mask"
    if _running.training:
        return "training"
    if _foreign_function_mode():
        return "function_mode"
    if scale is not None and (isinstance(scale, torch.Tensor) or scale < 0):
        return "softmax_scale"  # reading a tensor would sync
    reason = sage_kernels.unsupported(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa
    )
    if reason is None and processor._sage_kept:
        return "kept"
    if reason is None and window is not None and window.exact:
        return "unfollowed" if window.is_lost else "window"
    return reason


def _stay_exact(processor, reason: str, remedy: str = "") -> None:
    """Count a call that runs the model's own attention; raise under policy="strict". remedy: another than usual."""
    if processor._sage_config.policy == "strict" and reason not in CHOSEN:
        raise UnsupportedAttentionError(processor._sage_layer, reason, remedy)
    processor._sage_events.add(_EVENT.get(reason, _EVENT["other"]))
    if not torch.compiler.is_compiling() and reason not in CHOSEN:
        _log_once(processor._sage_layer, reason, remedy)


def _attend(query, key, value, attn_mask, is_causal, scale, processor, index):
    """Run the op. query [B, S_q, H, D], key and value [B, S_kv, H_kv, D], any strides -> [B, S_q, H, D]."""
    config = processor._sage_config
    site = processor._sage_sites[index] if index < len(processor._sage_sites) else None
    state, attend = None, sage_kernels.sage_attention
    if site is not None:
        site.elements = query.numel() + key.numel()
        site.seen_kv_heads, site.seen_head_dim = key.shape[2], key.shape[3]
        site.seen_batch, site.seen_seq_q, site.seen_seq_kv = query.shape[0], query.shape[1], key.shape[1]
        by_key = attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1] == attn_mask.shape[2] == 1
        site.seen_kind = query.dtype, "top_left" if is_causal else "", attn_mask.dtype if by_key else None
        if site.state is not None and (key.shape[2], key.shape[3]) == (site.kv_heads, site.head_dim):
            if site.state.plan.device == query.device:
                state = site.state
                if site.keeps_rows:
                    attend = attention_keeping
    if state is None:
        processor._sage_events.add(_EVENT["called"])
    rotation = "none"
    if processor._sage_rotated:
        processor._sage_events.add(_EVENT["rotated"])
        rotation = "hadamard"
    # a state counts in its own tensors, which the steps of another thread's run read and clear
    with nullcontext() if state is None or torch.compiler.is_compiling() else processor._sage_lock:
        out = attend(
            query, key, value, attn_mask=attn_mask, causal="top_left" if is_causal else False,
            recipe=config.recipe, scaling=config.call_scaling, rotation=rotation, scale=scale, state=state,
        )  # fmt: skip
    probe = processor._sage_probe
    if probe is not None and probe.shared.on:
        tried = {"recipe": config.recipe, "scaling": "per_block" if state is not None else config.call_scaling}
        probe.compare(index, out, query, key, value, attn_mask, is_causal, scale, tried)
    return out


def _next_call():
    index = _running.calls
    _running.calls = index + 1
    return _running.processor, index


def _sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Stands in for F.scaled_dot_product_attention inside a Sage class: [B, H, S, D] in and out."""
    processor, index = _next_call()
    if processor._sage_config is not None:
        if _is_short(processor, query, key, 2, 1, is_causal):
            reason = "short"
        elif query.dim() == key.dim() == value.dim() == 4:
            q, k, v = autocast(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
            options = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
            reason = _reason_against(processor, q, k, v, *options)
        else:
            reason = "rank"
        if reason is None:
            return _attend(q, k, v, attn_mask, is_causal, scale, processor, index).transpose(1, 2)
        _stay_exact(processor, reason)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _dispatch(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    attention_kwargs=None,
    *,
    backend=None,
    parallel_config=None,
):
    """Stands in for diffusers' dispatch_attention_fn inside a Sage class: [B, S, H, D] in and out."""
    processor, index = _next_call()
    if processor._sage_config is not None:
        if parallel_config is not None:
            reason = "context_parallel"
        elif attention_kwargs:
            reason = "attention_kwargs"
        elif backend != processor._sage_backend:
            reason = "backend"  # set_attention_backend() after the swap: the user's later word counts
        elif _is_short(processor, query, key, 1, 2, is_causal):
            reason = "short"
        else:
            q, k, v = autocast(query, key, value)
            reason = _reason_against(processor, q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if reason is None:
            return _attend(q, k, v, attn_mask, is_causal, scale, processor, index)
        _stay_exact(processor, reason)
    return dispatch_attention_fn(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        attention_kwargs,
        backend=backend,
        parallel_config=parallel_config,
    )


_STAND_INS = stand_ins(_sdpa, _dispatch)


def _rebuild(base, config, layer, kept=False, rotated=False):
    """For copy and pickle: a Sage processor of its own, without the state of the handle it came from."""
    processor = object.__new__(sage_class(base))
    processor._sage_arm(config, layer, kept=kept)
    object.__setattr__(processor, "_sage_rotated", rotated)
    return processor


class _SageMethods:
    """What every Sage class adds to its base. All attributes start with _sage_."""

    _sage_config = None
    _sage_layer = "stand-alone processor"
    _sage_sites = ()
    _sage_events = None
    _sage_backend = None
    _sage_window = None  # windows.Window of the handle, shared with the layers of the same range
    _sage_kept = False  # stays in 16 bit at all steps
    _sage_rotated = False  # its INT8 calls run with the Hadamard rotation; changes between steps only
    _sage_lock = None  # of the handle, held while a call counts in a state
    _sage_probe = None  # probe.LayerProbe while a probe is on

    def _sage_arm(self, config, layer, *, device="cpu", kept=False, window=None, lock=None):
        """Swap under `config` (None: behave as the base class), counting from zero, without planned scales."""
        set_ = functools.partial(object.__setattr__, self)  # nn.Module processors intercept plain assignment
        set_("_sage_config", config)
        set_("_sage_layer", layer)
        set_("_sage_kept", kept)
        set_("_sage_rotated", config is not None and config.rotation == "hadamard")
        set_("_sage_window", window)
        set_("_sage_lock", lock)
        set_("_sage_events", EventCounter(len(EVENTS), device))
        set_("_sage_sites", tuple(CallSite() for _ in range(type(self)._sage_calls)))
        self._sage_accept_backend()

    def _sage_accept_backend(self):
        """Run in INT8 although the processor has this attention backend; exact calls go to it."""
        object.__setattr__(self, "_sage_backend", getattr(self, "_attention_backend", None))

    def _sage_bypassed(self, other):
        """Count a forward of the model in which the processor `other` was in this one's place."""
        _stay_exact(self, "replaced", PAG_REMEDY if is_pag(other) else "")

    def __reduce__(self):
        state = {k: v for k, v in self.__dict__.items() if not k.startswith("_sage_")}
        own = (self._sage_config, self._sage_layer, self._sage_kept, self._sage_rotated)
        return _rebuild, (type(self)._sage_base, *own), state


@functools.cache
def sage_class(base: type) -> type:
    """The Sage subclass of a diffusers processor class.

    Instances made by calling it run INT8 attention with scales computed per token. `_sage_calls` is the number of
    attention calls found in its code; with 0 (no SDPA inside: linear or hand-written attention) it behaves exactly as
    `base`.
    Raises: TypeError if `base` has no Python `__call__`.
    """
    fn = getattr(base, "__call__", None)  # noqa: B004 (a Python method, not any callable)
    if not isinstance(base, type) or not isinstance(fn, types.FunctionType):
        raise TypeError(f"base: got {base!r}, expected an attention processor class with a __call__ method")
    inner, calls = rebind(fn, _STAND_INS)

    def __call__(self, *args, **kwargs):
        module = args[0] if args else kwargs.get("attn")
        outer, outer_calls, outer_training = _running.processor, _running.calls, _running.training
        _running.processor, _running.calls, _running.training = self, 0, getattr(module, "training", False) is True
        try:
            return inner(self, *args, **kwargs)
        finally:  # also after an exception: the next call in this thread starts clean
            _running.processor, _running.calls, _running.training = outer, outer_calls, outer_training

    # models drop the keyword arguments (RoPE, masks!) that they don't find in this signature
    __call__.__signature__ = inspect.signature(fn)

    @functools.wraps(base.__init__)
    def __init__(self, *args, **kwargs):
        base.__init__(self, *args, **kwargs)
        self._sage_arm(SageAttnProcessor(scaling="dynamic"), type(self).__name__)

    members = {
        "__call__": __call__,
        "__init__": __init__,
        "_sage_base": base,
        "_sage_calls": calls,
        "__doc__": base.__doc__,
    }
    cls = type("Sage" + base.__name__, (_SageMethods, base), members | {"__module__": f"{__package__}.by_name"})
    list_beside(cls, base)
    return cls


def swap(processor, config: SageAttnProcessor, layer: str, **options):
    """A Sage twin of a live processor, sharing its attributes and parameters. Options: of `_sage_arm`."""
    twin = object.__new__(sage_class(type(processor)))
    twin.__dict__.update(processor.__dict__)
    twin._sage_arm(config, layer, **options)
    return twin


def is_pag(processor) -> bool:
    """Whether a processor perturbs attention for guidance: pipelines put these there and away within each step."""
    return getattr(type(processor), "_sage_base", type(processor)).__name__.startswith("PAG")


def is_sage(processor) -> bool:
    """Whether `processor` is an instance of a Sage class."""
    return isinstance(processor, _SageMethods)
