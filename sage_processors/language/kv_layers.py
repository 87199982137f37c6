"""Growing layers of an Int8KVCache, with or without a sliding window.

A layer holds INT8 codes, bf16 scales, and the centre and balance of its keys. For preallocated layers see
kv_static_layers.py.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from sage_kernels import append_kv

from ..torch_modes import autocast
from .kv_vectors import FIRST_TOKENS, choose_vectors, must_choose_again
from .quantized_kv import QuantizedKV


MIN_SLACK = 64  # a growing layer makes room for at least this many tokens at a time
BUFFERS = ("k_codes", "k_scale", "v_codes", "v_scale")
VECTORS = ("k_mean", "k_balance")
FIRST = ("first_keys", "first_values")  # tokens in 16 bit, until centre and balance are fixed


class Int8Layer(CacheLayerMixin):
    """Cache layer that grows, or with `sliding_window` keeps only tokens visible to the next one.

    Buffers [B, H_kv, capacity, D] grow by 1/64 of their tokens, so each token is copied a bounded number of times and
    little room is spare. The tokens from `begin` to `end` of the buffers are valid.

    Every change is made on a copy of the layer's fields, and never overwrites a valid token. If memory runs out on the
    way, the layer is unchanged.
    """

    is_croppable = True
    _how_to_restart = "call reset()"  # remedy, for another batch, device or model
    _is_trial = False  # True for a copy whose fields another layer will take over
    k_codes: Any  # None before the first update, then tensors
    k_scale: Any
    v_codes: Any
    v_scale: Any
    k_mean: Any
    k_balance: Any
    first_keys: Any  # all tokens in 16 bit, while they are fewer than FIRST_TOKENS; else None
    first_values: Any
    cumulative_length: Any  # tokens seen: an int here, a tensor [] on the device in a static layer

    def __init__(self, heads: frozenset = frozenset(), dims: frozenset = frozenset(), sliding_window=None):
        super().__init__()
        self._drop_tensors()
        self.heads, self.dims = heads, dims
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.begin = self.end = self.cumulative_length = 0
        self.record_past = False

    # what models and transformers read

    @property
    def keys(self) -> QuantizedKV | None:
        """The layer's tokens for attention, both as keys and as values; None before the first token."""
        return self._stored(self.begin, self) if self.is_initialized and self.cumulative_length else None

    @keys.setter
    def keys(self, value) -> None:
        if value is not None:
            raise TypeError(f"keys: got {type(value).__name__}, expected None, as keys are INT8 codes; call update()")

    values = keys

    def get_seq_length(self):
        """Return the number of tokens seen, including those that a sliding window has dropped."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Return the sliding window, or -1 without one."""
        return self.sliding_window if self.is_sliding else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys after `query_length` more tokens, and the position of the first one."""
        kept = self.cumulative_length
        if self.is_sliding:
            kept = min(kept, self.sliding_window - 1)
        return kept + query_length, self.cumulative_length - kept

    def activate_past_recording(self) -> None:
        """Keep tokens that leave the sliding window, until the next crop."""
        self.record_past = True

    def nbytes(self) -> int:
        """Return the bytes held, including spare room."""
        return sum(x.nbytes for x in self._tensors().values()) if self.is_initialized else 0

    def bytes_per_token(self) -> int:
        """Return the bytes of one token of one sequence: codes and scales of key and value, all heads."""
        if not self.is_initialized:
            return 0
        return sum(x.shape[1] * x[0, 0, :1].nbytes for x in (getattr(self, name) for name in BUFFERS))

    # writing

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for tokens like these [B, H_kv, N, D], without storing them."""
        self._all_or_nothing(lambda trial: trial._initialize(key_states, value_states))

    def _initialize(self, key_states, value_states) -> None:
        self._check_model(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads, _, self.head_dim = key_states.shape
        self._allocate(self._first_capacity())
        self.k_mean = torch.zeros(
            self.batch_size, self.num_heads, self.head_dim, dtype=torch.float32, device=self.device
        )
        self.k_balance = torch.ones_like(self.k_mean)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Store new tokens [B, H_kv, N, D], and return key and value for attention.

        The first call returns its tokens as they came, so attention within a prompt sees no rounding of the cache.
        Later calls return the same QuantizedKV twice. If it raises, nothing is stored.
        """
        trial = self._trial()
        result = trial._append(key_states, value_states, self)
        self._take(trial)
        return result

    def _append(self, key_states, value_states, owner):
        as_they_came = key_states, value_states
        key_states, value_states = self._prepare(key_states, value_states)
        number = key_states.shape[2]
        first = self.cumulative_length == 0
        replaced = self.is_sliding and not self.record_past and number >= self.sliding_window
        if first:
            self.begin = self.end = 0
            self._choose_vectors(key_states, value_states)
        elif self.first_keys is not None and must_choose_again(self.cumulative_length, number, self._first_tokens()):
            self._store_again(key_states, value_states)
        if first or self.first_keys is not None:
            self._hold(key_states, value_states, first)
        if first and replaced:
            self._store(*self._last(key_states, value_states))
        else:
            self._store(key_states, value_states)
        shown = self.get_mask_sizes(number)[0]
        self.cumulative_length += number
        result = as_they_came if first else (self._stored(self.end - shown, owner),) * 2
        if replaced and not first:  # no older token is left: choose centre and balance again, in new buffers
            self.begin = self.end
            self._allocate(0)
            self._choose_vectors(key_states, value_states)
            self._store(*self._last(key_states, value_states))
        if not self.record_past:
            self._forget()
        return result

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -tokens_to_remove tokens. tokens_to_remove: an int <= 0."""
        number = self._checked_crop(tokens_to_remove)
        if self.is_sliding and self.cumulative_length >= self.sliding_window and not self.record_past:
            raise RuntimeError(
                f"crop: got {tokens_to_remove} on a layer whose window of {self.sliding_window} is full, expected "
                "activate_past_recording() before the tokens came, as the window has dropped older ones"
            )
        if not self.is_initialized:
            return
        self.end -= number
        self.cumulative_length -= number
        if self.first_keys is not None:
            self.first_keys, self.first_values = (x[:, :, : self.cumulative_length] for x in self._first())
        self._forget()  # also tokens recorded for this crop

    def reset(self) -> None:
        """Forget all tokens and free the buffers."""
        self._drop_tensors()
        self.is_initialized = False
        self.begin = self.end = self.cumulative_length = 0

    # moving

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make sequence i the former sequence beam_idx[i]."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`."""
        self._map(lambda x: x[indices.to(x.device)])

    def offload(self) -> None:
        """Move the tensors to the CPU."""
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the tensors back to the layer's device."""
        if self.is_initialized and self.k_codes.device != self.device:
            self._map(lambda x: x.to(self.device, non_blocking=True))

    # inside

    def _drop_tensors(self) -> None:
        for name in (*BUFFERS, *VECTORS, *FIRST):
            setattr(self, name, None)

    def _tensors(self) -> dict[str, torch.Tensor]:
        held = () if self.first_keys is None else FIRST
        return {name: getattr(self, name) for name in (*BUFFERS, *VECTORS, *held)}

    def _map(self, change) -> None:
        """Replace each tensor by change(tensor): all of them, or none if it raises."""
        if self.is_initialized:
            changed = {name: change(x) for name, x in self._tensors().items()}
            self._all_or_nothing(lambda trial: trial.__dict__.update(changed, batch_size=changed["k_codes"].shape[0]))

    def _all_or_nothing(self, change):
        """Change a copy of the layer, then take over its fields; an error leaves the layer unchanged."""
        trial = self._trial()
        change(trial)
        self._take(trial)

    def _trial(self):
        """Return a layer with the same fields, to be changed in place of this one."""
        if torch.compiler.is_compiling():  # Dynamo sets the fields only after the graph has run
            return self
        trial = object.__new__(type(self))
        trial.__dict__.update(self.__dict__, _is_trial=True)
        return trial

    def _take(self, trial) -> None:
        """Take over the fields of `trial`. Allocates nothing."""
        if trial is not self:
            self.__dict__.update(trial.__dict__, _is_trial=self._is_trial)

    def _first_capacity(self) -> int:
        return 0

    def _allocate(self, capacity: int) -> None:
        shape = (self.batch_size, self.num_heads, capacity)
        for name in BUFFERS:
            size, dtype = ((self.head_dim,), torch.int8) if name.endswith("codes") else ((), torch.bfloat16)
            setattr(self, name, torch.empty(*shape, *size, dtype=dtype, device=self.device))

    def _check_model(self, key_states, value_states) -> None:
        """Raise if the tokens can't be those of the model whose config the cache was made for."""
        for name, x in (("key_states", key_states), ("value_states", value_states)):
            if not isinstance(x, torch.Tensor) or x.dim() != 4:
                got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise ValueError(f"{name}: got {got}, expected a tensor [B, H_kv, N, D]")
        if value_states.shape != key_states.shape:
            raise NotImplementedError(
                f"value_states: got shape {tuple(value_states.shape)}, expected the keys' {tuple(key_states.shape)}, "
                "as an Int8KVCache holds keys and values of one size; pass transformers.DynamicCache for this model"
            )
        _, heads, _, dim = key_states.shape
        if self.heads and heads not in self.heads and not _is_sharded(heads, self.heads):
            raise ValueError(
                f"key_states: got {heads} heads, expected {sorted(self.heads)} of the config that the cache was made "
                "for; make it with Int8KVCache(model.config) of this model"
            )
        if self.dims and dim not in self.dims:
            raise ValueError(
                f"key_states: got head_dim {dim}, expected {sorted(self.dims)} of the config that the cache was made "
                "for; make it with Int8KVCache(model.config) of this model"
            )

    def _prepare(self, key_states, value_states) -> Any:
        """Allocate buffers if there are none, bring them to the device, and check the tokens.

        Returns: the tokens, keys and values in one dtype.
        """
        self._check_model(key_states, value_states)
        key_states, value_states = _in_one_dtype(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.prefetch()
        wanted = (self.batch_size, self.num_heads, self.head_dim)
        for name, x in (("key_states", key_states), ("value_states", value_states)):
            if (x.shape[0], x.shape[1], x.shape[3]) != wanted:
                raise ValueError(
                    f"{name}: got shape {tuple(x.shape)}, expected [{wanted[0]}, {wanted[1]}, N, {wanted[2]}] as in "
                    "the cache; reorder or repeat the cache first, or for another batch or model "
                    f"{self._how_to_restart}"
                )
            if x.device != self.device:
                raise ValueError(
                    f"{name}: got device {x.device}, expected {self.device}, where the layer's tokens are; keep each "
                    f"layer of the model on one device, or {self._how_to_restart}"
                )
        return key_states, value_states

    def _choose_vectors(self, key_states, value_states) -> None:
        self.k_mean, self.k_balance = choose_vectors(key_states, value_states, first_stays=not self.is_sliding)

    def _store_again(self, key_states, value_states) -> None:
        """Choose centre and balance again, and store the older tokens with them.

        Uses new buffers, so a QuantizedKV that was returned before stays valid.
        """
        held = self._first()
        whole = [torch.cat(x, 2) for x in zip(held, (key_states.detach(), value_states.detach()), strict=True)]
        self._choose_vectors(*whole)
        self.begin = self.end = 0
        self._allocate(0)
        self._store(*held)

    def _hold(self, key_states, value_states, first: bool) -> None:
        """Keep the first tokens in 16 bit, until there are enough for the final centre and balance."""
        new = (key_states.detach(), value_states.detach())
        if self.cumulative_length + key_states.shape[2] >= self._first_tokens():
            self.first_keys = self.first_values = None
        elif first:
            self.first_keys, self.first_values = (x.clone() for x in new)
        else:
            self.first_keys, self.first_values = (torch.cat(x, 2) for x in zip(self._first(), new, strict=True))

    def _first_tokens(self) -> int:
        """Return the number of tokens after which centre and balance are fixed; until then all are kept."""
        return min(FIRST_TOKENS, self.sliding_window) if self.is_sliding else FIRST_TOKENS

    def _buffers(self) -> Any:
        return tuple(getattr(self, name) for name in BUFFERS)

    def _first(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first_keys, self.first_values

    def _last(self, *states):
        """Return the tokens of a prompt that the next token sees through its sliding window."""
        return (x[:, :, x.shape[2] - self.sliding_window + 1 :] for x in states)

    def _store(self, key_states, value_states) -> None:
        number = key_states.shape[2]
        self._reserve(number)
        append_kv(key_states, value_states, self.k_mean, *self._buffers(), position=self.end, k_balance=self.k_balance)
        self.end += number

    def _reserve(self, number: int) -> None:
        """Make room for `number` more tokens, in new buffers if necessary."""
        if self.end + number <= self.k_codes.shape[2]:
            return
        kept = self.end - self.begin
        # the buffers of a sliding window are small: with this slack they move once every eighth of a window
        slack = max(MIN_SLACK, (self.sliding_window // 8) if self.is_sliding else (kept + number) // 64)
        old = {name: getattr(self, name)[:, :, self.begin : self.end] for name in BUFFERS}
        self._allocate(kept + number + slack)
        for name, x in old.items():
            getattr(self, name)[:, :, :kept] = x
        self.begin, self.end = 0, kept

    def _forget(self) -> None:
        """Drop tokens that the next token can't see through its sliding window."""
        if self.is_sliding:
            self.begin = max(self.begin, self.end - self.sliding_window + 1)

    def _checked_crop(self, tokens_to_remove: int) -> int:
        if tokens_to_remove > 0:
            raise ValueError(f"crop: got {tokens_to_remove}, expected an int <= 0, minus the tokens to remove")
        held = int(self.get_seq_length())
        if -tokens_to_remove > held:
            raise ValueError(f"crop: got {tokens_to_remove}, expected at least {-held}, as {held} tokens were seen")
        return -tokens_to_remove

    def _stored(self, begin: int, owner) -> QuantizedKV:
        buffers: Any = (x[:, :, begin : self.end] for x in self._buffers())
        parts = [*buffers, self.k_mean, self.k_balance, None, False, self.dtype, owner]
        return QuantizedKV(*parts)


def _in_one_dtype(key_states, value_states):
    """Bring keys and values to one dtype: autocast's if it is on, else that of the values.

    Under autocast a linear layer returns 16 bit, and rotary embeddings in fp32 make keys fp32 again.
    """
    if key_states.dtype != value_states.dtype:
        key_states, value_states = autocast(key_states, value_states)
        key_states = key_states.to(value_states.dtype)
    return key_states, value_states


def _is_sharded(heads: int, known) -> bool:
    """True if `heads` can be one rank's share of the model's heads under tensor parallelism."""
    return (
        torch.distributed.is_available() and torch.distributed.is_initialized() and any(k % heads == 0 for k in known)
    )
