"""Completion of a call's mask by arguments that hide further keys, such as packed sequences.

Some models write these keys into the mask only if the implementation is named "eager" or "sdpa". They hand any other
implementation an argument instead, which stock eager functions drop silently.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache

from .call import Call, Sequences, causal_mask
from .masks import UNLIMITED, BandMask, no_ends, plain_mask, sequence_of


def complete_mask(call: Call, query, key) -> None:
    """Put all hidden keys into call.mask and call.sequences, and remove the arguments that named them.

    Args: query [B, H, S_q, D]; key [B, H_kv, S_kv, D] or a QuantizedKV of an INT8 cache.
    Raises: NotImplementedError for a paged cache, and for packed sequences that can't be separated.
    """
    if not isinstance(call.others.get("cache"), (Cache, type(None))):
        raise NotImplementedError(
            f"cache of {call.label}: got a paged cache, expected none, as continuous batching can't run INT8 "
            'attention; use model.set_attn_implementation("sdpa") for it'
        )
    seq_q, seq_kv = query.shape[2], key.shape[2]
    if (
        call.mask is None
        and call.is_causal
        and 1 < seq_q < seq_kv
        and getattr(call.module, "is_kv_shared_layer", False)
    ):
        # Gemma 4 keeps only the last rows of a prompt, without a mask: rows are counted from the end
        call.mask = _band_from_the_end(query.shape[0], seq_q, seq_kv, query.device)
    _keep_packed_apart(call, query.shape[0], seq_q, seq_kv, query.device)
    selects = any(call.others.get(name) is not None for name in ("indices", "block_indices"))
    if selects or call.position_bias is not None or not isinstance(key, torch.Tensor):
        write_out(call, seq_q, seq_kv, query.device)
    _select_keys(call, query, seq_kv)
    _select_blocks(call, query, seq_kv)


def _band_from_the_end(batch: int, seq_q: int, seq_kv: int, device) -> torch.Tensor:
    shape, offset = (batch, 1, seq_q, seq_kv), seq_kv - seq_q
    if torch.compiler.is_compiling():
        return torch.ones(shape[2:], dtype=torch.bool, device=device).tril(offset)[None, None]
    return BandMask(shape, offset, UNLIMITED, 0, no_ends(device))


def _keep_packed_apart(call: Call, batch: int, seq_q: int, seq_kv: int, device) -> None:
    """Set call.sequences or the mask from cu_seq_lens_q and cu_seq_lens_k, int [sequences + 1] each.

    They are 0 and the ends of the sequences packed into one row. One of them may be missing: both are then the same.
    """
    lengths = [call.others.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    q_ends, k_ends = (x if x is not None else y for x, y in (lengths, lengths[::-1]))
    longest = [call.others.get(name) for name in ("max_length_q", "max_length_k")]
    longest_q, longest_k = (x if isinstance(x, int) else 0 for x in longest)
    band = call.mask if isinstance(call.mask, BandMask) else None
    known = None if band is None else band.ends
    said = [x.numel() for x in (q_ends, k_ends) if x is not None]
    if band is not None and known is not None and all(number == known.numel() for number in said):
        call.sequences = Sequences(known, known, band.longest, band.longest)
        return
    if q_ends is None or k_ends is None or max(q_ends.numel(), k_ends.numel()) <= 2:
        return
    if batch != 1:
        raise NotImplementedError(
            f"cu_seq_lens of {call.label}: got it with a batch of {batch}, {seq_q} queries and {seq_kv} keys, "
            "expected one row of packed sequences; leave it out"
        )
    is_whole = call.mask is None or (band is not None and known is None and band.offset == 0)
    if is_whole and q_ends.numel() == k_ends.numel():
        q_ends, k_ends = (x.to(device, torch.int32).contiguous() for x in (q_ends, k_ends))
        call.sequences = Sequences(q_ends, k_ends, longest_q, longest_k)
        return
    if seq_q != seq_kv:
        raise NotImplementedError(
            f"cu_seq_lens of {call.label}: got it with {seq_q} queries, {seq_kv} keys and a mask, expected no mask or "
            "no cache; leave it out"
        )
    # with an attention_mask, transformers makes a mask of padding alone; reading it to find out would sync
    rows, keys = (sequence_of(ends, n, device) for ends, n in ((q_ends, seq_q), (k_ends, seq_kv)))
    call.mask = _both(plain_mask(call.mask), rows[:, None] == keys)


def write_out(call: Call, seq_q: int, seq_kv: int, device) -> None:
    """Write call.sequences out as a mask bool [1, 1, S_q, S_kv], for code that knows only masks."""
    if call.sequences is None:
        return
    q_ends, k_ends = call.sequences[:2]
    rows, keys = sequence_of(q_ends, seq_q, device), sequence_of(k_ends, seq_kv, device)
    seen = rows[:, None] == keys
    causal, window = band_of(call, seq_q)
    last = q_ends.numel() - 2
    row = torch.arange(seq_q, device=device) - q_ends[1:][rows.clamp_max(last)]  # counted from the end of its sequence
    key = torch.arange(seq_kv, device=device) - k_ends[1:][keys.clamp_max(last)]
    distance = key - row[:, None]
    if causal:
        seen = seen & (distance <= 0)
    if window is not None:
        seen = seen & (distance.abs() < window)
    call.mask, call.sequences = seen[None, None], None


def band_of(call: Call, seq_q: int) -> tuple[bool, int | None]:
    """Return causal and window for sage_attention within each packed sequence."""
    if not isinstance(call.mask, BandMask):
        return call.is_causal and seq_q > 1, None
    return call.mask.right == 0, None if call.mask.left == UNLIMITED else call.mask.left + 1


def _select_keys(call: Call, query, seq_kv: int) -> None:
    """Hide keys that are not in `indices`, int [B, S_q, keys], -1 for none (DeepSeek's sparse attention)."""
    indices = call.others.get("indices")
    if not isinstance(indices, torch.Tensor) or indices.shape[:-1] != (query.shape[0], query.shape[2]):
        return  # another meaning, so it stays an unknown argument
    there = (indices >= 0) & (indices < seq_kv)
    selected = indices.new_zeros((*indices.shape[:-1], seq_kv + 1), dtype=torch.bool)
    selected = selected.scatter(-1, indices.long().where(there, seq_kv), True)[..., :seq_kv]
    if call.mask is None and call.is_causal and query.shape[2] > 1:
        call.mask = causal_mask(query.shape[2], seq_kv, query.device)
    call.mask = _both(plain_mask(call.mask), selected[:, None])
    del call.others["indices"]


def _select_blocks(call: Call, query, seq_kv: int) -> None:
    """Have the model's own indexer make a mask of `block_indices` (MiniMax's sparse attention)."""
    blocks = call.others.get("block_indices")
    build = getattr(getattr(call.module, "indexer", None), "build_block_mask", None)
    if blocks is None or build is None:
        return
    positions, seq_q = call.others.get("position_ids"), query.shape[2]
    if positions is None:
        positions = torch.arange(seq_kv - seq_q, seq_kv, device=query.device)
    positions = positions.expand(query.shape[0], -1)
    call.mask = build(blocks, plain_mask(call.mask), seq_kv, query.dtype, query.device, positions)
    del call.others["block_indices"]


def _both(mask: torch.Tensor | None, seen: torch.Tensor) -> torch.Tensor:
    """Return `mask`, bool or float, with the keys hidden that are False in `seen`."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, -torch.inf)
