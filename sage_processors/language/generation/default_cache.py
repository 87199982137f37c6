"""An Int8KVCache as the cache that `generate` makes, readable until `generate` ends.

For models with a handle, and for cache_implementation="int8".
"""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin, configuration_utils

from ...reporting.event_counter import collected
from ..kv_cache import Int8KVCache
from ..kv_room import bucket
from ..kv_static_layers import Int8StaticLayer
from ..names import IMPLEMENTATIONS
from .steps import first_line


logger = logging.getLogger("sage_processors")

INT8 = "int8"  # cache_implementation
KEY = ("cache", "past_key_values")  # names of the argument in newer and older versions of transformers


def give_caches() -> None:
    """Let `generate` make an Int8KVCache where one is wanted. Repeating it changes nothing."""
    known = getattr(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", None)
    if isinstance(known, (tuple, list)) and INT8 not in known:
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS = (*known, INT8)
    prepare: Any = vars(GenerationMixin).get("_prepare_cache_for_generation")
    if prepare is not None and not hasattr(prepare, "gives_int8"):
        wrapped: Any = _with_int8(prepare)
        wrapped.gives_int8 = True
        GenerationMixin._prepare_cache_for_generation = wrapped
        GenerationMixin.generate = _in_use(vars(GenerationMixin)["generate"])


def _in_use(generate: Any) -> Any:
    @functools.wraps(generate)
    def generate_in_use(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = _handle_of(self)
        with nullcontext() if handle is None else handle.in_use():
            return generate(self, *args, **kwargs)

    return generate_in_use


def _with_int8(prepare: Any) -> Any:
    @functools.wraps(prepare)
    def _prepare_cache_for_generation(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        mode: Any,
        batch: Any,
        longest: Any,
        *rest: Any,
    ) -> Any:
        given = next((model_kwargs[name] for name in KEY if model_kwargs.get(name) is not None), None)
        if isinstance(given, Int8KVCache) and _handle_of(self) is None:
            from .decode_graphs import start_graphs  # not before transformers is there

            start_graphs(self)
        if isinstance(given, Int8KVCache) and _says_length(generation_config, mode):
            given.make_room(longest)  # at once, and before compiled calls, which can't
        asked = generation_config.cache_implementation
        if (
            given is not None
            or generation_config.use_cache is False
            or asked not in (None, INT8)
            or not _takes(self, asked, _wants_attentions(self, generation_config, model_kwargs))
        ):
            return prepare(self, generation_config, model_kwargs, mode, batch, longest, *rest)
        generation_config.cache_implementation = None
        try:
            result = prepare(self, generation_config, model_kwargs, mode, batch, longest, *rest)
        finally:
            generation_config.cache_implementation = asked
        name = next((name for name in KEY if model_kwargs.get(name) is not None), None)
        if name is None:
            return result
        handle = _handle_of(self)
        if asked is None and _reason_against(self, handle, name):
            handle.ordinary_caches += 1  # transformers' own cache stays
        else:
            model_kwargs[name] = _cache(self, generation_config, mode, longest)
        return result

    return _prepare_cache_for_generation


def _takes(model: Any, asked: Any, attentions: bool) -> bool:
    """True if a model is to get an Int8KVCache. Raises: ValueError for "int8" where it can't be used.

    attentions: True if attention weights are wanted. An Int8KVCache has none, so then only "int8" makes one.
    """
    ours = getattr(model.config, "_attn_implementation", None) in IMPLEMENTATIONS
    fits = ours and not model.config.is_encoder_decoder and model._supports_default_dynamic_cache()
    if asked == INT8 and not fits:
        raise ValueError(
            f'cache_implementation: got "int8" for {type(model).__name__}, expected a decoder with our attention: '
            "call sage_processors.apply(model, sage_processors.SageAttnProcessor()) first"
        )
    return fits and (asked == INT8 or (_handle_of(model) is not None and not attentions))


def _wants_attentions(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> bool:
    """True if a call of `generate`, or the model's config, asks for attention weights."""
    asked = generation_config.output_attentions or model_kwargs.get("output_attentions")
    configs = model.config, model.config.get_text_config(decoder=True)
    return bool(asked or any(getattr(config, "output_attentions", False) for config in configs))


def _handle_of(model: Any) -> Any:
    return getattr(vars(model).get("_sage"), "handle", None)


def _reason_against(model: Any, handle: Any, name: str) -> str:
    """Return why a model can't decode over an Int8KVCache, or "".

    Runs three tokens to find out, once for a handle. A config does not tell: layers may have heads and widths that it
    does not name, and some models do more with stored keys than to hand them to attention. Only what a 16-bit cache
    can do speaks against an INT8 one.
    """
    if handle.cache_reason is None and not model.training:
        handle.cache_reason = _failure(model, name, Int8KVCache)
        if handle.cache_reason and _failure(model, name, DynamicCache):
            handle.cache_reason = ""  # the model takes other inputs than these
        if handle.cache_reason:
            logger.warning("generate: %s", handle.said_of_caches())
    return str(handle.cache_reason or "")


def _failure(model: Any, name: str, kind: Any) -> str:
    """Return the error of a prompt of two tokens and a step with a new cache, without its remedy, or ""."""
    ids = torch.ones(1, 3, dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), collected():
            cache = kind(config=model.config.get_text_config(decoder=True))
            for part in ids.split((2, 1), 1):
                model._call_impl(input_ids=part, use_cache=True, **{name: cache})
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error).partition(';')[0]}"
    return ""


def _cache(model: Any, generation_config: Any, mode: Any, longest: int) -> Any:
    """Return a new cache for one `generate`.

    It has buffers for the whole call if the user said how many new tokens there may be, and makes room for more in a
    later one. Else it grows as it goes. Assisted decoding drops tokens again, which a ring of a sliding window can't.
    """
    said = _says_length(generation_config, mode)
    recording = getattr(generation_config, "is_assistant", False)
    cache = Int8KVCache(model.config, bucket(longest) if said and not recording else None)
    for layer in cache.layers:
        if isinstance(layer, Int8StaticLayer):
            layer.grows = True
    if recording:
        cache.activate_past_recording()
    return cache


def _says_length(generation_config: Any, mode: Any) -> bool:
    """True if the user said how many new tokens a `generate` may make, and none of them are dropped again."""
    return generation_config.max_new_tokens is not None and "assisted" not in str(getattr(mode, "value", mode))


give_caches()  # at the end: an import of transformers from here may import this module again, which is then not ready
