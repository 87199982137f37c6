"""Reference of INT8 pages of keys and values: append, read back, and decode attention by block tables."""

from __future__ import annotations

import torch

from ..facts.masking import Masking
from ..facts.paged import PagedKV
from .decode import ref_decode_attention, ref_quantize_tokens


def ref_append_pages(k, v, pages: PagedKV, slots: torch.Tensor) -> None:
    """Quantise k and v [T, H_kv, D] into their slots int64 [T]; negative ones are left out."""
    kept = slots >= 0
    page, token = slots[kept] // pages.k_codes.shape[1], slots[kept] % pages.k_codes.shape[1]
    new = (*ref_quantize_tokens(k.detach()[kept].float()), *ref_quantize_tokens(v.detach()[kept].float()))
    for buffer, x in zip(pages, new, strict=True):
        buffer[page, token] = x


def ref_newest_slots(pages: PagedKV, table: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the slot int64 [B] of each sequence's last token; -1 where it has no token or no page."""
    size = pages.k_codes.shape[1]
    last = ends[1:].long() - ends[:-1] - 1
    inside = (last >= 0) & (last < table.shape[1] * size)
    last = torch.where(inside, last, 0)
    page = table.long().gather(1, (last // size)[:, None])[:, 0]
    return torch.where(inside & (page >= 0), page * size + last % size, -1)


def ref_read_pages(pages: PagedKV, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [N, H_kv, D] of slots int64 [N]: code times scale, rounded once."""
    page, token = slots // pages.k_codes.shape[1], slots % pages.k_codes.shape[1]
    k_codes, k_scale, v_codes, v_scale = (x[page, token].float() for x in pages)
    return (k_codes * k_scale[..., None]).to(dtype), (v_codes * v_scale[..., None]).to(dtype)


def ref_paged_attention(
    q, pages: PagedKV, table, ends, *, masking: Masking, scale: float, round_p: bool = True
) -> torch.Tensor:
    """Attention of one query a sequence over its pages. Unchecked arguments of `paged_attention`."""
    out, size = torch.zeros(q.shape, dtype=q.dtype, device=q.device), pages.k_codes.shape[1]
    for b, number in enumerate((ends[1:] - ends[:-1]).tolist()):
        if number > table.shape[1] * size:
            out[b] = torch.nan
        elif number > 0:
            own = table[b, : -(-number // size)].long()
            k, k_scale, v, v_scale = (x[own].flatten(0, 1)[None, :number].transpose(1, 2) for x in pages)
            found, _ = ref_decode_attention(
                q[b][None, None], k, k_scale, v, v_scale, None, None, masking=masking, scale=scale, round_p=round_p
            )
            out[b] = found[0, 0]
    return out
