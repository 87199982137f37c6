"""Skip key tiles of little probability: measure the shares of some, and list the tiles to visit.

Two launches run between the prologue and attention. The first measures each query tile that is due: the share of a
row's probability that each key tile has, relative to the row's own log-sum-exp, which a first pass over the keys
finds. The second makes lists of key tiles to skip from these shares. For all query tiles it writes the key tiles to
visit, in the form that attention kernels read for masks, too. Specification: ../../reference/skipping.py.
"""

import torch
import triton
import triton.language as tl

from ...facts import skipping
from ...facts.numerics import LOG2_E
from ...facts.skipping import SkipState
from ..launch import buffer, launch
from ..primitives import RELAXED, dynamic_scale, load_tokens, nan_unless_finite, round_to_int8
from ..prologue.mask_tiles import MaskTiles, append_tiles, close_list
from ..prologue.prologue import Prepared
from .operands import load_keys


ROWS = 64  # query rows of a program that measures or compensates; a query tile has one to three such parts
_MOST_PARTS = tl.constexpr(4)
_WORD = tl.constexpr(skipping.WORD)
_LEVELS = tl.constexpr(skipping.LEVELS)
_LARGEST_LEVEL = tl.constexpr(skipping.LARGEST_LEVEL)
_SHARE_SLACK = tl.constexpr(skipping.SHARE_SLACK)
_FILL = tl.constexpr(skipping.FILL)
_NO_SHARE = tl.constexpr(skipping.NO_SHARE)
_LAST = tl.constexpr(skipping.CLOCK_LAST)
_GAP = tl.constexpr(skipping.CLOCK_GAP)
_CALLS = tl.constexpr(skipping.CLOCK_CALLS)
_RUNNING = tl.constexpr(skipping.CLOCK_RUNNING)
_BEGAN = tl.constexpr(skipping.CLOCK_BEGAN)
_TILES = tl.constexpr(skipping.TOTAL_TILES)
_VISITED = tl.constexpr(skipping.TOTAL_VISITED)
_MEASURED = tl.constexpr(skipping.TOTAL_MEASURED)
_BEYOND = tl.constexpr(skipping.TOTAL_BEYOND)
_LOST = tl.constexpr(skipping.TOTAL_LOST)
_LARGEST = tl.constexpr(skipping.TOTAL_LARGEST)
_UNITS = tl.constexpr(1 / skipping.LOSS_UNIT)


@triton.jit
def _scores(q_int, row_scale, codes, k_scales, tile, k_row, seq_kv, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Return base-2 scores of one key tile, -inf beyond the sequence."""
    k = load_keys(codes, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, False)
    scores = tl.dot(q_int, k, out_dtype=tl.int32).to(tl.float32) * (row_scale * tl.load(k_scales + tile))[:, None]
    inside = tile * BLOCK_N + tl.arange(0, BLOCK_N) < seq_kv
    return tl.where(inside[None, :], scores, float("-inf"))


@triton.jit
def quantize_rows(q_ptr, q_weight_ptr, b, h, kv_head_of_batch, offs_m, stride_qb, stride_qs, stride_qh, seq_q,
                  softmax_scale, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Return rows of Q, their codes as in the attention kernel, and factors of base-2 scores."""
    q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    q = load_tokens(q_base, offs_m, stride_qs, seq_q, HEAD_DIM, WIDTH, True).to(tl.float32)
    x = q * tl.load(q_weight_ptr + kv_head_of_batch * WIDTH + tl.arange(0, WIDTH))[None, :]
    q_scale, inverse = dynamic_scale(tl.max(tl.abs(x), 1))
    return q, round_to_int8(x * inverse[:, None]), (q_scale + nan_unless_finite(q, 1)) * softmax_scale


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "heads", "group", "m_tiles", "words", "every"])
def _measure_tiles_kernel(
    q_ptr, codes_ptr, k_scale_ptr, q_weight_ptr, lists_ptr, alarms_ptr, clock_ptr, now_ptr, limit_ptr, due_ptr,
    levels_ptr, losses_ptr, stride_qb, stride_qs, stride_qh, seq_q, seq_kv, heads, group, m_tiles, words, every,
    softmax_scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Measure the shares of all key tiles for ROWS query rows, if their query tile is due.

    Writes levels (-log2 of the largest share of any row, in steps of 1 / LEVELS) and, of the list in use, the largest
    loss of a row. A loss above the limit raises the head's alarm.
    """
    part = tl.program_id(0) % PARTS
    which = tl.program_id(0) // PARTS  # query tile, counted over all heads
    m = which % m_tiles
    head_of_batch = which // m_tiles
    b = head_of_batch // heads
    h = head_of_batch % heads
    kv_head_of_batch = b * (heads // group) + h // group
    n_tiles = tl.cdiv(seq_kv, BLOCK_N)

    # is this query tile due? The next launch sets the clock, from what is written here
    now = tl.load(now_ptr)
    limit = tl.load(limit_ptr)
    gap = now - tl.load(clock_ptr + _LAST)
    call = tl.load(clock_ptr + _CALLS) + 1
    is_void = gap >= every
    is_alarmed = tl.load(alarms_ptr + tl.num_programs(0) // (PARTS * m_tiles) + head_of_batch) != 0
    step = now - tl.load(clock_ptr + _BEGAN)
    is_due = (limit > 0.0) & (is_void | is_alarmed | ((m + step) % tl.minimum(every, m_tiles) < gap))
    if tl.program_id(0) == 0:
        tl.store(clock_ptr + _GAP, gap)
        tl.store(clock_ptr + _RUNNING, call)
    if part == 0:
        tl.store(due_ptr + which, is_due.to(tl.int32))
    first_row = (m * PARTS + part) * ROWS
    if is_due & (first_row < seq_q):
        offs_m = first_row + tl.arange(0, ROWS)
        is_row = offs_m < seq_q
        _, q_int, row_scale = quantize_rows(
            q_ptr, q_weight_ptr, b, h, kv_head_of_batch, offs_m, stride_qb, stride_qs, stride_qh, seq_q,
            softmax_scale, HEAD_DIM, WIDTH,
        )  # fmt: skip
        k_row = kv_head_of_batch * n_tiles * BLOCK_N
        k_scales = k_scale_ptr + kv_head_of_batch * n_tiles
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for tile in range(n_tiles):
            scores = _scores(q_int, row_scale, codes_ptr, k_scales, tile, k_row, seq_kv, BLOCK_N, WIDTH)
            new_top = tl.maximum(top, tl.max(scores, 1))
            total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scores - new_top[:, None]), 1)
            top = new_top
        lse = top + tl.log2(total)
        is_number = tl.abs(lse) < float("inf")
        lists_ptr += which.to(tl.int64) * words
        levels_ptr += tl.program_id(0).to(tl.int64) * n_tiles
        lost = tl.zeros([ROWS], tl.float32)
        for tile in range(n_tiles):
            scores = _scores(q_int, row_scale, codes_ptr, k_scales, tile, k_row, seq_kv, BLOCK_N, WIDTH)
            share = tl.sum(tl.exp2(scores - lse[:, None]), 1)
            share = tl.where(is_row, tl.where(is_number, share, _NO_SHARE), 0.0)
            level = tl.floor(tl.log2(tl.max(share, 0) * _SHARE_SLACK) * -_LEVELS)
            level = tl.minimum(tl.maximum(level, 0.0), _LARGEST_LEVEL).to(tl.int32)
            tl.store(levels_ptr + tile, level.to(tl.uint8))
            word = tile // _WORD
            is_skipped = (tl.load(lists_ptr + word) >> (tile - word * _WORD)) & 1
            lost += share * is_skipped.to(tl.float32)
        if not is_void:
            worst = tl.max(lost, 0)
            tl.store(losses_ptr + tl.program_id(0), worst)
            if worst > limit:
                tl.store(alarms_ptr + head_of_batch, call)


@triton.jit
def _levels_of(levels_ptr, tile, n_tiles, parts, PARTS: tl.constexpr):
    """Return the levels of key tiles [N], each of the largest share in any part of the query tile.

    Beyond the sequence it is the largest level, which stands for the smallest share.
    """
    level = tile * 0 + _LARGEST_LEVEL
    for part in tl.static_range(PARTS):
        found = tl.load(levels_ptr + part * n_tiles + tile, mask=(tile < n_tiles) & (part < parts), other=255)
        level = tl.minimum(level, found.to(tl.int32))
    return level


@triton.jit
def _lost_from(least, levels_ptr, n_tiles, parts, PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return the most that a row loses if all key tiles from level `least` on are skipped."""
    lost = tl.zeros([AT_ONCE], tl.float32)
    for first in range(0, n_tiles, AT_ONCE):
        tile = first + tl.arange(0, AT_ONCE)
        level = _levels_of(levels_ptr, tile, n_tiles, parts, PARTS)
        share = tl.exp2(level.to(tl.float32) * (-1.0 / _LEVELS))
        lost += tl.where((level >= least) & (tile < n_tiles), share, 0.0)
    return tl.sum(lost, 0)


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "m_tiles", "words", "every"])
def _choose_tiles_kernel(
    lists_ptr, bound_ptr, alarms_ptr, clock_ptr, now_ptr, limit_ptr, totals_ptr, due_ptr, levels_ptr, losses_ptr,
    tiles_ptr, numbers_ptr, left_out_ptr, seq_q, seq_kv, m_tiles, words, every,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, COMPENSATES: tl.constexpr,
):  # fmt: skip
    """Renew the list of one query tile if it is due, write its key tiles to visit, and count totals.

    With COMPENSATES it also writes the tiles that are left out, in order.
    """
    which = tl.program_id(0)
    head_of_batch = which // m_tiles
    m = which % m_tiles
    n_tiles = tl.cdiv(seq_kv, BLOCK_N)
    limit = tl.load(limit_ptr)
    call = tl.load(clock_ptr + _RUNNING)
    is_void = tl.load(clock_ptr + _GAP) >= every
    is_alarmed = tl.load(alarms_ptr + head_of_batch) == call
    is_due = tl.load(due_ptr + which) != 0
    if which == 0:
        tl.store(clock_ptr + _CALLS, call)
        if limit > 0.0:
            now = tl.load(now_ptr)
            tl.store(clock_ptr + _LAST, now)
            if is_void:
                tl.store(clock_ptr + _BEGAN, now)
    if m == 0:
        tl.store(alarms_ptr + tl.num_programs(0) // m_tiles + head_of_batch, is_alarmed.to(tl.int32))
    lists_ptr += which.to(tl.int64) * words
    levels_ptr += which.to(tl.int64) * PARTS * n_tiles
    tiles_ptr += which.to(tl.int64) * n_tiles
    left_out_ptr += which.to(tl.int64) * n_tiles
    parts = tl.minimum(tl.cdiv(seq_q - m * PARTS * ROWS, ROWS), PARTS)

    # bisection: the smallest level from which on all key tiles together are within the limit
    least = _LARGEST_LEVEL + 1
    if is_due:
        too_small = 0
        for _ in range(8):  # 2^8 levels
            middle = (too_small + least) // 2
            fits = _lost_from(middle, levels_ptr, n_tiles, parts, PARTS, AT_ONCE) <= limit * _FILL
            least = tl.where(fits, middle, least)
            too_small = tl.where(fits, too_small, middle)
        tl.store(bound_ptr + which, _lost_from(least, levels_ptr, n_tiles, parts, PARTS, AT_ONCE))

    bit = tl.arange(0, _WORD)
    is_used = (limit > 0.0).to(tl.int32)
    is_kept = ((is_void | is_alarmed) == 0).to(tl.int32)
    full = 0
    partial = 0
    left_out = 0
    for word in range(words):
        tile = word * _WORD + bit
        inside = (tile < n_tiles).to(tl.int32)
        skipped = (tl.load(lists_ptr + word) >> bit) & is_kept
        if is_due:
            skipped = (_levels_of(levels_ptr, tile, n_tiles, parts, PARTS) >= least).to(tl.int32) & inside
        skipped = skipped & 1
        tl.store(lists_ptr + word, tl.sum(skipped << bit, 0))
        is_any = inside & (1 - (skipped & is_used))
        is_full = ((tile + 1) * BLOCK_N <= seq_kv).to(tl.int32)
        full, partial = append_tiles(tiles_ptr, n_tiles, tile, is_any, is_full, full, partial)
        if COMPENSATES:
            is_left = inside & skipped & is_used
            tl.store(left_out_ptr + left_out + tl.cumsum(is_left, 0) - 1, tile, mask=is_left != 0)
            left_out += tl.sum(is_left, 0)
    close_list(tiles_ptr, numbers_ptr + which * 2, n_tiles, full, partial)
    tl.atomic_add(totals_ptr + _TILES, n_tiles.to(tl.int64), sem=RELAXED)
    tl.atomic_add(totals_ptr + _VISITED, (full + partial).to(tl.int64), sem=RELAXED)
    if is_due & (is_void == 0):  # the replaced list was in use: count what the worst row of all parts lost
        part = tl.arange(0, _MOST_PARTS)
        worst = tl.max(tl.load(losses_ptr + which * PARTS + part, mask=part < parts, other=0.0), 0)
        tl.atomic_add(totals_ptr + _MEASURED, tl.full([], 1, tl.int64), sem=RELAXED)
        tl.atomic_add(totals_ptr + _BEYOND, (worst > limit).to(tl.int64), sem=RELAXED)
        tl.atomic_add(totals_ptr + _LOST, (worst * _UNITS).to(tl.int64), sem=RELAXED)
        tl.atomic_max(totals_ptr + _LARGEST, worst.to(tl.int32, bitcast=True).to(tl.int64), sem=RELAXED)


def launch_skip_tiles(q, prepared: Prepared, skip: SkipState, *, kv_heads: int, seq_kv: int, scale: float, width: int):
    """Renew the lists of `skip` that are due, and write all lists for the attention kernels.

    Args:
        q: [B, S_q, H, D], the last stride 1.
        prepared: of the planned scaling, in tiles of skip.block_k keys.

    Returns: MaskTiles of kind "tiles", and int32 [lists, tiles] with the tiles left out if they are compensated.
    """
    batch, seq_q, heads, head_dim = q.shape
    device, n_tiles, (m_tiles, words) = q.device, -(-seq_kv // skip.block_k), skip.lists.shape[2:]
    lists = batch * heads * m_tiles
    rows = min(ROWS, skip.block_q)
    parts = skip.block_q // rows
    due = buffer(lists, dtype=torch.int32, device=device)
    levels = buffer(lists * parts, n_tiles, dtype=torch.uint8, device=device)
    losses = buffer(lists * parts, dtype=torch.float32, device=device)
    tiles = buffer(lists, n_tiles, dtype=torch.int32, device=device)
    numbers = buffer(lists, 2, dtype=torch.int32, device=device)
    left_out = buffer(lists, n_tiles, dtype=torch.int32, device=device) if skip.compensates else None
    launch(
        _measure_tiles_kernel, lists * parts,
        q, prepared.codes, prepared.scale, prepared.q_weight, skip.lists, *skip.tensors[2:6], due,
        levels, losses, q.stride(0), q.stride(1), q.stride(2), seq_q, seq_kv, heads, heads // kv_heads, m_tiles, words,
        skip.every, float(scale) * LOG2_E,
        HEAD_DIM=head_dim, WIDTH=width, ROWS=rows, PARTS=parts, BLOCK_N=skip.block_k,
        num_warps=4 if width <= 128 else 8, enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        _choose_tiles_kernel, lists,
        skip.lists, skip.bound, *skip.tensors[2:], due, levels, losses, tiles, numbers,
        tiles if left_out is None else left_out, seq_q, seq_kv, m_tiles, words, skip.every,
        ROWS=rows, PARTS=parts, BLOCK_N=skip.block_k, AT_ONCE=64, COMPENSATES=skip.compensates,
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    mask = MaskTiles("tiles", tiles=tiles, numbers=numbers, list_strides=(heads * m_tiles, m_tiles, 1))
    return mask, left_out
