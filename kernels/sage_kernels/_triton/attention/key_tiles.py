"""Which key tiles a tile of query rows visits, and in which order: wholly visible ones first."""

import triton
import triton.language as tl


@triton.jit
def band_tiles(first_row, seq_q, seq_kv, left, right, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):  # fmt: skip
    """The key tiles of BLOCK_M query rows from first_row on: the first visited one, the first that every row sees
    wholly, how many are so, and how many are visited. Scalars only: Gluon calls it too."""
    last_row = tl.minimum(first_row + BLOCK_M, seq_q) - 1
    any_first = 0
    all_first = 0
    any_last = seq_kv
    all_last = seq_kv
    if HAS_LEFT:
        any_first = tl.maximum(first_row + offset - left, 0)
        all_first = tl.maximum(last_row + offset - left, 0)
    if HAS_RIGHT:
        any_last = tl.minimum(last_row + offset + right + 1, seq_kv)
        all_last = tl.minimum(first_row + offset + right + 1, seq_kv)
    first = any_first // BLOCK_N
    visited = tl.maximum(tl.cdiv(tl.maximum(any_last, 0), BLOCK_N) - first, 0)
    first_full = tl.cdiv(all_first, BLOCK_N)
    full = tl.maximum(tl.maximum(all_last, 0) // BLOCK_N - first_full, 0)
    return tl.where(visited > 0, first, 0), first_full, full, visited


@triton.jit
def tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK: tl.constexpr, HAS_LEFT: tl.constexpr):
    """The i-th visited key tile: the wholly visible ones come first."""
    if MASK != "none":
        tile = tl.load(tiles_ptr + tl.where(i < full, i, n_tiles - 1 - (i - full)))
    elif HAS_LEFT:
        edge = first + i - full
        tile = tl.where(i < full, first_full + i, tl.where(edge >= first_full, edge + full, edge))
    else:
        tile = first + i
    return tile
