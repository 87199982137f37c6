"""The ops of INT8 pages: quantise tokens into pages, read them back, and attend by block tables.

Everything that varies between steps of a server (lengths, tables, slots) is read on the device, so that a CUDA graph
can hold a step.
"""

from __future__ import annotations

from typing import Any

import torch

from ..facts.masking import UNLIMITED, Masking
from ..facts.paged import PagedKV
from ..reference import paged as reference
from ..reference.quantize import ref_rotate


MIN_PAGE = 16  # keys of the smallest tile on a GPU


def check_pages(head_dim: int, page_size: int, device: torch.device) -> None:
    """Raise NotImplementedError for pages that the kernels of this device can't read."""
    if head_dim % 2 or not 2 <= head_dim <= 256:
        raise NotImplementedError(f"head_dim: got {head_dim}, expected an even number up to 256; use a 16-bit cache")
    if device.type == "cuda" and page_size % MIN_PAGE:
        raise NotImplementedError(f"page_size: got {page_size}, expected a multiple of {MIN_PAGE}, such as 256")


def rotate_heads(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply q and k [B, S, H, D] by the same Hadamard matrix, which their products do not depend on.

    It spreads channels that stand out over all of them, token by token. As they are, unless D is a multiple of 8.
    """
    if q.shape[3] % 8:
        return q, k
    if not q.is_cuda:
        return ref_rotate(q), ref_rotate(k)
    from .._triton.prologue.rotate import launch_rotate

    return launch_rotate(q, k)


def append_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PagedKV,
    *,
    slots: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> None:
    """Quantise new tokens into pages, in one launch that touches no other tokens.

    A token and head has one scale, its largest element / 127, rounded to bf16 before it divides.

    Args:
        k, v: [T, H_kv, D] fp16, bf16 or fp32, any strides, the last one 1.
        slots: int64 [T], page times page size plus place in it; or, for one token a sequence:
        table, ends: block tables int32 [T, pages], and cumulative lengths int32 [T + 1], new tokens included. A
            sequence of length 0, or whose page is negative, writes nothing.
    Raises: TypeError, ValueError before anything is written.
    """
    _check(k, pages, "k")
    _check(v, pages, "v")
    if (slots is None) == (table is None or ends is None):
        raise TypeError("slots: got it together with table and ends, or neither, expected one of them")
    if k.shape[0] == 0:
        return
    if k.is_cuda:
        from .._triton.decode.paged import launch_append_pages

        launch_append_pages(k, v, pages, slots, table, ends)
        return
    where: Any = reference.ref_newest_slots(pages, table, ends) if slots is None else slots  # type: ignore[arg-type]
    reference.ref_append_pages(k, v, pages, where)


def read_pages(pages: PagedKV, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [N, H_kv, D] of slots int64 [N], dequantised to dtype. One launch."""
    if pages.k_codes.is_cuda:
        from .._triton.decode.paged import launch_read_pages

        return launch_read_pages(pages, slots, dtype)
    return reference.ref_read_pages(pages, slots, dtype)


def paged_attention(
    q: torch.Tensor,
    pages: PagedKV,
    table: torch.Tensor,
    ends: torch.Tensor,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of the last token of each sequence over its INT8 pages.

    No dequantised copy is made. No bit of a sequence's result depends on another one, nor on how many there are.

    Args:
        q: [B, H, D] fp16, bf16 or fp32, any strides, the last one 1; H_kv divides H.
        table: int32 [B, M], the pages of a sequence in order. Entries beyond its length are never read.
        ends: int32 [B + 1], cumulative lengths, the queries' own tokens included.
        softcap, sinks, scale: as in `sage_attention`.
    Returns: [B, H, D] contiguous, in q.dtype. 0 for a sequence of length 0, NaN for one that its table can't hold.
    Raises: TypeError, ValueError, NotImplementedError before any launch.
    """
    _check(q, pages, "q")
    batch, heads, head_dim = q.shape
    check_pages(head_dim, pages.k_codes.shape[1], q.device)
    for name, x, shape in (("table", table, (batch, -1)), ("ends", ends, (batch + 1,))):
        if x.dtype != torch.int32 or x.dim() != len(shape) or x.shape[0] != shape[0] or x.stride(-1) != 1:
            raise ValueError(f"{name}: got {x.dtype} {tuple(x.shape)}, expected contiguous int32 {shape}")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}, expected ({heads},)")
    scale = head_dim**-0.5 if scale is None else float(scale)
    if batch == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    sinks = None if sinks is None else sinks.float().contiguous()
    if q.is_cuda:
        from .._triton.decode.paged import launch_paged_attention

        return launch_paged_attention(q, pages, table, ends, softcap=softcap, sinks=sinks, scale=scale)
    masking = Masking(None, UNLIMITED, UNLIMITED, softcap=softcap, sinks=sinks)
    return reference.ref_paged_attention(q, pages, table, ends, masking=masking, scale=scale)


def _check(x: torch.Tensor, pages: PagedKV, name: str) -> None:
    kv_heads, head_dim = pages.k_codes.shape[2:]
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"{name}: got {x.dtype}, expected fp16, bf16 or fp32")
    if x.device != pages.k_codes.device:
        raise ValueError(f"{name}: got device {x.device}, expected {pages.k_codes.device}, where the pages are")
    if x.dim() != 3 or x.shape[2] != head_dim or x.shape[1] % kv_heads or (name != "q" and x.shape[1] != kv_heads):
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected [tokens, {kv_heads} heads, {head_dim}]")
