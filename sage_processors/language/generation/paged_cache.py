"""INT8 paged KV cache for transformers' continuous batching.

transformers' own cache hands out, shares, copies and offloads whole pages of a fixed number of bytes per token and
head. Here that number is D + 2, for INT8 codes and a bf16 scale. How the bytes of a page are used is decided in
sage_kernels/facts/paged.py.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from sage_kernels.facts.paged import SCALE_BYTES, PagedKV, paged_kv
from sage_kernels.ops.paged import append_pages, check_pages, paged_attention, read_pages, rotate_heads
from sage_kernels.ops.varlen import sage_attention_varlen

from ...torch_modes import autocast


LAYER = "int8_pages_of"  # the argument under which `update` tells attention which layer it is in
MEMORY_SHARE = 0.9  # of the memory that transformers would take; it counts activations in the cache's dtype


class Layer(NamedTuple):
    """Pages of one layer, and the layer's place in what a step is given.

    Attributes:
        group, kind: where its indices, and its lengths, are.
        window: its sliding window, or None.
        sentinel: the slot number that stands for a new token among those to read.
    """

    pages: PagedKV
    group: int
    kind: str
    window: int | None
    sentinel: int


class Int8PagedCache(PagedAttentionCache):
    """Paged cache of INT8 codes with a bf16 scale per token and head.

    `generate_batch` makes it for a model with one of our names.

    Keys are rotated by a Hadamard matrix before they are quantised, and queries with them. A token's codes depend on
    that token alone, so a prefix has the same pages in all sequences.

    Args: as of transformers' PagedAttentionCache, by name.
    Raises: NotImplementedError for a model, a page size or a version of transformers that INT8 pages don't fit.
    """

    def __init__(self, *, config: Any, continuous_batching_config: Any, dtype: torch.dtype, **others: Any) -> None:
        name = "page_size" if hasattr(continuous_batching_config, "page_size") else "block_size"  # before 5.18
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        check_pages(head_dim, getattr(continuous_batching_config, name), torch.device(others["device"]))
        narrow, settings = copy.copy(config), copy.copy(continuous_batching_config)
        narrow.head_dim = head_dim + SCALE_BYTES
        if settings.num_blocks is None and settings.max_memory_percent is not None:
            settings.max_memory_percent *= MEMORY_SHARE
        super().__init__(config=narrow, continuous_batching_config=settings, dtype=torch.int8, **others)
        self.config, self.int8_head_dim = config, head_dim
        self._layers: dict[int, Layer] = {}

    def nbytes(self) -> int:
        """Return the bytes of all pages, with scales and the pages for padding."""
        if hasattr(self, "cache_tensor"):
            return self.cache_tensor.nbytes
        return sum(x.nbytes for x in (*self.key_cache, *self.value_cache))

    def refuse_beyond_pages(self, scheduler: Any) -> None:
        """Let a scheduler refuse a request that would not fit even alone.

        transformers' own would stop the server, and all requests with it.
        """
        if hasattr(self, "layer_to_allocator"):
            from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

            longest = infer_max_single_request_tokens(self)
        else:
            fits = (n for n in range(self.num_blocks, 0, -1) if self.blocks_needed(n, 0) <= self.num_blocks)
            longest = next(fits, 0) * self.block_size
        add = scheduler.add_waiting_request

        def add_waiting_request(state: Any) -> None:
            wanted = len(state.initial_tokens) + max(state.max_new_tokens or 1, 1) - 1
            if wanted > longest:
                raise ValueError(
                    f"{state.request_id}: got {len(state.initial_tokens)} tokens and {state.max_new_tokens} new ones, "
                    f"expected at most {longest + 1} together, which is what all pages hold; raise num_blocks"
                )
            add(state)

        scheduler.add_waiting_request = add_waiting_request

    def layer(self, number: int) -> Layer:
        """Return the pages of a layer, as views, and what a step needs to know of it."""
        if number not in self._layers:
            window = getattr(self.config, "sliding_window", None)
            if hasattr(self, "layer_to_allocator"):  # transformers 5.18 and newer
                own = self.layer_to_allocator[number]
                memory, group, kind, sentinel = (
                    own._kv_page_views[number],
                    own.index,
                    own.layer_type,
                    own.sentinel_index,
                )
            elif hasattr(self, "layer_index_to_group_indices"):  # 5.17
                group, place = self.layer_index_to_group_indices[number]
                kind = "full_attention" if self.sliding_windows[number] == 1 else "sliding_attention"
                shape = (-1, self.block_size, *self.key_cache[place].shape[1:])
                memory = self.key_cache[place].view(shape), self.value_cache[place].view(shape)
                sentinel = self.sentinel_index
            else:
                raise NotImplementedError(
                    "generate_batch: got a transformers whose paged cache is unknown, expected 5.17 to 5.24; use "
                    'model.set_attn_implementation("sdpa") for it'
                )
            window = window if kind == "sliding_attention" else None
            self._layers[number] = Layer(paged_kv(*memory), group, kind, window, sentinel)
        return self._layers[number]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, kwargs: Any = None, **_: Any) -> Any:
        """Leave keys and values as they are, and tell attention whose they are: `attend` stores them."""
        if kwargs is not None:
            kwargs[LAYER] = self, layer_idx
        return key_states, value_states

    def attend(
        self,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: dict[str, Any],
        *,
        scale: float | None,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store a step's new tokens of one layer, and attend from each of them to its own sequence.

        Nothing waits for the device. A step that fails has written tokens that no sequence counts yet.

        Args:
            query: [1, H, T, D]. key, value: [1, H_kv, T, D], the new tokens.
            step: transformers' cu_seq_lens_q, cu_seq_lens_k, read_index, write_index and block_table.
        Returns: [1, T, H, D].
        """
        layer = self.layer(number)
        query, key, value = autocast(query, key, value)
        q, k = rotate_heads(query.transpose(1, 2), key.transpose(1, 2))
        q, k, v = q[0], k[0], value[0].transpose(0, 1)
        k_ends = step["cu_seq_lens_k"]
        k_ends = (k_ends[layer.kind] if isinstance(k_ends, dict) else k_ends).to(torch.int32)
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        if step.get("block_table") is not None:  # one new token in each sequence
            table, k_ends = step["block_table"][layer.group], k_ends[: q.shape[0] + 1]
            append_pages(k, v, layer.pages, table=table, ends=k_ends)
            return paged_attention(q, layer.pages, table, k_ends, **options)[None]
        k, v = self._stored(layer, k, v, step["read_index"][layer.group], step["write_index"][layer.group])
        out: torch.Tensor = sage_attention_varlen(
            q, k, v, step["cu_seq_lens_q"].to(torch.int32), k_ends.contiguous(), causal=True, window=layer.window,
            smooth_k=False, **options,
        )  # fmt: skip
        return out[None]

    def _stored(
        self, layer: Layer, k: torch.Tensor, v: torch.Tensor, read: torch.Tensor, write: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens, and return all keys and values of a step's sequences, dequantised."""
        if layer.window is None:
            append_pages(k, v, layer.pages, slots=write)
            return read_pages(layer.pages, read if read.numel() else write, k.dtype)
        new = _rounded(k, v)
        if read.numel():  # before the new tokens overwrite those that have left the window
            old, is_new = read_pages(layer.pages, read, k.dtype), (read == layer.sentinel)[:, None, None]
            new = old[0].masked_scatter(is_new, new[0]), old[1].masked_scatter(is_new, new[1])
        append_pages(k, v, layer.pages, slots=write)
        return new


def _rounded(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens as pages would give them back, by pages that hold nothing else."""
    number, heads, head_dim = k.shape
    memory = torch.empty(2, 1, max(number, 1), heads, head_dim + SCALE_BYTES, dtype=torch.int8, device=k.device)
    pages, slots = paged_kv(memory[0], memory[1]), torch.arange(number, device=k.device)
    append_pages(k, v, pages, slots=slots)
    return read_pages(pages, slots, k.dtype)
