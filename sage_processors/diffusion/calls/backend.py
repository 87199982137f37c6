"""INT8 attention as a back end of diffusers' attention dispatcher, chosen by name.

    sp.register_diffusers_backend()
    pipe.transformer.set_attention_backend("sage_int8")

Prefer `sage_processors.apply` where it can be used. A back end is told neither the layer nor the step. So quantisation
scales come from each call, and nothing is counted by layer. Processors that call PyTorch directly never use a back
end.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

import sage_kernels
from sage_kernels import RECIPES
from sage_kernels.compat import is_exporting
from sage_kernels.facts.recipe import MIXED_RECIPE

from ...option_groups import BY_CALL, IN_16_BIT, RecipeName, ScalingName
from ...options import SageAttnProcessor
from ...postponed.tensor import ordinary_in
from ...reporting.event_counter import count_shared, zero_shared
from ...reporting.fallbacks import Fallbacks
from ...torch_modes import autocast
from ...unsupported import REMEDIES, UnsupportedAttentionError
from ..host import dispatcher
from .call_reasons import REASONS, call_reason, is_short, needs_gradient
from .context_parallel import degrees, run_in_parallel
from .fallback import fallback_attention


SHARED_COUNTER = "diffusers back end"  # name of the shared counters
CALLED = "called"
EVENTS = (CALLED, *REASONS, "attention_kwargs", "other")
_fallbacks = Fallbacks(
    EVENTS,
    "back end %s runs without INT8 (reason: %s%s); sage_processors.diffusers_backend_report() counts",
    REMEDIES,
)
_ARGUMENTS = (
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "return_lse",
    "_parallel_config",
)  # fmt: skip

_options = SageAttnProcessor(scaling="dynamic")


def register_diffusers_backend(
    *,
    recipe: RecipeName = "qk_int8_pv_bf16",
    scaling: ScalingName = "dynamic",
    min_tokens: int | None = None,
    on_unsupported: Literal["fallback", "raise"] = "fallback",
) -> str:
    """Register INT8 attention as a back end of diffusers with the name "sage_int8".

    A later call replaces the options and starts counting from zero.

    Then `model.set_attention_backend("sage_int8")`, `with attention_backend("sage_int8"):` and the environment
    variable DIFFUSERS_ATTN_BACKEND=sage_int8 choose it. With the variable, call this before importing models or
    pipelines of diffusers, which read it once. Prefer `sage_processors.apply`, which knows layers and steps and
    reaches all models. Where both are on a model, the rules of `apply` win.

    Args:
        recipe: number formats of the two matmuls, a key of sage_kernels.RECIPES.
        scaling: granularity of the quantisation scales of Q and K: "per_token", "per_block" or "per_head"; "dynamic"
            means "per_token". All are computed from the call's inputs.
        min_tokens: calls with fewer queries or keys run in 16 bit (reason "short"). None: as measured for the running
            GPU. Calls that return the log-sum-exp are never short.
        on_unsupported: "fallback": a call that can't run in INT8 runs diffusers' native back end, is counted with its
            reason and logged once. "raise": such a call raises UnsupportedAttentionError.
    Returns: "sage_int8".
    Raises: TypeError or ValueError for an option of wrong type or value; ImportError without diffusers, or for a
        version with an unknown dispatcher; RuntimeError if diffusers has another back end of this name.
    """
    global _options
    options = SageAttnProcessor(recipe=recipe, scaling=scaling, min_tokens=min_tokens, on_unsupported=on_unsupported)
    if recipe in (MIXED_RECIPE, IN_16_BIT):
        raise ValueError(
            f"recipe: got {recipe!r}, expected one of {sorted(RECIPES)}; "
            "sage_processors.apply runs mixed precision and keeps layers in 16 bit"
        )
    if scaling not in BY_CALL:
        raise ValueError(
            f"scaling: got {scaling!r}, expected one of {list(BY_CALL)}: a back end is not told which step runs; "
            "sage_processors.apply plans scales over steps"
        )
    dispatcher.add(_sage_int8, _ARGUMENTS)
    _options = options
    _fallbacks.logged.clear()
    zero_shared(SHARED_COUNTER)
    return dispatcher.NAME


def unregister_diffusers_backend() -> None:
    """Remove the back end from diffusers. Does nothing if it is not registered.

    Models that still name it raise KeyError in their next forward; call model.reset_attention_backend() first.
    """
    dispatcher.remove()


def options() -> SageAttnProcessor:
    """Return the options of the latest registration."""
    return _options


def _sage_int8(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False, return_lse: bool = False, _parallel_config: Any = None,
    **unknown: Any,
) -> Any:  # fmt: skip
    """Run one call of the back end, with the arguments of diffusers' own back ends.

    query [B, S_q, H, D], key and value [B, S_kv, H_kv, D] -> [B, S_q, H, D]; with return_lse also lse [B, S_q, H].
    """
    query, key, value = ordinary_in((query, key, value))
    attn_mask = _key_mask(attn_mask, query, key)
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _parallel_config is not None:
        return _run_in_parallel(call, return_lse, _parallel_config, bool(unknown))
    return _run(call, return_lse, "attention_kwargs" if unknown else None)


def _key_mask(mask: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """Reshape a mask of keys from [B, S_kv] to [B, 1, 1, S_kv], as diffusers' native back end does."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and query.dim() == key.dim() == 4:
        if tuple(mask.shape) == (query.shape[0], key.shape[1]):
            return mask[:, None, None]
    return mask


def _run(call: tuple[Any, ...], return_lse: bool, reason: str | None) -> Any:
    """Run a call on this device alone.

    Args: call: arguments up to `enable_gqa`. reason: a reason against INT8 that is already known, or None.
    """
    query, key, value, *others = call
    attn_mask, _, is_causal, scale, _ = others
    if reason is None and not return_lse and is_short(_options, query, key, 1, 2, is_causal):
        reason = "short"
    if reason is None:
        q, k, v = autocast(query, key, value)
        reason = call_reason(q, k, v, *others)
    if reason is None:
        _count(CALLED, query)
        return sage_kernels.sage_attention(
            q, k, v, attn_mask=attn_mask, causal="top_left" if is_causal else False, recipe=_options.recipe,
            scaling=_options.scaling.of_call, scale=scale, return_lse=return_lse,
        )  # fmt: skip
    _fall_back(reason, query)
    return fallback_attention(call, return_lse)


def _run_in_parallel(call: tuple[Any, ...], return_lse: bool, parallel: Any, unknown: bool) -> Any:
    """Run a call with tokens spread over devices. unknown: it has arguments that we don't know."""
    masked_ring = call[3] is not None and degrees(parallel)[1] > 1
    if (unknown or needs_gradient(*call[:3])) and not masked_ring:
        _fall_back("attention_kwargs" if unknown else "requires_grad", call[0])
        names = dict(zip(_ARGUMENTS, call, strict=False))
        return dispatcher.native()(**names, return_lse=return_lse, _parallel_config=parallel)
    return run_in_parallel(call, return_lse, parallel, lambda given, with_lse: _run(given, with_lse, None))


def _count(event: str, query: torch.Tensor) -> None:
    """Count a call, unless it is exported: the exported program would contain our counters."""
    if not is_exporting():
        count_shared(SHARED_COUNTER, len(EVENTS), _fallbacks.slot(event), query.device)


def _fall_back(reason: str, query: torch.Tensor) -> None:
    """Count a call that can't run in INT8; raise with on_unsupported="raise"."""
    if _options.on_unsupported == "raise":
        instead = 'register_diffusers_backend(on_unsupported="fallback")'
        raise UnsupportedAttentionError(f"any, by the back end {dispatcher.NAME}", reason, instead=instead)
    _count(reason, query)
    if not torch.compiler.is_compiling():
        _fallbacks.log(dispatcher.NAME, reason)
