"""Preallocated layers of an Int8KVCache: every address and shape stays, so decoding compiles to one graph.

The number of tokens lives on the device, where the kernels read it; the host knows it except after compiled calls.
"""

from __future__ import annotations

import torch

from sage_kernels import append_kv

from .kv_layers import BUFFERS, Int8Layer, smoothing_vector
from .stored_kv import StoredKV


class Int8StaticLayer(Int8Layer):
    """Room for max_cache_len tokens, allocated at the first update (or by Cache.early_initialization)."""

    is_compileable = True

    def __init__(self, max_cache_len: int, heads: frozenset = frozenset(), dims: frozenset = frozenset()):
        super().__init__(heads, dims)
        self.max_cache_len = max_cache_len
        self.is_empty = True
        self.cumulative_length = torch.tensor(0)
        self._host_length = 0  # None: compiled calls have added tokens, only the device knows how many

    def get_seq_length(self):
        """Tokens seen: a tensor [] on the device once there are buffers, so that compiled models don't specialise."""
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `Int8Layer.get_mask_sizes`; raises ValueError if `query_length` tokens do not fit any more."""
        if not torch.compiler.is_compiling():
            self._check_room(query_length)
        return (query_length if self.is_empty else self.max_cache_len), 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """As `Int8Layer.update`. Raises ValueError if the tokens do not fit; in a compiled call, where the host does
        not know, they are then not written and attention gives NaN."""
        self._prepare(key_states, value_states)
        number = key_states.shape[2]
        if torch.compiler.is_compiling():
            self._host_length = None
        else:
            self._check_room(number)
            self._host_length += number
        if self.is_empty:
            self.k_mean.copy_(smoothing_vector(key_states))
        self._write(key_states, value_states)
        self.cumulative_length.add_(number)
        if self.is_empty:
            self.is_empty = False
            return key_states, value_states
        return (self._stored(0),) * 2

    def crop(self, tokens_to_remove: int) -> None:
        number = self._checked_crop(tokens_to_remove)
        if self.is_initialized and number:
            self._host_length = self._length() - number
            self.cumulative_length.sub_(number)
            self.is_empty = self._host_length == 0

    def reset(self) -> None:
        """Forget the tokens; the buffers stay where they are."""
        self.cumulative_length.zero_()
        self._host_length = 0
        self.is_empty = True

    def activate_past_recording(self) -> None:
        """Nothing to do: a crop finds all tokens still there."""

    @property
    def keys(self) -> StoredKV | None:
        return self._stored(0) if self.is_initialized and not self.is_empty else None

    @keys.setter
    def keys(self, value) -> None:
        Int8Layer.keys.fset(self, value)

    values = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.cumulative_length = self.cumulative_length.to(self.device)
        self._pin()

    def _pin(self) -> None:
        """Tell Dynamo that the addresses stay, without which there are no CUDA graphs."""
        if not torch.compiler.is_compiling():
            for x in (*self._tensors().values(), self.cumulative_length):
                torch._dynamo.mark_static_address(x)

    def _first_capacity(self) -> int:
        return self.max_cache_len

    def _length(self) -> int:
        if self._host_length is None:
            self._host_length = int(self.cumulative_length)
        return self._host_length

    def _check_room(self, number: int) -> None:
        if self._length() + number > self.max_cache_len:
            raise ValueError(
                f"key_states: got {number} tokens after {self._length()}, expected at most {self.max_cache_len} in "
                "all: make the cache with a larger max_cache_len, or call reset()"
            )

    def _write(self, key_states, value_states) -> None:
        buffers = (getattr(self, name) for name in BUFFERS)
        append_kv(key_states, value_states, self.k_mean, *buffers, position=self.cumulative_length)

    def _stored(self, begin: int) -> StoredKV:
        buffers = (getattr(self, name) for name in BUFFERS)
        return StoredKV(*buffers, self.k_mean, self.cumulative_length, False, self.dtype, self)

    def _map_batch(self, change) -> None:
        """In place where the batch stays, so that compiled code stays valid."""
        if not self.is_initialized:
            return
        changed = {name: change(x) for name, x in self._tensors().items()}
        for name, x in changed.items():
            if x.shape == getattr(self, name).shape:
                getattr(self, name).copy_(x)
            else:
                setattr(self, name, x)
        if self.k_codes.shape[0] != self.batch_size:
            self.batch_size = self.k_codes.shape[0]
            self._pin()


class Int8StaticSlidingLayer(Int8StaticLayer):
    """A ring of the last min(sliding_window, max_cache_len) tokens: a new token takes the place of the oldest.

    The host counts its tokens in compiled calls too (the mask's offset is a number), as transformers' own layer does.
    """

    is_croppable = False

    def __init__(self, max_cache_len: int, sliding_window: int, heads=frozenset(), dims=frozenset()):
        super().__init__(max_cache_len, heads, dims)
        self.sliding_window = sliding_window
        self.is_sliding = True
        self.ring = min(sliding_window, max_cache_len)

    def get_seq_length(self):
        return self._host_length

    def get_max_length(self) -> int:
        return self.ring

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self._check_room(query_length)
        seen = self._host_length
        first = max(seen - self.ring + 1, 0)
        if self.is_empty:
            return query_length, 0
        if self._fits(query_length):
            return self.ring, first
        return min(seen, self.ring - 1) + query_length, first

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """As `Int8StaticLayer.update`. Several tokens that overwrite what their own windows reach are attended to in a
        chronological copy of the ring's codes."""
        self._prepare(key_states, value_states)
        number = key_states.shape[2]
        self._check_room(number)
        first = self.is_empty
        chronological = None
        if first:
            self.k_mean.copy_(smoothing_vector(key_states))
            self.is_empty = False
        elif not self._fits(number):
            chronological = self._chronological(key_states, value_states)
            if number >= self.ring:  # nothing old is left
                self.k_mean.copy_(smoothing_vector(key_states))
        self._write(key_states, value_states)
        self.cumulative_length.add_(number)
        self._host_length += number
        if first:
            return key_states, value_states
        return (self._stored(0) if chronological is None else chronological,) * 2

    def crop(self, tokens_to_remove: int) -> None:
        number = self._checked_crop(tokens_to_remove)
        if number and self._host_length > self.ring:
            raise RuntimeError(
                f"crop: got {tokens_to_remove} on a ring of {self.ring} that has gone round, expected fewer tokens "
                "seen: what they replaced is gone; use Int8KVCache(config) without max_cache_len"
            )
        super().crop(tokens_to_remove)

    def _first_capacity(self) -> int:
        return self.ring

    def _check_room(self, number: int) -> None:
        if self.sliding_window > self.max_cache_len:  # else the ring may go round for ever
            super()._check_room(number)

    def _fits(self, number: int) -> bool:
        """Whether `number` more tokens overwrite nothing that one of their own windows reaches."""
        return number == 1 or self._host_length + number <= self.ring

    def _chronological(self, key_states, value_states) -> StoredKV:
        kept, number = min(self._host_length, self.ring - 1), key_states.shape[2]
        slots = torch.arange(self._host_length - kept, self._host_length, device=self.device) % self.ring
        mean = self.k_mean.clone()
        buffers = []
        for name in BUFFERS:
            old = getattr(self, name)
            new = torch.empty(*old.shape[:2], kept + number, *old.shape[3:], dtype=old.dtype, device=old.device)
            new[:, :, :kept] = old.index_select(2, slots)
            buffers.append(new)
        append_kv(key_states, value_states, mean, *buffers, position=kept)
        return StoredKV(*buffers, mean, None, False, self.dtype, self)

    def _write(self, key_states, value_states) -> None:
        skipped = max(key_states.shape[2] - self.ring, 0)
        buffers = (getattr(self, name) for name in BUFFERS)
        append_kv(
            key_states[:, :, skipped:], value_states[:, :, skipped:], self.k_mean, *buffers,
            position=self.cumulative_length + skipped, ring=True,
        )  # fmt: skip

    def _stored(self, begin: int) -> StoredKV:
        stored = super()._stored(begin)
        stored.ring = True
        return stored
