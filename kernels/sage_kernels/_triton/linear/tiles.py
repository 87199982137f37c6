"""Tiles of the 8-bit matmul: a table by GPU and by how many rows there are."""

from typing import NamedTuple


class LinearTile(NamedTuple):
    """One way to cut a matmul.

    Attributes:
        block_m, block_n, block_k: of a tile.
        num_warps, num_stages: of a program.
        use_tma: the kernel of matmul_tma.py. parts: of its columns, that are finished one after the other.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    parts: int = 1


def choose_linear_tile(capability: int, rows: int, columns: int, depth: int) -> LinearTile:
    """The tile for x [rows, depth] and a weight [columns, depth] on a GPU of this capability (90: Hopper; 0: AMD)."""
    if rows <= 16:
        return LinearTile(16, 64, 128, 4, 4)
    if rows <= 64:
        return LinearTile(64, 64, 128, 4, 4)
    if capability == 90 and rows > 128:
        return LinearTile(128, 256, 128, 8, 4, True, 4)
    return LinearTile(128, 128, 64 if capability == 0 else 128, 8, 3)
