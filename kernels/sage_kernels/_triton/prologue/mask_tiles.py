"""Lists of the key tiles to visit for each query tile, made from the mask before attention runs.

A list has fully visible tiles at its front and partly visible ones, which need the mask, at its end. So the attention
kernel runs two plain loops and never touches hidden tiles. The order of keys does not matter to softmax.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...facts.masking import FAINT, Masking
from ..launch import launch
from ..primitives import RELAXED, as_loadable, broadcast_strides, load_bias


_FAINT = tl.constexpr(FAINT)
TILES_PER_STEP = tl.constexpr(32)  # key tiles looked at together
# Added to a tile in the Hopper kernel's lists if keys in it are hidden from all rows: their values may be anything
HIDES_KEYS = tl.constexpr(1 << 30)


class MaskTiles(NamedTuple):
    """A mask in the form the kernels read. Without a mask every tensor is None.

    Attributes:
        kind: "none", "keys" (one vector of keys a sample), "rows" (any other mask) or "tiles" (lists alone: nothing is
            hidden, but not all tiles are visited).
        reach: fp32 [B or 1, H_kv or 1, tiles·block_n], the largest bias that any row adds to a key, base 2. -inf for
            keys hidden from all rows and beyond the sequence.
        extent: int32 [B or 1, H_kv or 1], one past the last key that counts for quantisation scales.
        tiles: int32 [lists, tiles], one list for each query tile (kinds "rows" and "tiles") or sample ("keys").
        numbers: int32 [lists, 2]: how many tiles of a list are fully visible, and how many are visited.
        list_strides: distance, in lists, from one sample, head and query tile to the next.
    """

    kind: str = "none"
    reach: torch.Tensor | None = None
    extent: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    list_strides: tuple[int, int, int] = (0, 0, 0)

    @property
    def reach_strides(self) -> tuple[int, int]:
        """Strides of `reach` over samples and key/value heads, in elements; 0 if they share it."""
        if self.reach is None:
            return 0, 0
        batch, heads, width = self.reach.shape
        return (heads * width if batch > 1 else 0), (width if heads > 1 else 0)


@triton.jit
def append_tiles(tiles_ptr, n_tiles, tile, is_any, is_full, full, partial):
    """Append tiles [N] to a list, fully visible ones in front, others at the end. Return the new counts."""
    is_partial = (is_any & (is_full == 0)).to(tl.int32)
    is_full = (is_any & is_full).to(tl.int32)
    tl.store(tiles_ptr + full + tl.cumsum(is_full, 0) - 1, tile, mask=is_full != 0)
    tl.store(tiles_ptr + n_tiles - partial - tl.cumsum(is_partial, 0), tile, mask=is_partial != 0)
    return full + tl.sum(is_full, 0), partial + tl.sum(is_partial, 0)


@triton.jit
def close_list(tiles_ptr, numbers_ptr, n_tiles, full, partial):
    """Write the lengths of a list's two parts: fully visible tiles, and all visited ones."""
    if full + partial == 0:  # a query tile that sees nothing still reads the first entry, from the back
        tl.store(tiles_ptr + n_tiles - 1, 0)
    tl.store(numbers_ptr, full)
    tl.store(numbers_ptr + 1, full + partial)


@triton.jit(do_not_specialize=["seq_kv"])
def _key_mask_kernel(mask_ptr, reach_ptr, extent_ptr, tiles_ptr, numbers_ptr, stride_mb, stride_mk, seq_kv,
                     BLOCK_N: tl.constexpr):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    n_tiles = tl.cdiv(seq_kv, BLOCK_N)
    tiles_ptr += b * n_tiles
    full = 0
    partial = 0
    extent = 0
    for first in range(0, n_tiles, TILES_PER_STEP):
        tile = first + tl.arange(0, TILES_PER_STEP)
        keys = tile[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        bias = load_bias(mask_ptr + b * stride_mb + keys.to(tl.int64) * stride_mk, keys < seq_kv)
        tl.store(reach_ptr + b * n_tiles * BLOCK_N + keys, bias, mask=(tile < n_tiles)[:, None])
        extent = tl.maximum(extent, tl.max(tl.max(tl.where(bias > _FAINT, keys + 1, 0), 1), 0))
        is_any = tl.max(bias, 1) > float("-inf")
        is_full = tl.max((bias != 0.0).to(tl.int32), 1) == 0
        full, partial = append_tiles(tiles_ptr, n_tiles, tile, is_any, is_full, full, partial)
    tl.store(extent_ptr + b, extent)
    close_list(tiles_ptr, numbers_ptr + b * 2, n_tiles, full, partial)


# what a query tile sees of a key tile
_HIDDEN = tl.constexpr(0)
_PARTIAL = tl.constexpr(1)
_FULL = tl.constexpr(2)


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "mask_heads", "reach_heads", "group"])
def _row_mask_kernel(mask_ptr, reach_ptr, extent_ptr, kinds_ptr, stride_mb, stride_mh, stride_mq, stride_mk,
                     seq_q, seq_kv, mask_heads, reach_heads, group,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Look at one query tile's mask of one key tile. Grid: lists · key tiles."""
    m_tiles = tl.cdiv(seq_q, BLOCK_M)
    n_tiles = tl.cdiv(seq_kv, BLOCK_N)
    tile = tl.program_id(0) % n_tiles
    which = (tl.program_id(0) // n_tiles).to(tl.int64)
    m = (which % m_tiles).to(tl.int32)
    h = (which // m_tiles % mask_heads).to(tl.int32)
    b = which // m_tiles // mask_heads
    rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < seq_q)[:, None] & (keys < seq_kv)[None, :]
    base = mask_ptr + b * stride_mb + h.to(tl.int64) * stride_mh + rows.to(tl.int64)[:, None] * stride_mq
    bias = load_bias(base + keys.to(tl.int64)[None, :] * stride_mk, inside)
    reach = tl.max(bias, 0)
    of_head = b * reach_heads + tl.where(reach_heads > 1, h // group, 0)
    tl.atomic_max(reach_ptr + of_head * n_tiles * BLOCK_N + keys, reach, mask=reach > float("-inf"), sem=RELAXED)
    extent = tl.max(tl.where(reach > _FAINT, keys + 1, 0), 0)
    tl.atomic_max(extent_ptr + of_head, extent, sem=RELAXED)
    is_any = tl.max(reach, 0) > float("-inf")
    is_full = tl.max(tl.max((bias != 0.0).to(tl.int32), 1), 0) == 0
    tl.store(kinds_ptr + tl.program_id(0).to(tl.int64), tl.where(is_full, _FULL, tl.where(is_any, _PARTIAL, _HIDDEN)))


@triton.jit(do_not_specialize=["m_tiles", "n_tiles", "mask_heads", "reach_heads", "group"])
def _list_tiles_kernel(kinds_ptr, reach_ptr, tiles_ptr, numbers_ptr, m_tiles, n_tiles, mask_heads, reach_heads, group,
                       BLOCK_N: tl.constexpr, MARKS: tl.constexpr):  # fmt: skip
    """Make the list of one query tile from what it sees of each key tile. Grid: lists.

    MARKS: add HIDES_KEYS to tiles with keys that no row sees.
    """
    which = tl.program_id(0).to(tl.int64)
    h = which // m_tiles % mask_heads
    of_head = which // m_tiles // mask_heads * reach_heads + tl.where(reach_heads > 1, h // group, 0)
    reach_ptr += of_head * n_tiles * BLOCK_N
    kinds_ptr += which * n_tiles
    tiles_ptr += which * n_tiles
    full = 0
    partial = 0
    for first in range(0, n_tiles, TILES_PER_STEP):
        tile = first + tl.arange(0, TILES_PER_STEP)
        kind = tl.load(kinds_ptr + tile, mask=tile < n_tiles, other=_HIDDEN)
        if MARKS:
            keys = tile[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            reach = tl.load(reach_ptr + keys, mask=(tile < n_tiles)[:, None], other=0.0)
            tile += tl.where(tl.min(reach, 1) == float("-inf"), HIDES_KEYS, 0)
        full, partial = append_tiles(tiles_ptr, n_tiles, tile, kind != _HIDDEN, kind == _FULL, full, partial)
    close_list(tiles_ptr, numbers_ptr + which * 2, n_tiles, full, partial)


def launch_mask_tiles(
    masking: Masking, heads: int, kv_heads: int, seq_q: int, seq_kv: int, block_m: int, block_n: int,
    marks: bool = False,
) -> MaskTiles:  # fmt: skip
    """Make the tile lists and `reach` of masking.mask, if there is one.

    One launch for a mask of keys, two for others.

    heads, kv_heads: of queries and of keys. block_m, block_n: rows and keys of the attention kernel's tile. marks:
    lists for each query tile hold tiles plus HIDES_KEYS where it applies.
    """
    if masking.mask is None:
        return MaskTiles()
    mask = as_loadable(masking.mask)
    n_tiles = triton.cdiv(seq_kv, block_n)
    mask_batch, mask_heads, mask_rows, _ = mask.shape
    strides = broadcast_strides(mask)
    if masking.by_key:

        def empty(*shape, dtype=torch.int32):
            return torch.empty(mask_batch, *shape, dtype=dtype, device=mask.device)

        reach, extent = empty(1, n_tiles * block_n, dtype=torch.float32), empty(1)
        tiles, numbers = empty(n_tiles), empty(2)
        launch(
            _key_mask_kernel,
            mask_batch,
            mask,
            reach,
            extent,
            tiles,
            numbers,
            strides[0],
            strides[3],
            seq_kv,
            BLOCK_N=block_n,
            num_warps=8,
            enable_fp_fusion=False,
        )
        return MaskTiles("keys", reach, extent, tiles, numbers, (int(mask_batch > 1), 0, 0))
    m_tiles = triton.cdiv(seq_q, block_m)
    reach_heads = 1 if mask_heads == 1 else kv_heads
    reach = torch.full(
        (mask_batch, reach_heads, n_tiles * block_n), -torch.inf, dtype=torch.float32, device=mask.device
    )
    extent = torch.zeros(mask_batch, reach_heads, dtype=torch.int32, device=mask.device)
    tiles = torch.empty(mask_batch * mask_heads * m_tiles, n_tiles, dtype=torch.int32, device=mask.device)
    kinds = torch.empty(tiles.shape, dtype=torch.int8, device=mask.device)
    numbers = torch.empty(tiles.shape[0], 2, dtype=torch.int32, device=mask.device)
    launch(
        _row_mask_kernel, tiles.numel(),
        mask, reach, extent, kinds, *strides, seq_q, seq_kv, mask_heads, reach_heads, heads // kv_heads,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        _list_tiles_kernel, tiles.shape[0],
        kinds, reach, tiles, numbers, m_tiles, n_tiles, mask_heads, reach_heads, heads // kv_heads,
        BLOCK_N=block_n, MARKS=marks, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    by_batch, by_head = int(mask_batch > 1), int(mask_heads > 1)
    list_strides = (by_batch * mask_heads * m_tiles, by_head * m_tiles, 1)
    return MaskTiles("rows", reach, extent, tiles, numbers, list_strides)
