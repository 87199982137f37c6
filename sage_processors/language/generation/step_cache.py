"""Static buffers of a decode step, which an Int8KVCache borrows while it decodes.

A CUDA graph reads and writes fixed addresses, and every `generate` has a new cache. So the buffers belong to the
model: the graph is captured over them, and a cache's layers hold them in place of tensors of their own. A cache whose
tensors change in any other way (beam search, more room) simply holds them no longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from sage_kernels import append_kv

from ..kv_layers import BUFFERS, VECTORS, Int8Layer
from ..kv_room import bucket
from ..kv_static_layers import Int8StaticLayer
from ..quantized_kv import QuantizedKV


NAMES = (*BUFFERS, *VECTORS)
MOST_SETS = 4  # sets of buffers that a model keeps


class StepLayer(CacheLayerMixin):
    """One layer's static buffers. `update` stores one token at the position on the device."""

    def __init__(self, step: StepCache, tensors: dict[str, torch.Tensor], ring: bool, dtype: torch.dtype):
        super().__init__()
        self.tensors, self.ring, self.dtype, self._step = tensors, ring, dtype, weakref.proxy(step)
        self.is_sliding, self.is_initialized = ring, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, as the buffers are there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store one token [B, H_kv, 1, D] and return the layer's QuantizedKV twice, as `Int8Layer.update`."""
        own = self.tensors
        buffers, mean, balance = [own[name] for name in BUFFERS], own["k_mean"], own["k_balance"]
        append_kv(
            key_states, value_states, mean, *buffers, position=self._step.seen, ring=self.ring, k_balance=balance
        )
        stored: Any = (*buffers, mean, balance, self._step.after, self.ring, self.dtype, self)
        return (QuantizedKV(*stored),) * 2

    def get_seq_length(self) -> Any:
        """Return the number of tokens before this step, a tensor [] on the device."""
        return self._step.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots, and 0."""
        return self.tensors["k_codes"].shape[2], 0

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.tensors["k_codes"].shape[2]

    def end(self, seen: int) -> Iterator[torch.Tensor]:
        """Yield views of what one token after `seen` others writes."""
        for name in BUFFERS:
            x = self.tensors[name]
            yield x[:, :, seen % x.shape[2]]


class StepCache(Cache):
    """The static buffers of all layers, in the place of the cache that has borrowed them.

    Attributes:
        kind: description of the caches that may borrow them.
        seen, after: int64 [] on the device, number of tokens before and after the step.
        padding: bool [B, slots], False for padding; used by steps with an attention_mask.
        graphs: what was captured over these buffers, by kind of call.
        is_checked: the model was compared with its state at the captures since a cache has borrowed them.
    """

    is_compileable = False

    def __init__(self, kind: Any, layers: list[tuple[dict[str, torch.Tensor], bool, torch.dtype]]):
        super().__init__(layers=[StepLayer(self, *layer) for layer in layers])
        codes = layers[0][0]["k_codes"]
        self.kind, self.graphs, self.is_checked = kind, dict[Any, Any](), False
        self.seen, self.after = (torch.zeros((), dtype=torch.int64, device=codes.device) for _ in range(2))
        slots = min((x["k_codes"].shape[2] for x, ring, _ in layers if not ring), default=0)
        self.padding = torch.ones(codes.shape[0], slots, dtype=torch.bool, device=codes.device)
        self._holders: list[Any] = []
        self._promised: Any = None  # weak reference to the cache that was offered the buffers; None once lent

    def is_held_by(self, cache: Any) -> bool:
        """True if the cache's layers hold these buffers. Runs before every replay, so it is short."""
        if len(self._holders) != len(cache.layers):
            return False
        for holder, layer, own in zip(self._holders, cache.layers, self.layers, strict=True):
            fields = layer.__dict__
            if holder() is not layer or not all(fields[name] is x for name, x in own.tensors.items()):
                return False
        return True

    def is_held(self) -> bool:
        """True if some living layer still holds one of the buffers."""
        for holder, own in zip(self._holders, self.layers, strict=False):  # no holders before the first loan
            layer = holder()
            if layer is not None and any(getattr(layer, name) is x for name, x in own.tensors.items()):
                return True
        return False

    def is_free(self, cache: Any) -> bool:
        """Return True if no other living cache than this one holds the buffers or was offered them."""
        promised = None if self._promised is None else self._promised()
        is_open = promised is not None and any(getattr(layer, "lent", None) is not None for layer in promised.layers)
        return promised is cache or not (is_open or self.is_held())

    def offer(self, cache: Any) -> bool:
        """Offer the buffers to the layers of an empty cache. Returns False if they don't fit.

        The layers take them when they would allocate.
        """
        if len(cache.layers) != len(self.layers) or self.kind[1] != torch.is_inference_mode_enabled():
            return False
        for layer, own in zip(cache.layers, self.layers, strict=True):
            if not isinstance(layer, Int8StaticLayer) or layer.is_initialized or layer.is_sliding != own.ring:
                return False
            if layer._first_capacity() != own.get_max_length():
                return False
        for layer, own in zip(cache.layers, self.layers, strict=True):
            layer.lent = own.tensors
        self._holders, self._promised = [weakref.ref(layer) for layer in cache.layers], weakref.ref(cache)
        self.is_checked = False
        return True

    def lend(self, cache: Any, seen: int) -> None:
        """Give the buffers to a cache with `seen` tokens. If it raises, the cache is unchanged."""
        for layer, own in zip(cache.layers, self.layers, strict=True):
            for name, to in own.tensors.items():
                x = getattr(layer, name)
                if x is to:
                    continue
                number = min(seen, to.shape[2]) if name in BUFFERS else None
                to[:, :, :number].copy_(x[:, :, :number])
        self._holders, self._promised = [weakref.ref(layer) for layer in cache.layers], None
        self.is_checked = False
        for layer, own in zip(cache.layers, self.layers, strict=True):
            layer.__dict__.update(own.tensors)

    def ends(self, seen: int) -> list[torch.Tensor]:
        """Return views of all that the token after `seen` others is stored in."""
        return [x for layer in self.layers for x in layer.end(seen)]


def unfit(cache: Any) -> str:
    """Return the reason why a cache can't borrow static buffers for its next token; "" if it can."""
    if cache.offloading:
        return "offload"
    if cache._has_cross_attention:
        return "encoder_decoder"
    seen, room = None, 1 << 62
    for layer in cache.layers:
        if not isinstance(layer, Int8Layer) or not layer.is_initialized:
            return "layers"
        is_static = isinstance(layer, Int8StaticLayer)
        if layer.is_sliding and not is_static:
            return "window"  # a growing window moves through its buffers; that of a static cache is a ring
        length = length_of(layer)
        if seen not in (None, length):
            return "layers"
        if not (layer.is_settled if is_static else layer.first_keys is None):
            return "first_tokens"
        seen = length
        if is_static and (not layer.is_sliding or layer.sliding_window > layer.max_cache_len):
            room = min(room, layer.max_cache_len)  # a ring that is shorter than its window must not go round
    return "full" if seen is None or seen + 1 > room else ""


def length_of(layer: Any) -> int:
    """Return the number of tokens that a layer has seen. Waits for the device after compiled calls alone."""
    return int(layer._length() if isinstance(layer, Int8StaticLayer) else layer.cumulative_length)


def count_token(cache: Any, seen: int) -> None:
    """Tell a cache's layers that their buffers hold one token more than `seen`. Can't fail."""
    for layer in cache.layers:
        if isinstance(layer, Int8StaticLayer):
            layer.note_token(seen + 1)
        else:
            layer.end = layer.cumulative_length = seen + 1


class Buffers:
    """All sets of static buffers of a model, each lent to one cache at a time."""

    def __init__(self) -> None:
        self.sets: list[StepCache] = []

    def offer(self, cache: Any) -> None:
        """Offer the buffers of a cache that is gone to an empty static cache.

        Else its prompt would need others beside them.
        """
        if cache.offloading or cache._has_cross_attention:  # never decodes from graphs
            return
        for one in self.sets:
            if one.is_free(cache) and one.offer(cache):
                return

    def borrow(self, cache: Any) -> StepCache | None:
        """Return the set that a cache holds, or borrows now. None if all are lent to living caches.

        A static cache gives its own tensors if there is no free set: nothing is copied then. A cache that has grown
        since it borrowed a set still holds a part of that set's tensors, and gives copies of these.
        """
        seen = length_of(cache.layers[0])
        held = next((one for one in self.sets if one.is_held_by(cache)), None)
        if held is not None and all(x.ring or seen < x.tensors["k_codes"].shape[2] for x in held.layers):
            self._used(held)
            return held
        kind = tuple(_kind(layer, seen) for layer in cache.layers), torch.is_inference_mode_enabled()
        found = next((one for one in self.sets if one.kind == kind and one.is_free(cache)), None)
        if found is None:
            free = [one for one in self.sets if one.is_free(cache) or one is held]
            if len(self.sets) >= MOST_SETS:
                if not free:
                    return None
                self.sets.remove(free[0])
            taken = {id(x) for one in self.sets for own in one.layers for x in own.tensors.values()}
            found = StepCache(
                kind, [(_tensors(layer, seen, taken), layer.is_sliding, layer.dtype) for layer in cache.layers]
            )
            found.lend(cache, seen)
            self.sets.append(found)
        else:
            found.lend(cache, seen)
            self._used(found)
        return found

    def _used(self, one: StepCache) -> None:
        """Make a set the last one to be dropped."""
        self.sets.remove(one)
        self.sets.append(one)


def _capacity(layer: Any, seen: int) -> int:
    return int(layer.k_codes.shape[2]) if isinstance(layer, Int8StaticLayer) else bucket(seen + 1)


def _kind(layer: Any, seen: int) -> Any:
    shape = (*layer.k_codes.shape[:2], layer.head_dim, _capacity(layer, seen))
    return type(layer), shape, layer.dtype, layer.device, layer.is_sliding


def _tensors(layer: Any, seen: int, taken: set[int]) -> dict[str, torch.Tensor]:
    """Return the tensors of a new set. taken: ids of those that belong to another one."""
    if isinstance(layer, Int8StaticLayer):
        own = {name: getattr(layer, name) for name in NAMES}
        return {name: torch.empty_like(x) if id(x) in taken else x for name, x in own.items()}
    found = {}
    for name in NAMES:
        x = getattr(layer, name)
        shape = list(x.shape)
        if name in BUFFERS:
            shape[2] = _capacity(layer, seen)
        found[name] = torch.empty(shape, dtype=x.dtype, device=x.device)
    return found
