"""An INT8 KV cache for transformers: half the memory of a 16-bit one, read by the attention kernel as it is."""

from __future__ import annotations

import copy
from typing import Any

import torch


try:
    import transformers
    from transformers import cache_utils
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:
    raise ImportError(
        'sage_processors.language.kv_cache needs transformers: pip install "sage-processors[transformers]"'
    ) from error

if not hasattr(DynamicLayer, "get_max_length"):
    raise ImportError(
        f"Int8KVCache: got transformers {transformers.__version__}, expected 5.17 or newer, whose cache layers it "
        "follows; the rest of sage_processors runs with 5.10.1"
    )

from ..option_checks import flag
from .kv_layers import Int8Layer
from .kv_static_layers import Int8StaticLayer, Int8StaticSlidingLayer
from .quantized_kv import Int8KVCacheError, QuantizedKV, attend, quantized_kv_of


# Layers that hold no keys and values stay transformers' own. Which there are depends on its version: 5.17 knows no
# DummyLayer.
_OTHER_LAYERS = tuple(
    getattr(cache_utils, name) for name in ("LinearAttentionLayer", "DummyLayer") if hasattr(cache_utils, name)
)
# Models without attention whose configs name no kinds of layers: transformers takes them to have keys and values.
_WITHOUT_KEYS = ("rwkv", "xlstm")
__all__ = ["Int8KVCache", "Int8KVCacheError", "QuantizedKV", "attend", "quantized_kv_of"]


class Int8KVCache(Cache):
    """`past_key_values` whose attention layers hold INT8 codes and bf16 scales per token and head.

        model.set_attn_implementation("sage_int8")
        model.generate(**inputs, past_key_values=sp.Int8KVCache(model.config))

    For an encoder-decoder model (T5, BART, Whisper), whose encoder's keys never change, one cache for each:

        EncoderDecoderCache(sp.Int8KVCache(model.config), sp.Int8KVCache(model.config))

    The keys of a head are stored minus a centre and with balanced channels (softmax sees neither), both chosen by the
    first 64 tokens, however they come: see `kv_vectors`. Which layers slide is read from the config. Attention over
    the cache needs our attention implementation; any other raises Int8KVCacheError when it touches the cache. The
    first update of a layer returns its tokens as they came.

    Args:
        config: the model's config.
        max_cache_len: None: the cache grows. A number: buffers for so many tokens are allocated once, and decoding
            compiles (torch.compile(fullgraph=True)); more tokens raise ValueError.
        offloading, offload_only_non_sliding: as for transformers.DynamicCache.
    Raises: TypeError, ValueError for arguments; NotImplementedError for a config with layers whose cache is neither
        keys and values nor a linear attention state, or without any layer that has keys and values.
    """

    _newest_layer = None  # that was updated, since the sizes of a mask were asked for
    _asked_for_sizes = False

    def __init__(
        self,
        config: Any,
        max_cache_len: int | None = None,
        *,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise TypeError(
                f"config: got {type(config).__name__}, expected a model's config: Int8KVCache(model.config)"
            )
        if max_cache_len is not None:
            if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int):
                raise TypeError(f"max_cache_len: got {type(max_cache_len).__name__}, expected an int or None")
            if max_cache_len < 1:
                raise ValueError(f"max_cache_len: got {max_cache_len}, expected at least 1, or None to grow")
        flag("offloading", offloading)
        flag("offload_only_non_sliding", offload_only_non_sliding)
        decoder = config.get_text_config(decoder=True)
        super().__init__(
            layers=_layers(decoder, max_cache_len),
            offloading=offloading,
            offload_only_non_sliding=offload_only_non_sliding,
        )
        flags = ((config, "is_encoder_decoder"), (decoder, "is_encoder_decoder"), (decoder, "add_cross_attention"))
        self._has_cross_attention = any(getattr(of, name, False) for of, name in flags)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Store new tokens [B, H_kv, N, D] of a layer. Returns its key and value for attention: see `Int8Layer`.

        Raises: ValueError for a layer, batch, head count, head_dim or device that is not the cache's, or for tokens
        beyond max_cache_len; TypeError for an encoder's keys after the decoder's; nothing is stored then.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx: got {layer_idx}, expected 0 to {len(self.layers) - 1}: the cache was made for a model of "
                f"{len(self.layers)} layers; make it with Int8KVCache(model.config) of this model"
            )
        if self._has_cross_attention:
            self._refuse_cross_attention(layer_idx)
        if self.offloading:
            # older versions of transformers (5.17) do not: the layer's copy to the CPU, and the last read of memory
            # that is about to be used again, may still be under way
            self.prefetch_stream.wait_stream(torch.cuda.default_stream(key_states.device))
            stored = self._all_layers_or_none(
                "update", key_states, value_states, layer_idx, *args, only=layer_idx, **kwargs
            )
            for x in stored:
                if isinstance(x, QuantizedKV):
                    x.owner = self.layers[layer_idx]
            return stored
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> Any:
        self._newest_layer, self._asked_for_sizes = None, True
        return super().get_mask_sizes(*args, **kwargs)

    def reset(self) -> None:
        self._newest_layer = None
        super().reset()

    def _refuse_cross_attention(self, layer_idx: int) -> None:
        """Raise where a layer is updated twice in one forward: an encoder-decoder model was given this cache alone.

        It updates each layer with the decoder's keys and then with the encoder's, which would become tokens of the
        decoder. In an EncoderDecoderCache a layer comes twice in a row only if there is but one, and then a mask's
        sizes are asked for between: a forward begins with that, unless its mask is ready-made.
        """
        if layer_idx == self._newest_layer and (len(self.layers) > 1 or self._asked_for_sizes):
            raise TypeError(
                f"past_key_values: got an Int8KVCache by itself in an encoder-decoder model (layer {layer_idx} was "
                "updated twice in one forward, the second time with what the encoder made), expected "
                "transformers.EncoderDecoderCache(Int8KVCache(model.config), Int8KVCache(model.config)), one cache "
                "for self-attention and one for cross-attention; make a new one, as this one is half filled"
            )
        self._newest_layer = layer_idx

    # Of all layers or of none: what an operation makes of a layer is held beside the layer until all are made. That
    # takes room for a second cache, which still is no more than a 16-bit one takes by itself.

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        self._all_layers_or_none("reorder_cache", *args, **kwargs)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self._all_layers_or_none("crop", *args, **kwargs)

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> None:
        self._all_layers_or_none("batch_repeat_interleave", *args, **kwargs)

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> None:
        self._all_layers_or_none("batch_select_indices", *args, **kwargs)

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        self._all_layers_or_none("early_initialization", *args, **kwargs)

    def _all_layers_or_none(self, name: str, *args: Any, only: int | None = None, **kwargs: Any) -> Any:
        """transformers' method on a copy of the cache, whose layers' fields are then taken over.

        only: the one layer that may not stay half changed; the others are merely moved between devices.
        """
        trial = copy.copy(self)
        chosen = range(len(self.layers)) if only is None else (only,)
        trial.layers = list(self.layers)
        for i in chosen:
            trial.layers[i] = _trial_of(self.layers[i])
        result = getattr(Cache, name)(trial, *args, **kwargs)
        for i in chosen:
            if isinstance(self.layers[i], Int8Layer):
                self.layers[i]._take(trial.layers[i])
            else:
                self.layers[i].__dict__.update(trial.layers[i].__dict__)
        return result

    def nbytes(self) -> int:
        """Bytes that the cache holds now, room for tokens to come included."""
        return sum(layer.nbytes() for layer in self.layers if isinstance(layer, Int8Layer))

    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes in all layers together, scales included; 0 before the first."""
        return sum(layer.bytes_per_token() for layer in self.layers if isinstance(layer, Int8Layer))


def _layers(decoder: Any, max_cache_len: int | None) -> list[Any]:
    """Our layers where transformers' own cache for this config has keys and values, its own where it has a state."""
    model_type = getattr(decoder, "model_type", "")
    stock_layers = DynamicCache(config=decoder).layers
    if model_type in _WITHOUT_KEYS or all(type(stock) in _OTHER_LAYERS for stock in stock_layers):
        raise NotImplementedError(
            f"config: got {type(decoder).__name__} ({model_type}), none of whose layers has keys and values, expected "
            "a model with attention layers: nothing would be stored in INT8. Such a model keeps a small state of its "
            "own: pass no past_key_values"
        )
    heads, dims = _known_sizes(decoder)
    layers = []
    for number, stock in enumerate(stock_layers):
        window = stock.sliding_window if type(stock) is DynamicSlidingWindowLayer else None
        if type(stock) in _OTHER_LAYERS:
            layers.append(stock)
        elif type(stock) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise NotImplementedError(
                f"config: got a {type(stock).__name__} in layer {number}, expected full, sliding or linear attention; "
                "pass transformers.DynamicCache for this model"
            )
        elif max_cache_len is None:
            layers.append(Int8Layer(heads, dims, window))
        elif window is None:
            layers.append(Int8StaticLayer(max_cache_len, heads, dims))
        else:
            layers.append(Int8StaticSlidingLayer(max_cache_len, window, heads, dims))
    return layers


def _trial_of(layer: Any) -> Any:
    """A layer with the same fields, to be changed in this one's place. None of transformers' layers that can be here
    writes into its tensors in what `_all_layers_or_none` runs."""
    if isinstance(layer, Int8Layer):
        return layer._trial()
    trial = copy.copy(layer)
    trial.__dict__.update({name: dict(x) for name, x in vars(layer).items() if isinstance(x, dict)})
    return trial


def _known_sizes(decoder: Any) -> tuple[frozenset[int], frozenset[int]]:
    """The key/value head counts and head_dims that a config names; empty where it leaves them to the model."""
    heads = (getattr(decoder, name, None) for name in ("num_key_value_heads", "num_global_key_value_heads"))
    dims = (getattr(decoder, name, None) for name in ("head_dim", "global_head_dim"))
    numbers = [frozenset(x for x in found if isinstance(x, int)) for found in (heads, dims)]
    return numbers[0], numbers[1]
