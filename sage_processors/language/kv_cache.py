"""INT8 KV cache for transformers, with half the memory of a 16-bit one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


if not hasattr(DynamicLayer, "get_max_length"):
    raise ImportError(
        f"Int8KVCache: got transformers {transformers.__version__}, expected 5.17 or newer, as it is built on the "
        "cache layers of that version; the rest of sage_processors runs with 5.10.1"
    )

from ..option_checks import flag
from .kv_layers import Int8Layer
from .kv_static_layers import Int8StaticLayer, Int8StaticSlidingLayer
from .quantized_kv import QuantizedKV


# Cache layers without keys and values, which stay transformers' own. Version 5.17 has no DummyLayer.
_OTHER_LAYERS = tuple(
    getattr(cache_utils, name) for name in ("LinearAttentionLayer", "DummyLayer") if hasattr(cache_utils, name)
)
# Models without attention whose configs name no kinds of layers. transformers assumes keys and values for them.
_WITHOUT_KEYS = ("rwkv", "xlstm")


class Offset(int):
    """Position of a mask's first key: an int with its cache.

    `sage_mask` knows the model's config. It is called before anything of a forward is stored.
    """

    cache: Int8KVCache

    def __new__(cls, position: int, cache: Int8KVCache) -> Offset:
        """Return the position as an int of this class."""
        made = super().__new__(cls, position)
        made.cache = cache
        return made


class Int8KVCache(Cache):
    """KV cache for `past_key_values` with INT8 codes and one bf16 scale per token and head.

        model.set_attn_implementation("sage_int8")
        model.generate(**inputs, past_key_values=sp.Int8KVCache(model.config))

    An encoder-decoder model (T5, BART, Whisper) needs one for its decoder's keys and one for its encoder's:

        EncoderDecoderCache(sp.Int8KVCache(model.config), sp.Int8KVCache(model.config))

    Keys are stored minus a centre and times a balance, which the result of attention does not depend on. Both are
    chosen from the first 64 tokens, in however many calls these come: see `kv_vectors`. The config says which layers
    have a sliding window. Attention over the cache needs one of our attention implementations. Any other raises
    Int8KVCacheError. The first update of a layer returns its tokens in 16 bit, as they came.

    Args:
        config: the model's config.
        max_cache_len: None: the cache grows. A number: buffers for that many tokens are allocated once, and decoding
            can be compiled (torch.compile(fullgraph=True)). More tokens raise ValueError.
        offloading, offload_only_non_sliding: as in transformers.DynamicCache.
    Raises: TypeError or ValueError for an invalid argument. NotImplementedError for a config without any attention
        layer, or with a layer whose cache is neither keys and values nor a linear attention state.
    """

    _checked: Any = None  # the config whose sliding windows are known to be those of the layers
    _newest_layer = None  # the layer updated last, since the mask's sizes were asked for
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
                f"config: got {type(config).__name__}, expected a model's config; call Int8KVCache(model.config)"
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
        """Store new tokens [B, H_kv, N, D] of a layer, and return its key and value for attention.

        See `Int8Layer.update`. If it raises, nothing is stored.

        Raises: ValueError if layer, batch, number of heads, head_dim or device differ from the cache's, or for tokens
            beyond max_cache_len. TypeError for an encoder's keys after the decoder's.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx: got {layer_idx}, expected 0 to {len(self.layers) - 1}, as the cache was made for a model "
                f"of {len(self.layers)} layers; make it with Int8KVCache(model.config) of this model"
            )
        if self._has_cross_attention:
            self._refuse_cross_attention(layer_idx)
        layer = self.layers[layer_idx]
        if isinstance(layer, Int8StaticLayer) and layer.grows and not torch.compiler.is_compiling():
            layer._check_model(key_states, value_states)
            tokens = layer._length() + key_states.shape[2]
            if tokens > layer.max_cache_len:
                self.make_room(tokens)
        if self.offloading:
            # transformers 5.17 does not wait: the layer's copy to the CPU may still run, and so may the last read of
            # memory that is about to be used again
            self.prefetch_stream.wait_stream(torch.cuda.default_stream(key_states.device))
            stored = self._all_layers_or_none(
                "update", key_states, value_states, layer_idx, *args, only=layer_idx, **kwargs
            )
            for x in stored:
                if isinstance(x, QuantizedKV):
                    x.owner = self.layers[layer_idx]
            return stored
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def is_compileable(self) -> bool:
        """False: `generate` would compile anew for every cache. torch.compile of a static cache works."""
        return False

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> Any:
        """Return a mask's sizes as transformers' method. Notes that a new forward may have begun."""
        self._newest_layer, self._asked_for_sizes = None, True
        length, offset = super().get_mask_sizes(*args, **kwargs)
        return length, offset if torch.compiler.is_compiling() else Offset(offset, self)

    def check_windows(self, config: Any) -> None:
        """Raise ValueError if a model with this config has other sliding windows than the cache."""
        if config is self._checked:
            return
        wanted = [_window_of(stock) for stock in DynamicCache(config=config.get_text_config(decoder=True)).layers]
        for number, (layer, window) in enumerate(zip(self.layers, wanted, strict=False)):
            if isinstance(layer, Int8Layer) and layer.sliding_window != window:
                raise ValueError(
                    f"sliding_window: got {layer.sliding_window} in layer {number} of the cache, expected {window} as "
                    "in the model's config; make it with Int8KVCache(model.config) of this model"
                )
        self._checked = config

    def reset(self) -> None:
        """Forget all tokens."""
        self._newest_layer = None
        super().reset()

    def _refuse_cross_attention(self, layer_idx: int) -> None:
        """Raise TypeError if an encoder-decoder model uses this cache alone, for both encoder and decoder.

        It then updates each layer twice in one forward: with the decoder's keys, and with the encoder's, which would
        become tokens of the decoder. In an EncoderDecoderCache, only a cache of one layer can see the same layer twice
        in a row. In between, the next forward asks for the mask's sizes, unless its mask is ready-made.
        """
        if layer_idx == self._newest_layer and (len(self.layers) > 1 or self._asked_for_sizes):
            raise TypeError(
                f"past_key_values: got an Int8KVCache by itself in an encoder-decoder model (layer {layer_idx} was "
                "updated twice in one forward, the second time with the encoder's keys), expected "
                "transformers.EncoderDecoderCache(Int8KVCache(model.config), Int8KVCache(model.config)), one cache "
                "for self-attention and one for cross-attention; make a new one, as this one is partly filled"
            )
        self._newest_layer = layer_idx

    # These change all layers or none. The changed layers are kept beside the old ones until all are made. Two INT8
    # caches take no more memory than one 16-bit cache.

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        """Select sequences for beam search, as transformers' method, in all layers or none."""
        self._all_layers_or_none("reorder_cache", *args, **kwargs)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Forget the newest tokens, as transformers' method, in all layers or none."""
        self._all_layers_or_none("crop", *args, **kwargs)

    def batch_repeat_interleave(self, *args: Any, **kwargs: Any) -> None:
        """Repeat each sequence, as transformers' method, in all layers or none."""
        self._all_layers_or_none("batch_repeat_interleave", *args, **kwargs)

    def batch_select_indices(self, *args: Any, **kwargs: Any) -> None:
        """Keep some sequences, as transformers' method, in all layers or none."""
        self._all_layers_or_none("batch_select_indices", *args, **kwargs)

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate buffers before the first update, as transformers' method, in all layers or none."""
        self._all_layers_or_none("early_initialization", *args, **kwargs)

    def make_room(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all where max_cache_len may grow, in all layers or none."""
        growing = [x for x in self.layers if isinstance(x, Int8StaticLayer) and x.grows and tokens > x.max_cache_len]
        trials = [layer._trial() for layer in growing]
        for trial in trials:
            trial.make_room(tokens)
        for layer, trial in zip(growing, trials, strict=True):
            layer._take(trial)

    def _all_layers_or_none(self, name: str, *args: Any, only: int | None = None, **kwargs: Any) -> Any:
        """Call a method of transformers' Cache on a copy; if it succeeds, take over the copy's layers.

        only: the one layer to copy; the method merely moves the others between devices.
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
        """Return the bytes that the cache holds now, including spare room for later tokens."""
        return sum(layer.nbytes() for layer in self.layers if isinstance(layer, Int8Layer))

    def bytes_per_token(self) -> int:
        """Return the bytes of one token of one sequence in all layers, with scales; 0 before the first token."""
        return sum(layer.bytes_per_token() for layer in self.layers if isinstance(layer, Int8Layer))


def _layers(decoder: Any, max_cache_len: int | None) -> list[Any]:
    """Return the layers of transformers' own cache for this config, with INT8 layers for keys and values."""
    model_type = getattr(decoder, "model_type", "")
    stock_layers = DynamicCache(config=decoder).layers
    if model_type in _WITHOUT_KEYS or all(type(stock) in _OTHER_LAYERS for stock in stock_layers):
        raise NotImplementedError(
            f"config: got {type(decoder).__name__} ({model_type}), none of whose layers has keys and values, expected "
            "a model with attention layers, as nothing would be stored in INT8; pass no past_key_values: such a model "
            "keeps a small state of its own"
        )
    heads, dims = _known_sizes(decoder)
    layers = []
    for number, stock in enumerate(stock_layers):
        window = _window_of(stock)
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


def _window_of(stock: Any) -> int | None:
    """Return the sliding window of a layer of transformers' own cache, None without one."""
    window: int | None = stock.sliding_window if type(stock) is DynamicSlidingWindowLayer else None
    return window


def _trial_of(layer: Any) -> Any:
    """Return a layer with the same fields, to be changed in place of this one.

    Sharing the tensors is safe: transformers' own layers of this cache do not write into them in the methods that
    `_all_layers_or_none` runs.
    """
    if isinstance(layer, Int8Layer):
        return layer._trial()
    trial = copy.copy(layer)
    trial.__dict__.update({name: dict(x) for name, x in vars(layer).items() if isinstance(x, dict)})
    return trial


def _known_sizes(decoder: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Return the numbers of key heads and the head_dims in a config; empty sets if the config has none."""
    heads = (getattr(decoder, name, None) for name in ("num_key_value_heads", "num_global_key_value_heads"))
    dims = (getattr(decoder, name, None) for name in ("head_dim", "global_head_dim"))
    numbers = [frozenset(x for x in found if isinstance(x, int)) for found in (heads, dims)]
    return numbers[0], numbers[1]
