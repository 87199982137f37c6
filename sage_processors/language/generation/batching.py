"""INT8 attention over an INT8 paged cache in transformers' continuous batching (generate_batch).

transformers lets a server run its own implementations alone, of which only those with "flash" in their name go
without masks. While a server runs, a model with one of our names therefore has a second name, and its cache is an
Int8PagedCache. The server puts the first name back when it stops.
"""

from __future__ import annotations

import functools
from math import ceil
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from sage_kernels.facts import crossover

from ...unsupported import UnsupportedAttentionError
from ..choice import configs_of
from ..names import IMPLEMENTATIONS, Implementation
from ..report import INT8_CACHE, count


PAGED = "_paged_flash"  # behind one of our names; "flash" tells transformers to make no masks
FALLBACK_PAGES = 32  # of a sequence, where neither the user nor the prompts say how long it gets
_NOT_TAKEN = ("position_bias", "output_attentions", "head_mask")


def batch_in_int8() -> None:
    """Let continuous batching run our names. Repeating it changes nothing."""
    from transformers.generation.continuous_batching import continuous_api as api

    manager: Any = api.ContinuousBatchingManager
    if hasattr(api.PagedAttentionCache, "gives_int8") or not hasattr(manager, "switch_to_cb_friendly_attn"):
        return  # a version of transformers before 5.17 refuses our names by itself
    api.PagedAttentionCache = _cache_maker(api.PagedAttentionCache)
    api.resolve_continuous_batching_config = _with_tables(api.resolve_continuous_batching_config)
    manager.switch_to_cb_friendly_attn = _with_our_names(manager.switch_to_cb_friendly_attn)
    manager._create_batch_processor = _with_refusals(manager._create_batch_processor)


def _implementation_of(config: Any) -> Implementation | None:
    """Return the options of our name that a config runs under while a server uses it, or None."""
    name = getattr(config, "_attn_implementation", None) or ""
    return IMPLEMENTATIONS.get(name.removesuffix(PAGED)) if name.endswith(PAGED) else None


def _cache_maker(stock: Any) -> Any:
    @functools.wraps(stock, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        if _implementation_of(kwargs.get("config")) is None:
            return stock(*args, **kwargs)
        from .paged_cache import Int8PagedCache

        return Int8PagedCache(*args, **kwargs)

    make.gives_int8 = True  # type: ignore[attr-defined]
    return make


def _with_refusals(create: Any) -> Any:
    @functools.wraps(create)
    def _create_batch_processor(self: Any) -> Any:
        before, processor = getattr(self, "batch_processor", None), create(self)
        refuse = getattr(processor.cache, "refuse_beyond_pages", None)
        if refuse is not None and processor is not before:
            refuse(processor.scheduler)
        return processor

    return _create_batch_processor


def _with_tables(resolve: Any) -> Any:
    """Wrap the choice of a server's settings: in stock, only flash 2 and 3 get block tables."""

    @functools.wraps(resolve)
    def resolve_continuous_batching_config(
        config: Any, cb_config: Any, workload_hints: Any = None, *rest: Any, **kwargs: Any
    ) -> Any:
        found = resolve(config, cb_config, workload_hints, *rest, **kwargs)
        asked, kinds = cb_config.max_blocks_per_request, getattr(config, "layer_types", None)
        slides = (
            getattr(config, "sliding_window", None) is not None if kinds is None else set(kinds) != {"full_attention"}
        )
        if _implementation_of(config) is not None and asked != 0 and not slides:
            size = getattr(found, "page_size", None) or found.block_size
            longest = (
                0 if workload_hints is None else workload_hints.max_prompt_length + workload_hints.max_generated_length
            )
            found.max_blocks_per_request = asked or (ceil(longest / size) + 1 if longest else FALLBACK_PAGES)
        return found

    return resolve_continuous_batching_config


def _with_our_names(switch: Any) -> Any:
    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        name = model.config._attn_implementation
        implementation = IMPLEMENTATIONS.get(name)
        if implementation is None:
            return switch(self, model, *args, **kwargs)
        other = (
            "sdpa" if implementation.min_tokens == crossover.NEVER else name + PAGED
        )  # recipe="16bit" is stock's attention
        AttentionInterface.register(name + PAGED, functools.partial(_attend, implementation))
        for config in configs_of(model):
            if config._attn_implementation == name:
                config._attn_implementation = other
        if other == "sdpa":
            switch(self, model, *args, **kwargs)
        self._original_attn_impl = name  # which the server sets again when it stops

    return switch_to_cb_friendly_attn


@torch.compiler.disable
def _attend(
    implementation: Implementation,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    scaling: Any = None,
    softcap: Any = None,
    s_aux: Any = None,
    sliding_window: Any = None,
    dropout: float = 0.0,
    **step: Any,
) -> tuple[torch.Tensor, None]:
    """Run one layer's attention of a server's step over its INT8 pages."""
    from .paged_cache import LAYER, Int8PagedCache

    cache, number = step.get(LAYER) or (step.get("cache"), getattr(module, "layer_idx", None))
    label = f"layer {number} ({type(module).__name__})"
    if not isinstance(cache, Int8PagedCache) or number is None:
        raise _refusal(label, "a call without an INT8 paged cache, such as one of a model that a server uses")
    if getattr(module, "is_kv_shared_layer", False):
        raise _refusal(label, "a layer that reads the keys of another one")
    if value.shape[-1] != key.shape[-1] or key.shape[-1] != cache.int8_head_dim:
        raise _refusal(
            label, f"head_dims {key.shape[-1]} and {value.shape[-1]}, where pages hold {cache.int8_head_dim}"
        )
    if attention_mask is not None or dropout or any(step.get(name) is not None for name in _NOT_TAKEN):
        raise _refusal(label, "a mask, dropout, position bias or output_attentions")
    if (sliding_window is not None) != (cache.layer(number).window is not None):
        raise _refusal(label, f"sliding_window={sliding_window}, where the cache has {cache.layer(number).window}")
    if isinstance(scaling, torch.Tensor) or isinstance(softcap, torch.Tensor):
        raise _refusal(label, "a tensor as softmax scale or soft cap")
    out = cache.attend(number, query, key, value, step, scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
    count(module, implementation, INT8_CACHE, query.device)
    return out, None


def _refusal(label: str, got: str) -> UnsupportedAttentionError:
    error = UnsupportedAttentionError(label, "other")
    error.args = (
        f"generate_batch, {label}: got {got}, expected causal self-attention over INT8 pages; use "
        'model.set_attn_implementation("sdpa") for it',
    )
    return error


batch_in_int8()
