"""INT8 attention as attention implementations of transformers.

    import sage_processors
    model.set_attn_implementation("sage_int8")

"sage_int8" runs the default recipe, "sage_<recipe>" a recipe of sage_kernels.RECIPES: see names.py. A call that INT8
attention can't do falls back to the model's own attention. Under a name that ends in "_strict" it raises instead. This
is a part of the name because a name goes through from_pretrained and can differ by sub-model, unlike a global switch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

import sage_kernels
from sage_kernels.compat import is_exporting
from sage_kernels.facts import crossover

from ..torch_modes import autocast
from ..unsupported import UnsupportedAttentionError
from .call import Call, Sequences, differentiates_only, masking, needs_gradient, stock_attention
from .choice import watch_choices
from .masks import plain_mask, sage_mask, visible_mask
from .names import IMPLEMENTATIONS, MEANINGFUL, Implementation, standard
from .quantized_kv import attend, quantized_kv_of
from .report import FALLBACKS, INT8, INT8_CACHE, REMEDIES, AttentionReport, build_report, count
from .visible import band_of, complete_mask, write_out


logger = logging.getLogger("sage_processors")


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
    """Register INT8 attention with transformers, together with its mask function.

    Without arguments, registers all standard names. `import sage_processors` does this by itself, whether transformers
    is imported before or after it. With a name, registers that name with its own options. Repeating a call changes
    nothing.

    Args:
        name: for model.set_attn_implementation. It must not contain "flash", "/", "|", "sdpa" or "flex_attention",
            which mean something to transformers.
        recipe: number formats of the two matmuls, a key of sage_kernels.RECIPES.
        min_tokens: calls with fewer queries or keys run in 16 bit (reason "short"), because INT8 saves nothing there.
            None: the number measured for the running GPU, head_dim and recipe (facts/crossover.py); on a CPU no call
            is short. 0: no call is short. With None, decoding over a 16-bit cache is short on every GPU: quantising
            all keys again at every step costs more than it saves. Calls on an INT8 cache are never short.
        on_unsupported: "fallback": a call that INT8 attention can't do runs the model's own attention. It is counted
            per layer with its reason and logged once. "raise": raises UnsupportedAttentionError, except for short
            calls.
        training: "int8": calls that need a gradient, and calls of modules in training mode, run in INT8 too. Their
            backward is PyTorch's, in 16 bit (sage_kernels.differentiable_attention). Some still run in 16 bit and are
            counted: calls with dropout; calls with gradients of masks, biases, sinks or scales; and, as
            "no_backward", calls with sliding windows, soft caps or sinks, and calls without a fused backward.
            "16bit": all of them run in 16 bit, as "training" or "gradient".
        smooth_k, rotation: as in sage_kernels.sage_attention. With smooth_k=False K gets no centre and no balance, so
            a token's codes depend on no other token. This costs accuracy, of which the rotation gives back a part: see
            "Prefix caching" in docs/language.md. "sage_int8_causal" has both.
    Returns: the registered names.
    Raises: ValueError for an invalid name or option.
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
        raise ValueError(f"name: got {name!r}, expected a non-empty string")
    meaningful = [part for part in MEANINGFUL if part in name]
    if meaningful:
        raise ValueError(
            f"name: got {name!r}, expected one without {meaningful[0]!r}, which means something to transformers"
        )
    if name == "eager" or (name in AttentionInterface._global_mapping and name not in IMPLEMENTATIONS):
        raise ValueError(f"name: got {name!r}, expected one that transformers does not use; choose another")


def attention_report(model: Any) -> AttentionReport:
    """Report how often each attention layer ran in INT8, and why its other calls did not.

    Waits for the device. Also gives every layer its counter: called before torch.compile, it makes compiled calls
    countable layer by layer.

    Raises: TypeError if model is no torch.nn.Module.
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
    """True if the module's config asks for attention weights.

    transformers accepts this setting before one of our names is chosen, and then collects weights without an argument.
    """
    return bool(getattr(getattr(module, "config", None), "output_attentions", False))


def _attend(
    implementation: Implementation, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run one call in INT8, or by the model's own attention with the reason counted.

    Args: query [B, H, S_q, D]; key and value [B, H_kv, S_kv, D], any strides, or two QuantizedKV of an INT8 cache.
    Returns: the output [B, S_q, H, D]; the attention weights or None.
    """
    complete_mask(call, query, key)
    if not isinstance(key, torch.Tensor):  # a QuantizedKV of an Int8KVCache
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
    """Run attention within each sequence packed into one row [1, H, S, D]. No mask of S x S is made."""
    count(call.module, implementation, INT8, query.device)
    causal, window = band_of(call, query.shape[2])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q, k, v = (x[0] for x in (q, k, v))
    out: torch.Tensor = sage_kernels.sage_attention_varlen(
        q, k, v, sequences.q_ends, sequences.k_ends, causal=causal, window=window, softcap=call.softcap or 0.0,
        sinks=call.sinks, scale=call.scaling, **_numbers(implementation),
    )  # fmt: skip
    return out[None]


def _numbers(implementation: Implementation) -> dict[str, Any]:
    """Return the options of an op that decide its result."""
    return {name: getattr(implementation, name) for name in ("recipe", "scaling", "smooth_k", "rotation")}


def _reason_against(
    implementation: Any, call: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> str | None:
    """Return the reason to run a call in 16 bit, or None. sage_kernels.unsupported knows further reasons."""
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
    if call.sequences is not None:  # the longest sequence decides
        seq_q, seq_kv = call.sequences.longest_q or seq_q, call.sequences.longest_k or seq_kv
    if crossover.is_short(
        query.device, batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim,
        causal=bool(call.is_causal), recipe=implementation.recipe, min_tokens=implementation.min_tokens,
    ):  # fmt: skip
        return "short"
    return None


def _reason_against_training(call: Any, q: torch.Tensor, mask: Any, window: int | None, seen: int) -> str | None:
    """Return the reason to run a training call in 16 bit that INT8 could do, or None. q: [B, S_q, H, D]."""
    if call.softcap or call.sinks is not None or (window is not None and window < seen):
        return "no_backward"
    return None if sage_kernels.has_fused_backward(q, mask) else "no_backward"


def _attend_cache(
    implementation: Implementation, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Run attention on keys and values that an INT8 cache returned."""
    stored = quantized_kv_of(key, value)
    if stored is None:
        raise TypeError(
            f"key of {call.label}: got {type(key).__name__}, expected a tensor, or a layer of a "
            "sage_processors.Int8KVCache"
        )
    if needs_gradient(call, query):  # codes have no graph back to the tokens that they were made of
        raise NotImplementedError(
            f"query of {call.label}: got one that needs a gradient together with an INT8 cache, expected inference, "
            "because codes pass no gradient on to earlier tokens; call the model under torch.no_grad(), or use an "
            "ordinary cache"
        )
    if call.dropout or call.weights or call.unknown:
        what = "dropout" if call.dropout else "output_attentions" if call.weights else call.unknown[0]
        raise NotImplementedError(
            f"{what} of {call.label}: got it together with an INT8 cache, expected inference without it; "
            "use an ordinary cache for that"
        )
    (query,) = autocast(query)
    seq_q, seq_kv = query.shape[2], key.shape[2]
    mask, causal, window, seen = masking(call, seq_q, seq_kv)
    if window is not None and not causal:
        mask, window = plain_mask(call.mask), None
    if mask is not None and seen < seq_kv:
        mask = torch.nn.functional.pad(mask, (0, seq_kv - seen), value=-torch.inf)
    # the rows are the cache's newest tokens, whichever end they were counted from
    causal = "bottom_right" if causal else False
    count(call.module, implementation, INT8_CACHE, query.device)
    return attend(
        query.transpose(1, 2), stored, attn_mask=mask, causal=causal, window=window, softcap=call.softcap or 0.0,
        sinks=call.sinks, scale=call.scaling,
    )  # fmt: skip


def _note_fallback(implementation: Any, call: Any, reason: str, device: torch.device) -> None:
    """Count and log a call that runs in 16 bit.

    With on_unsupported="raise", raises UnsupportedAttentionError if the call is not merely short.
    """
    if implementation.on_unsupported == "raise" and reason != "short":
        (_refuse_export if is_exporting() else _refuse)(call.label, reason)
    count(call.module, implementation, reason, device)
    if is_exporting():
        _say_exported(call.label, reason)
    elif not torch.compiler.is_compiling():
        more = ": " + ", ".join(sorted(call.unknown)) if reason == "unknown_argument" else ""
        level = logging.INFO if reason == "short" else 0  # on purpose
        kind = type(call.module)
        FALLBACKS.log(kind.__name__, reason, key=kind, more=more, level=level)


def _refuse(label: str, reason: str) -> None:
    error = UnsupportedAttentionError(label, reason)
    remedy = f"{REMEDIES[reason]}, or: " if reason in REMEDIES else ""
    error.args = (
        f"attention of layer {label!r}: got a call that INT8 attention can't do (reason {reason!r}), "
        f'expected a supported one because the implementation is strict; {remedy}use the one without "_strict", '
        "which runs such calls in 16 bit",
    )
    raise error


# torch.export can't trace the making of this error, so it gets a constant; torch.compile leaves the layer to Python
_refuse_export = torch.compiler.assume_constant_result(lambda label, reason: _refuse(label, reason))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _say_exported(label: str, reason: str) -> None:
    """Log the name of a layer that is exported in 16 bit, as an exported program has no report."""
    logger.warning(
        "%s is exported without INT8 (reason: %s%s); a strict implementation raises instead", label, reason,
        f"; {REMEDIES[reason]}" if reason in REMEDIES else "",
    )  # fmt: skip


register_transformers()
watch_choices(PreTrainedModel, IMPLEMENTATIONS)
