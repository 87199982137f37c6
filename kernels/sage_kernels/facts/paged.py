"""Layout of INT8 pages of keys and values, as a server with block tables keeps them.

A page holds a fixed number of tokens of one layer: INT8 codes [N, H_kv, D], and behind them bf16 scales [N, H_kv]. It
holds nothing else, no centre and no balance, so sequences with a common prefix can share it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


SCALE_BYTES = 2  # of one token of one head, in bf16


class PagedKV(NamedTuple):
    """Pages of one layer: codes int8 [P, N, H_kv, D], scales bf16 [P, N, H_kv], of P pages of N tokens."""

    k_codes: torch.Tensor
    k_scale: torch.Tensor
    v_codes: torch.Tensor
    v_scale: torch.Tensor


def paged_kv(k_bytes: torch.Tensor, v_bytes: torch.Tensor) -> PagedKV:
    """Return codes and scales as views of the pages' memory, int8 [P, N, H_kv, D + SCALE_BYTES] each.

    Within a page the memory is contiguous; its last dimension only says how many bytes a token takes.
    """
    return PagedKV(*_views(k_bytes), *_views(v_bytes))


def _views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pages, tokens, heads, width = x.shape
    flat, codes = x.view(pages, -1), tokens * heads * (width - SCALE_BYTES)
    scales = flat[:, codes:].view(torch.bfloat16)
    return flat[:, :codes].unflatten(1, (tokens, heads, -1)), scales.unflatten(1, (tokens, heads))
