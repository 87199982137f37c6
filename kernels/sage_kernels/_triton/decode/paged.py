"""INT8 pages of keys and values: append tokens, read them back, and decode attention by block tables.

Attention is that of kernel.py with another way to a tile of keys: all keys of a tile lie in one page. The keys of a
sequence are split into chunks of a fixed length, so that long sequences take more programs than short ones, and no
result depends on the number of sequences.
"""

import torch
import triton
import triton.language as tl

from ...facts.numerics import LOG2_E
from ..launch import buffer, capability_of, launch
from ..primitives import head_width
from .append_kv import _store_tokens
from .cache_tiles import load_codes, load_scales
from .combine import _combine_kernel
from .kernel import _LOG2_E, _LOW_STEPS, _quantize_queries, _step
from .tiles import decode_tile


MOST_CHUNKS = 32
CHUNK = 512  # keys of a program


@triton.jit
def _newest_slot(t, table_ptr, ends_ptr, stride_table, columns, page_size):
    """Return (page, place in it, whether there is one) of a sequence's last token."""
    number = tl.load(ends_ptr + t + 1) - tl.load(ends_ptr + t)
    last = tl.maximum(number - 1, 0)
    kept = (number > 0) & (last < columns * page_size)
    page = tl.load(table_ptr + t * stride_table + last // page_size, mask=kept, other=-1).to(tl.int64)
    return tl.maximum(page, 0), last % page_size, kept & (page >= 0)


@triton.jit
def _given_slot(t, slots_ptr, page_size):
    """Return (page, place in it, whether there is one) of a slot number."""
    slot = tl.load(slots_ptr + t)
    return tl.maximum(slot, 0) // page_size, tl.maximum(slot, 0) % page_size, slot >= 0


@triton.jit(do_not_specialize=["columns", "page_size"])
def _append_pages_kernel(
    k_ptr, v_ptr, k_codes_ptr, k_scale_ptr, v_codes_ptr, v_scale_ptr, slots_ptr, table_ptr, ends_ptr,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_page, stride_scale_page, stride_table, columns, page_size,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, FROM_TABLE: tl.constexpr,
):  # fmt: skip
    """Quantise all heads of one token into its page. Grid: tokens."""
    t = tl.program_id(0).to(tl.int64)
    if FROM_TABLE:
        page, place, kept = _newest_slot(t, table_ptr, ends_ptr, stride_table, columns, page_size)
    else:
        page, place, kept = _given_slot(t, slots_ptr, page_size)
    heads, channels = tl.arange(0, HEADS_2), tl.arange(0, WIDTH)
    inside = (heads < HEADS)[:, None] & (channels < HEAD_DIM)[None, :]
    k = tl.load(k_ptr + t * stride_kt + heads[:, None] * stride_kh + channels[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + t * stride_vt + heads[:, None] * stride_vh + channels[None, :], mask=inside, other=0.0)
    codes, scales = page * stride_page + place * (HEADS * HEAD_DIM), page * stride_scale_page + place * HEADS
    is_head = (heads < HEADS) & kept
    _store_tokens(k.to(tl.float32), k_codes_ptr + codes, k_scale_ptr + scales, heads, HEAD_DIM, 1, is_head, channels,
                  HEAD_DIM)  # fmt: skip
    _store_tokens(v.to(tl.float32), v_codes_ptr + codes, v_scale_ptr + scales, heads, HEAD_DIM, 1, is_head, channels,
                  HEAD_DIM)  # fmt: skip


@triton.jit(do_not_specialize=["page_size"])
def _read_pages_kernel(
    k_codes_ptr, k_scale_ptr, v_codes_ptr, v_scale_ptr, slots_ptr, k_ptr, v_ptr, stride_page, stride_scale_page,
    page_size, HEADS: tl.constexpr, HEADS_2: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Dequantise all heads of the token in one slot. Grid: slots."""
    t = tl.program_id(0).to(tl.int64)
    page, place, kept = _given_slot(t, slots_ptr, page_size)
    heads, channels = tl.arange(0, HEADS_2), tl.arange(0, WIDTH)
    inside = (heads < HEADS)[:, None] & (channels < HEAD_DIM)[None, :] & kept
    tile = heads[:, None] * HEAD_DIM + channels[None, :]
    codes = page * stride_page + place * (HEADS * HEAD_DIM) + tile
    scales = page * stride_scale_page + place * HEADS + heads
    k_scale = tl.load(k_scale_ptr + scales, mask=(heads < HEADS) & kept, other=0.0).to(tl.float32)
    v_scale = tl.load(v_scale_ptr + scales, mask=(heads < HEADS) & kept, other=0.0).to(tl.float32)
    k = tl.load(k_codes_ptr + codes, mask=inside, other=0).to(tl.float32) * k_scale[:, None]
    v = tl.load(v_codes_ptr + codes, mask=inside, other=0).to(tl.float32) * v_scale[:, None]
    inside = (heads < HEADS)[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(k_ptr + t * (HEADS * HEAD_DIM) + tile, k.to(k_ptr.dtype.element_ty), mask=inside)
    tl.store(v_ptr + t * (HEADS * HEAD_DIM) + tile, v.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_page_tile(tile, n_keys, table, k_codes, k_scales, v_words, v_scales, stride_page, stride_scale_page,
                    page_size, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
                    BLOCK_N: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load codes and scales of a key tile from the page that holds it; pointers are at this head."""
    first = tile * BLOCK_N
    page = tl.load(table + first // page_size).to(tl.int64)
    place = first % page_size
    inner, keys = place // BLOCK_N, n_keys - (first - place)  # the tile's number in its page, keys from the page on
    codes, scales = page * stride_page, page * stride_scale_page
    k, v = load_codes(
        inner, keys, 0, page_size, k_codes + codes, v_words + codes // 2, KV_HEADS * HEAD_DIM,
        KV_HEADS * (HEAD_DIM // 2), HEAD_DIM, WIDTH, BLOCK_N, False, MASKED, "",
    )  # fmt: skip
    k_scale, v_scale = load_scales(
        inner, keys, 0, page_size, k_scales + scales, v_scales + scales, KV_HEADS, KV_HEADS, BLOCK_N, False, MASKED
    )
    return k, v, k_scale, v_scale


@triton.jit(do_not_specialize=["columns", "page_size", "chunk_tiles", "splits", "all_rows"])
def _paged_attention_kernel(
    q_ptr, k_codes_ptr, k_scale_ptr, v_words_ptr, v_scale_ptr, table_ptr, ends_ptr, sinks_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_page, stride_scale_page, stride_table, columns, page_size, chunk_tiles, splits,
    all_rows, softcap, softmax_scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROW_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PARTIAL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend the heads of one group of one sequence to one chunk of its keys.

    PARTIAL: write out fp32 [splits, B, H, D] and lse fp32 [splits, B, H], base 2; a chunk without keys writes nothing.
    """
    split = tl.program_id(0) % splits
    head = tl.program_id(0) // splits
    row_tile = head % ROW_TILES
    head = head // ROW_TILES
    b, h_kv = (head // KV_HEADS).to(tl.int64), head % KV_HEADS
    number = tl.load(ends_ptr + b + 1) - tl.load(ends_ptr + b)
    n_keys = tl.minimum(tl.maximum(number, 0), columns * page_size)
    begin = split * chunk_tiles
    end = tl.minimum(begin + chunk_tiles, tl.cdiv(n_keys, BLOCK_N))
    if PARTIAL:
        if begin >= end:
            return
    full_end = tl.maximum(tl.minimum(end, n_keys // BLOCK_N), begin)

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < GROUP
    h = h_kv * GROUP + rows
    channels = tl.arange(0, WIDTH)
    inside = is_row[:, None] & (channels < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + b * stride_qb + h[:, None] * stride_qh + channels[None, :], mask=inside, other=0.0)
    high, low, q_scale = _quantize_queries(q.to(tl.float32))
    row_scale = q_scale * (softmax_scale * _LOG2_E / _LOW_STEPS)
    shift = tl.zeros([BLOCK_M], tl.float32)
    table = table_ptr + b * stride_table
    k_codes, k_scales = k_codes_ptr + h_kv * HEAD_DIM, k_scale_ptr + h_kv
    v_words, v_scales = v_words_ptr + h_kv * (HEAD_DIM // 2), v_scale_ptr + h_kv

    even = tl.zeros([WIDTH // 2, BLOCK_M], tl.float32)
    odd = tl.zeros([WIDTH // 2, BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(begin, full_end, num_stages=STAGES):
        k, v, k_scale, v_scale = _load_page_tile(
            tile, n_keys, table, k_codes, k_scales, v_words, v_scales, stride_page, stride_scale_page, page_size,
            KV_HEADS, HEAD_DIM, WIDTH, BLOCK_N, False,
        )  # fmt: skip
        even, odd, top, total = _step(
            tile, n_keys, k, v, k_scale, v_scale, high, low, row_scale, shift, rows, q_ptr, 0, is_row, 0, 0, softcap,
            even, odd, top, total, BLOCK_N, False, "none", False, False, False, SOFTCAP, ASM,
        )  # fmt: skip
    for tile in tl.range(full_end, end, num_stages=1):
        k, v, k_scale, v_scale = _load_page_tile(
            tile, n_keys, table, k_codes, k_scales, v_words, v_scales, stride_page, stride_scale_page, page_size,
            KV_HEADS, HEAD_DIM, WIDTH, BLOCK_N, True,
        )  # fmt: skip
        even, odd, top, total = _step(
            tile, n_keys, k, v, k_scale, v_scale, high, low, row_scale, shift, rows, q_ptr, 0, is_row, 0, 0, softcap,
            even, odd, top, total, BLOCK_N, True, "none", False, False, False, SOFTCAP, ASM,
        )  # fmt: skip

    total = tl.sum(total, 0)
    acc = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), (BLOCK_M, WIDTH))
    if HAS_SINKS:  # counted in the first chunk only
        sink = tl.load(sinks_ptr + h, mask=is_row & (split == 0) & (n_keys > 0), other=float("-inf")) * _LOG2_E
        new_top = tl.maximum(top, sink)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - safe)
        acc, total, top = acc * rescale[:, None], tl.fma(total, rescale, tl.exp2(sink - safe)), new_top
    out = tl.where(((total == 0.0) & (top == float("-inf")))[:, None], 0.0, acc / total[:, None])
    out = tl.where(number > columns * page_size, float("nan"), out)
    all_h = b * (KV_HEADS * GROUP) + h
    if PARTIAL:
        all_h += split.to(tl.int64) * all_rows
        tl.store(lse_ptr + all_h, top + tl.log2(total), mask=is_row)
    tl.store(out_ptr + all_h[:, None] * HEAD_DIM + channels[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["chunk", "splits", "all_rows"])
def _combine_pages_kernel(partial_ptr, lse_ptr, ends_ptr, out_ptr, chunk, splits, all_rows, HEADS: tl.constexpr,
                          HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Merge the chunks of one row that have keys, in their order. Grid: rows."""
    b = tl.program_id(0) // HEADS
    number = tl.maximum(tl.load(ends_ptr + b + 1) - tl.load(ends_ptr + b), 0)
    used = tl.minimum(tl.cdiv(number, chunk), splits)
    _combine_kernel(
        partial_ptr, lse_ptr, out_ptr, lse_ptr, used, all_rows, HEAD_DIM, WIDTH, BLOCK_S, WIDTH, False, False
    )


def _heads_and_strides(pages) -> tuple[dict, tuple[int, int]]:
    """Return the constants and strides of pages that all kernels take. K and V have the same layout."""
    _, _, heads, head_dim = pages.k_codes.shape
    constants = {"HEADS": heads, "HEADS_2": triton.next_power_of_2(heads), "HEAD_DIM": head_dim}
    return constants | {"WIDTH": head_width(head_dim)}, (pages.k_codes.stride(0), pages.k_scale.stride(0))


def launch_append_pages(k, v, pages, slots, table, ends) -> None:
    """Launch `append_pages` on k's device and current stream. Arguments are checked, and k is not empty."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    constants, strides = _heads_and_strides(pages)
    given = (pages.k_scale if x is None else x for x in (slots, table, ends))
    with torch.cuda.device_of(k):
        launch(
            _append_pages_kernel, k.shape[0], k, v, *pages, *given, *k.stride()[:2], *v.stride()[:2], *strides,
            0 if table is None else table.stride(0), 0 if table is None else table.shape[1], pages.k_codes.shape[1],
            **constants, FROM_TABLE=slots is None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def launch_read_pages(pages, slots, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `read_pages` on the pages' device and current stream; keys and values [N, H_kv, D]."""
    constants, strides = _heads_and_strides(pages)
    shape = (slots.shape[0], *pages.k_codes.shape[2:])
    k, v = (torch.empty(shape, dtype=dtype, device=slots.device) for _ in range(2))
    if shape[0]:
        with torch.cuda.device_of(slots):
            launch(
                _read_pages_kernel, shape[0], *pages, slots, k, v, *strides, pages.k_codes.shape[1], **constants,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return k, v


def launch_paged_attention(q, pages, table, ends, *, softcap: float, sinks, scale: float, chunk: int = CHUNK):
    """Launch `paged_attention` on q's device and current stream. Arguments are checked and not empty.

    chunk: keys of a program, a multiple of 64 (tests); grown where a table would have more than MOST_CHUNKS of them.
    """
    q = q if q.stride(2) == 1 else q.contiguous()
    batch, heads, head_dim = q.shape
    _, page_size, kv_heads, _ = pages.k_codes.shape
    columns, capability = table.shape[1], capability_of(q.device)
    tile = decode_tile(head_dim, heads // kv_heads, 0, capability)
    block_n = tile.block_n
    while page_size % block_n:
        block_n //= 2
    while columns * page_size > chunk * MOST_CHUNKS:
        chunk *= 2
    splits = triton.cdiv(columns * page_size, chunk)
    row_tiles = triton.cdiv(heads // kv_heads, tile.block_m)
    _, strides = _heads_and_strides(pages)
    out = buffer(batch, heads, head_dim, dtype=q.dtype, device=q.device, returned=True)
    target, lse = out, out
    if splits > 1:
        target = buffer(splits, batch * heads, head_dim, device=q.device)
        lse = buffer(splits, batch * heads, device=q.device)
    k_codes, k_scale, v_codes, v_scale = pages
    with torch.cuda.device_of(q):
        launch(
            _paged_attention_kernel, batch * kv_heads * row_tiles * splits,
            q, k_codes, k_scale, v_codes.view(torch.int16), v_scale, table, ends, out if sinks is None else sinks,
            target, lse, *q.stride()[:2], *strides, table.stride(0), columns, page_size, chunk // block_n, splits,
            batch * heads, softcap * LOG2_E, scale,
            GROUP=heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, WIDTH=head_width(head_dim),
            ROW_TILES=row_tiles, BLOCK_M=tile.block_m, BLOCK_N=block_n, STAGES=tile.num_stages, SOFTCAP=softcap > 0,
            HAS_SINKS=sinks is not None, PARTIAL=splits > 1, ASM=capability > 0, num_warps=tile.num_warps,
            enable_fp_fusion=False, **({"maxnreg": tile.max_registers} if tile.max_registers else {}),
        )  # fmt: skip
        if splits > 1:
            launch(
                _combine_pages_kernel, batch * heads, target, lse, ends, out, chunk, splits, batch * heads,
                HEADS=heads, HEAD_DIM=head_dim, WIDTH=head_width(head_dim), BLOCK_S=16, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out
