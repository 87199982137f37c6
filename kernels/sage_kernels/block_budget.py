"""How many query-key blocks a row of blocks sees, and how many of them a budget acts on: whole numbers, no device."""

from __future__ import annotations

import functools

from .recipe import BLOCK, Mixed


MILLION = 1_000_000  # shares are handed to kernels in millionths, so that both sides round alike


def visible_blocks(row: int, seq_q: int, seq_kv: int, causal: bool, offset: int) -> int:
    """Blocks of keys that any query row of block `row` sees. offset: position of query row 0 on the key axis."""
    blocks = -(-seq_kv // BLOCK)
    if not causal:
        return blocks
    last_row = min((row + 1) * BLOCK, seq_q) - 1
    return min(max((last_row + offset) // BLOCK + 1, 0), blocks)


def own_blocks(row: int, seq_q: int, seq_kv: int, causal: bool, offset: int) -> int:
    """How many of the visible blocks, the last ones, are never skipped: they hold a causal row's own key."""
    visible = visible_blocks(row, seq_q, seq_kv, causal, offset)
    if not causal:
        return min(visible, 1)
    first = min(max((row * BLOCK + offset) // BLOCK, 0), visible - 1)
    return visible - first


@functools.lru_cache(maxsize=256)
def promoted_a_row(seq_q: int, seq_kv: int, causal: bool, offset: int, budget: float) -> int:
    """The k for which the best k blocks of every row (all that it sees, where these are fewer) come nearest to
    `budget` of all visible blocks; at least 1, and 0 for a budget of 0.

    In a causal square, k solves k² - (2n + 1)·k + budget·n·(n + 1) = 0, as in ThriftAttention.
    """
    visible = [visible_blocks(i, seq_q, seq_kv, causal, offset) for i in range(-(-seq_q // BLOCK))]
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


def chosen_a_row(row: int, seq_q: int, seq_kv: int, causal: bool, offset: int, options: Mixed) -> int:
    """How many blocks of a row the action is taken on."""
    visible = visible_blocks(row, seq_q, seq_kv, causal, offset)
    if options.action == "promote":
        return min(visible, promoted_a_row(seq_q, seq_kv, causal, offset, float(options.budget)))
    may_go = visible - own_blocks(row, seq_q, seq_kv, causal, offset)
    return max(min(visible * millionths(options) // MILLION, may_go), 0)


def millionths(options: Mixed) -> int:
    return round(options.budget * MILLION)


@functools.lru_cache(maxsize=256)
def chosen_share(seq_q: int, seq_kv: int, causal: bool, offset: int, options: Mixed) -> float:
    """Share of the visible blocks that the action is taken on: what `budget` comes to for these lengths."""
    rows = range(-(-seq_q // BLOCK))
    visible = sum(visible_blocks(i, seq_q, seq_kv, causal, offset) for i in rows)
    return sum(chosen_a_row(i, seq_q, seq_kv, causal, offset, options) for i in rows) / visible if visible else 0.0
