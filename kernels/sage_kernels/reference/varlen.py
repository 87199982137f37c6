"""Reference of attention of packed sequences: `ref_attention` of each sequence alone."""

from __future__ import annotations

import torch

from ..facts.masking import NO_MASKING, Masking, of_sequence
from .attention import ref_attention


def ref_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    masking: Masking = NO_MASKING,
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `ref_attention` on each packed sequence. Reads the lengths.

    Args:
        q: [total_q, H, D]. k, v: [total_k, H_kv, D].
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1]: 0 and the ends of the sequences.
        masking: from `packed_masking`.
        options: of `ref_attention`.
    Returns: out [total_q, H, D] in q.dtype, lse [total_q, H] fp32, natural log. Rows without keys are 0 and -inf, or
        the sink.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    if masking.sinks is not None:
        lse = torch.maximum(lse, masking.sinks)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for rows, keys in zip(_slices(q_ends), _slices(k_ends), strict=True):
        seq_q, seq_kv = rows.stop - rows.start, keys.stop - keys.start
        if seq_q and seq_kv:
            its, seen = of_sequence(masking, seq_q, seq_kv)
            x = q[None, rows], k[None, keys][:, seen], v[None, keys][:, seen]
            found = ref_attention(*x, masking=its, **options)
            out[rows], lse[rows] = found[0][0], found[1][0]
    return out, lse


def _slices(ends: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
