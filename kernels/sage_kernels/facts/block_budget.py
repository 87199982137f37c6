"""Counts of query-key blocks: those visible to a row of blocks, and those a budget acts on.

All are whole numbers, known before anything runs. A block has BLOCK keys, and BLOCK query rows unless block_q says
otherwise.
"""

from __future__ import annotations

import functools

import torch

from .recipe import BLOCK, FP4_GROUPS, Mixed


MILLION = 1_000_000  # shares are handed to kernels in millionths, so that both sides round alike


def has_fp4(device: torch.device) -> bool:
    """Return True if the device multiplies FP4 with scales of groups: NVIDIA Blackwell."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 10


def rows_of_block(device: torch.device, base: str) -> int:
    """Return how many query rows a block has: 64, or 128 with FP4 on compute capability 10.

    There the matrix units take no fewer than 128 rows with FP4.
    """
    if base in FP4_GROUPS and has_fp4(device) and torch.cuda.get_device_capability(device)[0] < 12:
        return 2 * BLOCK
    return BLOCK


def visible_blocks(row: int, seq_q: int, seq_kv: int, causal: bool, offset: int, block_q: int = BLOCK) -> int:
    """Number of key blocks that any query row of block `row` sees.

    offset: position of query row 0 on the key axis.
    """
    blocks = -(-seq_kv // BLOCK)
    if not causal:
        return blocks
    last_row = min((row + 1) * block_q, seq_q) - 1
    return min(max((last_row + offset) // BLOCK + 1, 0), blocks)


def own_blocks(row: int, seq_q: int, seq_kv: int, causal: bool, offset: int, block_q: int = BLOCK) -> int:
    """Number of the last visible blocks that are never skipped, since they hold a causal row's own key."""
    visible = visible_blocks(row, seq_q, seq_kv, causal, offset, block_q)
    if not causal:
        return min(visible, 1)
    first = min(max((row * block_q + offset) // BLOCK, 0), visible - 1)
    return visible - first


@functools.lru_cache(maxsize=256)
def promoted_a_row(seq_q: int, seq_kv: int, causal: bool, offset: int, budget: float, block_q: int = BLOCK) -> int:
    """Number k of blocks to promote in each row, so that their total comes nearest to the budget.

    A row that sees fewer than k blocks has all of them promoted. budget: share of all visible blocks. k is at least 1,
    and 0 for a budget of 0. In a causal square k solves k² - (2n + 1)·k + budget·n·(n + 1) = 0, as in ThriftAttention.
    """
    visible = [visible_blocks(i, seq_q, seq_kv, causal, offset, block_q) for i in range(-(-seq_q // block_q))]
    wanted = budget * sum(visible)
    if wanted <= 0:
        return 0
    low, high = 1, max(visible)  # the sum grows with k

    def excess(k: int) -> float:
        return sum(min(k, seen) for seen in visible) - wanted

    while low < high:
        middle = (low + high) // 2
        if excess(middle) < 0:
            low = middle + 1
        else:
            high = middle
    return low - 1 if low > 1 and -excess(low - 1) <= excess(low) else low


def chosen_a_row(
    row: int, seq_q: int, seq_kv: int, causal: bool, offset: int, options: Mixed, block_q: int = BLOCK
) -> int:
    """Number of blocks of a row that are promoted or left out."""
    visible = visible_blocks(row, seq_q, seq_kv, causal, offset, block_q)
    if options.action == "promote":
        return min(visible, promoted_a_row(seq_q, seq_kv, causal, offset, float(options.budget), block_q))
    may_go = visible - own_blocks(row, seq_q, seq_kv, causal, offset, block_q)
    return max(min(visible * millionths(options) // MILLION, may_go), 0)


def millionths(options: Mixed) -> int:
    """Budget in millionths, rounded to a whole number."""
    return round(options.budget * MILLION)


@functools.lru_cache(maxsize=256)
def chosen_share(seq_q: int, seq_kv: int, causal: bool, offset: int, options: Mixed, block_q: int = BLOCK) -> float:
    """Share of the visible blocks that are promoted or left out: the budget as rounded for these lengths."""
    rows = range(-(-seq_q // block_q))
    visible = sum(visible_blocks(i, seq_q, seq_kv, causal, offset, block_q) for i in rows)
    chosen = sum(chosen_a_row(i, seq_q, seq_kv, causal, offset, options, block_q) for i in rows)
    return chosen / visible if visible else 0.0
