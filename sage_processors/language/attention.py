"""INT8 attention as attention implementations of transformers.

    import sage_processors
    model.set_attn_implementation("sage_int8")

Names (names.py): "sage_int8" runs the default recipe, "sage_<recipe>" each recipe of sage_kernels.RECIPES. With
"_strict" behind it a call that INT8 attention can't do raises instead of running the model's own exact attention: a
name travels with the model (from_pretrained, one per sub-model), which a global switch would not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import sage_kernels
from sage_kernels.compat import is_exporting
from sage_kernels.facts import crossover

from ..torch_modes import autocast
from ..unsupported import UnsupportedAttentionError
from .call import Call, Sequences, differentiates_only, masking, needs_gradient, stock_attention
from .choice import watch_choices
from .masks import visible_mask, plain_mask, sage_mask
from .names import IMPLEMENTATIONS, MEANINGFUL, Implementation, standard
from .report import INT8, INT8_CACHE, REMEDIES, AttentionReport, build_report, count
from .visible import band_of, complete_mask, write_out


try:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
except ImportError as error:
    raise ImportError(
        "sage_processors needs transformers 5.10.1 or newer for this: pip install 'sage-processors[transformers]'"
    ) from error

logger = logging.getLogger("sage_processors")

_logged: set[tuple[type, str]] = set()


def register_transformers(
    name: str | None = None,
    *,
    recipe: str = sage_kernels.DEFAULT_RECIPE,
    min_tokens: int | None = None,
    on_unsupported: str = "fallback",
    training: str = "16bit",
    smooth_k: bool | None = None,
    rotation: str = "none",
) -> list[str]:
    """Make INT8 attention known to transformers, attention and mask function together. Repeating it changes nothing.

    Without arguments: all standard names. `import sage_processors` does that by itself, before or after transformers.
    With a name: that name with options of its own.

    Args:
        name: to be given to model.set_attn_implementation; without "flash", "/", "|", "sdpa" and "flex_attention",
            which mean something to transformers.
        recipe: number formats of the two matmuls, a key of sage_kernels.RECIPES.
        min_tokens: calls with fewer queries or keys run the exact attention (reason "short"): there INT8 saves
            nothing. None: as measured for the running GPU, head_dim and recipe (facts/crossover.py), on a CPU
            never. 0: never. Decoding on a cache that is not INT8 is short on every GPU: quantising every key again
            at every step costs more than it saves. Calls on an INT8 cache always read the cache as it is.
        on_unsupported: "fallback": a call that INT8 attention can't do runs the model's own attention, is counted
            per layer with its reason and logged once. "raise": UnsupportedAttentionError; short calls don't raise.
        training: "int8": calls that need a gradient, and those of modules in training mode, run in INT8, too; the
            backward is PyTorch's, in 16 bit (sage_kernels.differentiable_attention). Exact all the same, and counted:
            dropout; gradients of masks, biases, sinks or scales; windows, soft caps and sinks, and calls without a
            fused backward, as reason "no_backward". "16bit": all of them, as "training" or "gradient".
        smooth_k, rotation: as of sage_kernels.sage_attention. smooth_k=False takes no center from K and balances no
            channels, so that codes of a token depend on no other one. What that costs the rotation gives back in
            part; see "Prefix caching" in docs/language.md. "sage_int8_causal" has both.
    Returns: the names registered.
    Raises: ValueError for a name or an option that can't be.
    """
    options = (recipe, min_tokens, on_unsupported, training, smooth_k, rotation)
    if name is None:
        if options != (sage_kernels.DEFAULT_RECIPE, None, "fallback", "16bit", None, "none"):
            raise ValueError("name: got None with options, expected a name for an implementation of your own")
        wanted = standard()
    else:
        _check_name(name)
        wanted = {name: Implementation(name, *options)}
    for key, implementation in wanted.items():
        if IMPLEMENTATIONS.get(key) == implementation:
            continue
        IMPLEMENTATIONS[key] = implementation
        AttentionMaskInterface.register(key, sage_mask)  # without it transformers passes no mask at all
        AttentionInterface.register(key, _attention_function(implementation))
    return list(wanted)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"name: got {name!r}, expected a string")
    meaningful = [part for part in MEANINGFUL if part in name]
    if meaningful:
        raise ValueError(
            f"name: got {name!r}, expected one without {meaningful[0]!r}, which has a meaning to transformers"
        )
    if name == "eager" or (name in AttentionInterface._global_mapping and name not in IMPLEMENTATIONS):
        raise ValueError(f"name: got {name!r}, expected one that is not taken")


def attention_report(model: Any) -> AttentionReport:
    """What really ran: per attention layer implementation, recipe, INT8 calls, exact calls with reasons. Syncs.

    Also gives every layer its counter; before torch.compile it makes the compiled calls countable layer by layer.

    Raises: TypeError unless model is a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a transformers model (torch.nn.Module)")
    return build_report(model, IMPLEMENTATIONS)


def _attention_function(implementation: Implementation) -> Callable[..., Any]:
    def sage_attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        dropout: float = 0.0,
        scaling: Any = None,
        is_causal: bool | None = None,
        position_bias: Any = None,
        softcap: Any = None,
        s_aux: Any = None,
        sliding_window: Any = None,
        output_attentions: Any = None,
        **kwargs: Any,
    ) -> Any:
        call = Call(
            module,
            visible_mask(attention_mask),
            dropout,
            scaling,
            getattr(module, "is_causal", True) if is_causal is None else is_causal,
            position_bias,
            softcap,
            s_aux,
            sliding_window,
            _wants_weights(module) if output_attentions is None else bool(output_attentions),
            {name: value for name, value in kwargs.items() if value is not None},
        )
        return _attend(implementation, call, query, key, value)

    return sage_attention_forward


def _wants_weights(module: Any) -> bool:
    """What a config said before our name was chosen: transformers then collects weights without an argument."""
    return bool(getattr(getattr(module, "config", None), "output_attentions", False))


def _attend(
    implementation: Implementation, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """query [B, H, S_q, D], key and value [B, H_kv, S_kv, D], any strides -> [B, S_q, H, D], and weights or None."""
    complete_mask(call, query, key)
    if not isinstance(key, torch.Tensor):  # what an Int8KVCache returns is no tensor
        return _attend_cache(implementation, call, query, key, value), None
    needed = needs_gradient(call, query, key, value)
    trains = implementation.training == "int8" and differentiates_only(call, query, key, value)
    reason = None if trains else "training" if call.module.training else "gradient" if needed else None
    if reason is None:
        query, key, value = autocast(query, key, value)
        reason = _reason_against(implementation, call, query, key, value)
    if reason is None and call.sequences is not None:
        packs = sage_kernels.RECIPES[implementation.recipe].packed
        if needed or not packs:
            reason = "no_backward" if needed else "other"
        else:
            reason = sage_kernels.unsupported(
                *(x.transpose(1, 2) for x in (query, key, value)), dropout_p=call.dropout, enable_gqa=True
            )
        if reason is None:
            return _attend_packed(implementation, call, call.sequences, query, key, value), None
    elif reason is None:
        mask, causal, window, seen = masking(call, query.shape[2], key.shape[2])
        q, k, v = query.transpose(1, 2), key[:, :, :seen].transpose(1, 2), value[:, :, :seen].transpose(1, 2)
        with torch.no_grad() if trains else nullcontext():
            reason = sage_kernels.unsupported(q, k, v, attn_mask=mask, dropout_p=call.dropout, enable_gqa=True)
        if reason is None and trains and needed:
            reason = _reason_against_training(call, q, mask, window, seen)
    if reason is not None:
        write_out(call, query.shape[2], key.shape[2], query.device)
        _note_fallback(implementation, call, reason, query.device)
        found: tuple[torch.Tensor, torch.Tensor | None] = stock_attention(call, query, key, value)
        return found
    count(call.module, implementation, INT8, query.device)
    if needed:
        return sage_kernels.differentiable_attention(
            q, k, v, attn_mask=mask, causal=causal, scale=call.scaling, **_numbers(implementation)
        ), None  # fmt: skip
    out = sage_kernels.sage_attention(
        q, k, v, attn_mask=mask, causal=causal, window=window, softcap=call.softcap or 0.0, sinks=call.sinks,
        scale=call.scaling, **_numbers(implementation),
    )  # fmt: skip
    return out, None


def _attend_packed(
    implementation: Implementation,
    call: Call,
    sequences: Sequences,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attention of the sequences packed into a row [1, H, S, D], each by itself: no mask of S x S is made."""
    count(call.module, implementation, INT8, query.device)
    causal, window = band_of(call, query.shape[2])
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: torch.Tensor = sage_kernels.sage_attention_varlen(
        q, k, v, sequences.q_ends, sequences.k_ends, causal=causal, window=window, softcap=call.softcap or 0.0,
        sinks=call.sinks, scale=call.scaling, **_numbers(implementation),
    )  # fmt: skip
    return out[None]


def _numbers(implementation: Implementation) -> dict[str, Any]:
    """The options of an op that its numbers come from."""
    return {name: getattr(implementation, name) for name in ("recipe", "scaling", "smooth_k", "rotation")}


def _reason_against(
    implementation: Any, call: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> str | None:
    """Why this call must stay exact, or None: what sage_kernels.unsupported can't know."""
    if call.weights:
        return "output_attentions"
    if call.unknown:
        return "unknown_argument"
    if call.mask is None and call.sliding_window is not None and call.sliding_window < key.shape[2]:
        return "window_without_mask"
    if isinstance(call.scaling, torch.Tensor) or isinstance(call.softcap, torch.Tensor):
        return "softmax_scale"  # reading a tensor would sync
    if call.sinks is not None and tuple(call.sinks.shape) != (query.shape[1],):
        return "sinks"
    batch, heads, seq_q, head_dim = query.shape
    seq_kv = key.shape[2]
    if call.sequences is not None:  # the longest decides
        seq_q, seq_kv = call.sequences.longest_q or seq_q, call.sequences.longest_k or seq_kv
    if crossover.is_short(
        query.device, batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim,
        causal=bool(call.is_causal), recipe=implementation.recipe, min_tokens=implementation.min_tokens,
    ):  # fmt: skip
        return "short"
    return None


def _reason_against_training(call: Any, q: torch.Tensor, mask: Any, window: int | None, seen: int) -> str | None:
    """Why the gradient of a call that INT8 can do must be that of exact attention, or None. q: [B, S_q, H, D]."""
    if call.softcap or call.sinks is not None or (window is not None and window < seen):
        return "no_backward"
    return None if sage_kernels.has_fused_backward(q, mask) else "no_backward"


def _attend_cache(
    implementation: Implementation, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention on keys and values that an INT8 cache returned as codes."""
    from . import kv_cache

    stored = kv_cache.quantized_kv_of(key, value)
    if stored is None:
        raise TypeError(
            f"key of {call.label}: got {type(key).__name__}, expected a tensor or what sage_processors.Int8KVCache "
            "returns"
        )
    if needs_gradient(call, query):  # what the keys were made of is not in their codes: it would be a part of it
        raise NotImplementedError(
            f"query of {call.label}: got one that needs a gradient together with an INT8 cache, expected inference: "
            "codes pass none on to the tokens before; call the model under torch.no_grad(), or use an ordinary cache"
        )
    if call.dropout or call.weights or call.unknown:
        what = "dropout" if call.dropout else "output_attentions" if call.weights else call.unknown[0]
        raise NotImplementedError(
            f"{what} of {call.label}: got it together with an INT8 cache, expected inference without it; "
            "use an ordinary cache for that"
        )
    seq_q, seq_kv = query.shape[2], key.shape[2]
    mask, causal, window, seen = masking(call, seq_q, seq_kv)
    if window is not None and not causal:
        mask, window = plain_mask(call.mask), None
    if mask is not None and seen < seq_kv:
        mask = torch.nn.functional.pad(mask, (0, seq_kv - seen), value=-torch.inf)
    # whichever end the rows were counted from: those of a cache are its newest tokens
    causal = "bottom_right" if causal else False
    count(call.module, implementation, INT8_CACHE, query.device)
    return kv_cache.attend(
        query.transpose(1, 2), stored, attn_mask=mask, causal=causal, window=window, softcap=call.softcap or 0.0,
        sinks=call.sinks, scale=call.scaling,
    )  # fmt: skip


def _note_fallback(implementation: Any, call: Any, reason: str, device: torch.device) -> None:
    """Count a call that runs exact attention; or raise with on_unsupported="raise" unless it is merely short."""
    if implementation.on_unsupported == "raise" and reason != "short":
        (_refuse_export if is_exporting() else _refuse)(call.label, reason)
    count(call.module, implementation, reason, device)
    if is_exporting():
        _say_exported(call.label, reason)
    elif not torch.compiler.is_compiling():
        _log_once(call, reason)


def _refuse(label: str, reason: str) -> None:
    error = UnsupportedAttentionError(label, reason)
    remedy = f"{REMEDIES[reason]}, or: " if reason in REMEDIES else ""
    error.args = (
        f"attention of layer {label!r}: got a call that INT8 attention can't do (reason {reason!r}), "
        f'expected a supported one because the implementation is strict; {remedy}use the one without "_strict", '
        "which runs such calls exactly",
    )
    raise error


# the tracer of an export can't make this error by itself; that of torch.compile leaves the layer to Python instead
_refuse_export = torch.compiler.assume_constant_result(lambda label, reason: _refuse(label, reason))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_exported(label: str, reason: str) -> None:
    """An exported program has no report to look into: every layer is named while it is made."""
    logger.warning(
        "%s is exported with exact attention (reason: %s%s); a strict implementation raises instead", label, reason,
        f"; {REMEDIES[reason]}" if reason in REMEDIES else "",
    )  # fmt: skip


def _log_once(call: Call, reason: str) -> None:
    layer = type(call.module)
    if (layer, reason) in _logged:
        return
    first_of_reason = all(seen != reason for _, seen in _logged)
    _logged.add((layer, reason))
    if reason == "unknown_argument":
        reason += ": " + ", ".join(sorted(call.unknown))
    logger.log(
        # short calls are meant to be exact; of the others one warning a reason
        logging.INFO if reason == "short" else logging.WARNING if first_of_reason else logging.DEBUG,
        "%s runs exact attention (reason: %s%s); sage_processors.attention_report(model) lists all layers",
        layer.__name__,
        reason,
        f"; {REMEDIES[reason]}" if reason in REMEDIES else "",
    )


register_transformers()
watch_choices(PreTrainedModel, IMPLEMENTATIONS)
