"""Preallocated layers of an Int8KVCache, with fixed addresses and shapes for compiled decoding.

The number of tokens is on the device, where kernels read it. The host knows it too, except after compiled calls.
"""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels import append_kv
from sage_kernels.compat import mark_static_address

from .kv_layers import BUFFERS, FIRST, VECTORS, Int8Layer
from .kv_room import bucket
from .kv_vectors import FIRST_TOKENS, choose_vectors, must_choose_again
from .quantized_kv import QuantizedKV


class Int8StaticLayer(Int8Layer):
    """Cache layer with room for max_cache_len tokens, allocated at the first update.

    Cache.early_initialization allocates it earlier.

    Attributes:
        lent: {name: tensor} to take in place of new buffers, if their shapes fit; None without. Decode graphs lend
            those of a cache that is gone (generation/step_cache.py).
        grows: True if max_cache_len is the room for now, and `Int8KVCache.make_room` may raise it. False if it is a
            limit that the user chose.
    """

    is_compileable = True
    lent: dict[str, torch.Tensor] | None = None
    grows = False
    _how_to_restart = "make a new Int8KVCache: reset() keeps the buffers of a static one as they are"

    def __init__(self, max_cache_len: int, heads: frozenset = frozenset(), dims: frozenset = frozenset()):
        super().__init__(heads, dims)
        self.max_cache_len = max_cache_len
        self.is_empty = True
        self.is_settled = False  # True once centre and balance are fixed
        self.cumulative_length = torch.tensor(0, dtype=torch.int64, device="cpu")
        # None: compiled calls have added tokens, and only the device knows how many
        self._host_length: Any = 0
        self._is_behind = False  # True: only the host has counted the newest tokens

    def get_seq_length(self):
        """Return the number of tokens seen.

        It is 0 before the buffers are allocated, and then a tensor [] on the device, so compiled models don't
        specialise on it.
        """
        self._catch_up()
        return self.cumulative_length if self.is_initialized else 0

    def note_token(self, length: int) -> None:
        """Note that a CUDA graph has stored a token, the last of `length`. The device is told when it matters."""
        self._host_length, self._is_behind, self.is_empty = length, True, False

    def _catch_up(self) -> None:
        """Write the number of tokens to the device, if only the host knows it."""
        if self._is_behind:
            self.cumulative_length.fill_(self._host_length)
            self._is_behind = False

    def get_max_length(self) -> int:
        """Return max_cache_len."""
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the same as `Int8Layer.get_mask_sizes`. Raises ValueError if the tokens do not fit."""
        room = self.max_cache_len if torch.compiler.is_compiling() else self._room_for(query_length)
        return (query_length if self.is_empty else room), 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store new tokens, as `Int8Layer.update`. Raises ValueError if they do not fit.

        In a compiled call the host can't tell that they do not fit. They are then not written, and attention returns
        NaN.
        """
        self._catch_up()
        trial = self._trial()
        as_they_came = key_states, value_states
        key_states, value_states = trial._prepare(key_states, value_states)
        number = key_states.shape[2]
        if self.is_sliding or not torch.compiler.is_compiling():
            trial._check_room(number)
        first = self.is_empty
        again = trial._ready_vectors(key_states, value_states, first)
        chronological = None if first else trial._chronological(key_states, value_states, self, again)
        # a trial shares its buffers with another layer, and a ring overwrites tokens in them
        if self._is_trial and (self.is_sliding or again is not None):
            trial._map(torch.clone)
        trial._write(key_states, value_states)
        self._take(trial)
        self._settle(key_states, value_states, first, again)
        self._count(number)
        if first:
            return as_they_came
        return (self._stored(0, self) if chronological is None else chronological,) * 2

    def _chronological(self, key_states, value_states, owner, again) -> QuantizedKV | None:
        """Return None: storing new tokens overwrites nothing that they see. A ring of slots overrides this."""
        return None

    def _ready_vectors(self, key_states, value_states, first: bool):
        """Choose centre and balance, if they are not fixed yet.

        Returns: new buffers for the older tokens, quantised with the new vectors. None if these tokens stay as they
            are, or have already been quantised again in place.
        """
        if first:
            self._choose_vectors(key_states, value_states)
        elif self.is_settled:
            pass
        elif torch.compiler.is_compiling():
            self._store_again_compiled(key_states, value_states)
        elif must_choose_again(self._length(), key_states.shape[2], self._first_tokens()):
            keys, values = (x[:, :, : self._length()] for x in self._first())
            self._choose_vectors(torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2))
            again = tuple(x[:, :, : self._length()].clone() for x in self._buffers())
            append_kv(keys, values, self.k_mean, *again, position=0, k_balance=self.k_balance)
            return again
        return None

    def _store_again_compiled(self, key_states, value_states) -> None:
        """Choose centre and balance again and requantise the first tokens, with fixed shapes and in place.

        In compiled code the host does not know the number of tokens, so this runs in each call. If it is not the time
        to choose again, it changes nothing.
        """
        seen, number = self.cumulative_length, key_states.shape[2]
        slots = torch.arange(self._first_tokens(), device=self.device)
        source = slots - seen
        for held, new in zip(self._first(), (key_states, value_states), strict=True):
            rows = new.detach().index_select(2, source.clamp(0, number - 1)).to(held.dtype)
            held.copy_(torch.where(((source >= 0) & (source < number))[:, None], rows, held))
        anew = must_choose_again(seen, number, self._first_tokens())
        chosen = choose_vectors(*self._first(), slots < seen + number, first_stays=not self.is_sliding)
        for vector, new in zip((self.k_mean, self.k_balance), chosen, strict=True):
            vector.copy_(torch.where(anew, new, vector))
        # if the vectors stay, the position is after the end of the buffers, where nothing is written
        position = torch.where(anew, 0, self.k_codes.shape[2])
        keys, values = self._first()
        append_kv(keys, values, self.k_mean, *self._buffers(), position=position, k_balance=self.k_balance)

    def _settle(self, key_states, value_states, first: bool, again) -> None:
        """Write back requantised older tokens, and keep new ones in 16 bit if they are among the first.

        again: the result of `_ready_vectors`. Allocates nothing.
        """
        compiling = torch.compiler.is_compiling()
        if not first and (self.is_settled or (compiling and not self.is_sliding)):
            return
        begin, number, capacity = 0 if first else self._length(), key_states.shape[2], self._first_tokens()
        overwritten = max(begin + number - self.k_codes.shape[2], 0)  # slots of a ring that new tokens took
        for buffer, x in zip(self._buffers(), again or (), strict=False):
            buffer[:, :, overwritten:begin].copy_(x[:, :, overwritten:])
        if first or not compiling:
            for held, x in zip(self._first(), (key_states, value_states), strict=True):
                held[:, :, begin : begin + number].copy_(x.detach()[:, :, : max(capacity - begin, 0)])
        self.is_settled = begin + number >= capacity

    def _choose_vectors(self, key_states, value_states) -> None:
        if torch.compiler.is_compiling():  # there is no trial copy, so in place
            mean, balance = choose_vectors(key_states, value_states, first_stays=not self.is_sliding)
            self.k_mean.copy_(mean)
            self.k_balance.copy_(balance)
        else:
            super()._choose_vectors(key_states, value_states)

    def _count(self, number: int) -> None:
        """Add `number` to the number of tokens. Allocates nothing, except in a trial."""
        if self._is_trial:
            self.cumulative_length = self.cumulative_length + number
        else:
            self.cumulative_length.add_(number)
        if torch.compiler.is_compiling() and not self.is_sliding:
            self._host_length = None
        else:
            self._host_length += number
        self.is_empty = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -tokens_to_remove tokens. tokens_to_remove: an int <= 0."""
        number = self._checked_crop(tokens_to_remove)
        self._catch_up()
        if self.is_initialized and number:
            length = self._length() - number
            fields: dict[str, Any] = {"_host_length": length, "is_empty": length == 0}
            fields["is_settled"] = (
                self.is_settled and length >= self._first_tokens()
            )  # the first tokens are still held
            fields["cumulative_length"] = torch.full_like(self.cumulative_length, length)
            self._all_or_nothing(lambda trial: trial.__dict__.update(fields))

    def reset(self) -> None:
        """Forget all tokens. The buffers stay allocated."""
        self.cumulative_length.zero_()
        self._host_length, self._is_behind = 0, False
        self.is_empty, self.is_settled = True, False

    def activate_past_recording(self) -> None:
        """Do nothing, as this layer keeps all tokens anyway."""

    @property
    def keys(self) -> QuantizedKV | None:
        """The layer's tokens for attention, both as keys and as values; None before the first token."""
        return self._stored(0, self) if self.is_initialized and not self.is_empty else None

    @keys.setter
    def keys(self, value) -> None:
        Int8Layer.keys.fset(self, value)  # type: ignore[attr-defined]

    values = keys

    def _allocate(self, capacity: int) -> None:
        shape = (self.batch_size, self.num_heads, capacity, self.head_dim)
        lent, self.lent = self.lent, None
        if lent is None or (lent["k_codes"].shape, lent["k_codes"].device) != (shape, self.device):
            super()._allocate(capacity)
        else:
            self.__dict__.update((name, lent[name]) for name in BUFFERS)

    def _initialize(self, key_states, value_states) -> None:
        super()._initialize(key_states, value_states)
        self.cumulative_length = self.cumulative_length.to(self.device)
        shape = (self.batch_size, self.num_heads, self._first_tokens(), self.head_dim)
        self.first_keys, self.first_values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in FIRST)

    def _pin(self) -> None:
        """Mark the tensors' addresses as fixed for Dynamo, so that it can use CUDA graphs."""
        if not torch.compiler.is_compiling():
            for x in (*self._tensors().values(), self.cumulative_length):
                mark_static_address(x)

    def _first_capacity(self) -> int:
        return self.max_cache_len

    def _first_tokens(self) -> int:
        return min(FIRST_TOKENS, self._first_capacity())

    def _length(self) -> int:
        if self._host_length is None:
            self._host_length = int(self.cumulative_length)
        return self._host_length

    def make_room(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all, in new buffers if necessary."""
        before, old = self._first_capacity(), self._buffers()
        self.max_cache_len = max(self.max_cache_len, bucket(tokens))
        if self.is_initialized and self._first_capacity() != before:
            self._allocate(self._first_capacity())
            for new, x in zip(self._buffers(), old, strict=True):
                new[:, :, : self._length()] = x[:, :, : self._length()]

    def _room_for(self, number: int) -> int:
        """Return max_cache_len as it is once `number` more tokens are stored."""
        if self.grows and self._length() + number > self.max_cache_len:
            return bucket(self._length() + number)
        self._check_room(number)
        return self.max_cache_len

    def _check_room(self, number: int) -> None:
        if self._length() + number > self.max_cache_len:
            raise ValueError(
                f"key_states: got {number} tokens after {self._length()}, expected at most {self.max_cache_len} in "
                "all; make the cache with a larger max_cache_len, or call reset()"
            )

    def _write(self, key_states, value_states) -> None:
        append_kv(
            key_states, value_states, self.k_mean, *self._buffers(), position=self.cumulative_length,
            k_balance=self.k_balance,
        )  # fmt: skip

    def _stored(self, begin: int, owner) -> QuantizedKV:
        self._catch_up()
        vectors = (self.k_mean, self.k_balance)
        parts = [*self._buffers(), *vectors, self.cumulative_length, self.is_sliding, self.dtype, owner]
        return QuantizedKV(*parts)

    def _take(self, trial) -> None:
        """Take over the fields of `trial`, in place if shapes allow, so that compiled code stays valid."""
        if trial is self:
            return
        moved = False
        for name in (*BUFFERS, *VECTORS, *FIRST, "cumulative_length"):
            old, new = getattr(self, name), getattr(trial, name)
            if new is old:
                continue
            if self._is_trial or old is None or (old.shape, old.device) != (new.shape, new.device):
                moved = True
                setattr(self, name, new)
            else:
                old.copy_(new)
                setattr(trial, name, old)
        super()._take(trial)
        if moved:
            self._pin()


class Int8StaticSlidingLayer(Int8StaticLayer):
    """Ring buffer of the last min(sliding_window, max_cache_len) tokens.

    A new token takes the slot of the oldest. The host counts tokens in compiled calls too, as transformers' own layer
    does, because the mask's offset is an int.
    """

    is_croppable = False

    def __init__(self, max_cache_len: int, sliding_window: int, heads=frozenset(), dims=frozenset()):
        super().__init__(max_cache_len, heads, dims)
        self.sliding_window = sliding_window
        self.is_sliding = True

    @property
    def ring(self) -> int:
        """Number of slots."""
        return min(self.sliding_window, self.max_cache_len)

    def get_seq_length(self):
        """Return the number of tokens seen, an int."""
        return self._host_length

    def get_max_length(self) -> int:
        """Return the number of slots of the ring."""
        return self.ring

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the same as `Int8Layer.get_mask_sizes`. Raises ValueError if the tokens do not fit."""
        ring, seen = min(self.sliding_window, self._room_for(query_length)), self._host_length
        first = max(seen - ring + 1, 0)
        if self.is_empty:
            return query_length, 0
        if self._fits(query_length, ring):
            return ring, first
        return min(seen, ring - 1) + query_length, first

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -tokens_to_remove tokens.

        Raises: RuntimeError if the ring has overwritten older tokens.
        """
        number = self._checked_crop(tokens_to_remove)
        if number and self._host_length > self.ring:
            raise RuntimeError(
                f"crop: got {tokens_to_remove} on a ring of {self.ring} that has gone round, expected fewer tokens, "
                "as it has overwritten older ones; use Int8KVCache(config) without max_cache_len"
            )
        super().crop(tokens_to_remove)

    def _first_capacity(self) -> int:
        return self.ring

    def _check_room(self, number: int) -> None:
        if self.sliding_window > self.max_cache_len:  # otherwise the ring may go round any number of times
            super()._check_room(number)

    def _fits(self, number: int, ring: int) -> bool:
        """True if `number` more tokens in `ring` slots overwrite no token that one of them still sees."""
        return number == 1 or self._host_length + number <= ring

    def _chronological(self, key_states, value_states, owner, again) -> QuantizedKV | None:
        """Return a copy of the codes that the new tokens see, in order of age, if they overwrite any of them.

        If no older token is left then, centre and balance are chosen again.
        """
        kept, number = min(self._host_length, self.ring - 1), key_states.shape[2]
        if self._fits(number, self.ring):
            return None
        slots = torch.arange(self._host_length - kept, self._host_length, device=self.device) % self.ring
        mean, balance = self.k_mean.clone(), self.k_balance.clone()
        buffers: Any = []
        for old in again or self._buffers():
            new = torch.empty(*old.shape[:2], kept + number, *old.shape[3:], dtype=old.dtype, device=old.device)
            new[:, :, :kept] = old.index_select(2, slots)
            buffers.append(new)
        append_kv(key_states, value_states, mean, *buffers, position=kept, k_balance=balance)
        if number >= self.ring:
            self._choose_vectors(key_states, value_states)
        parts = [*buffers, mean, balance, None, False, self.dtype, owner]
        return QuantizedKV(*parts)

    def _write(self, key_states, value_states) -> None:
        skipped = max(key_states.shape[2] - self.ring, 0)
        append_kv(
            key_states[:, :, skipped:], value_states[:, :, skipped:], self.k_mean, *self._buffers(),
            position=self.cumulative_length + skipped, ring=True, k_balance=self.k_balance,
        )  # fmt: skip
