"""Tiles of the matmuls of 8-bit weights: a table by GPU and by how many rows and columns there are."""

from typing import NamedTuple


class LinearTile(NamedTuple):
    """One way to cut a matmul.

    Attributes:
        block_m, block_n, block_k: of a tile.
        num_warps, num_stages: of a program.
        kernel: "pointers" (matmul.py) or "hopper" (hopper/), whose num_stages are the slots of its ring.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    kernel: str = "pointers"


POINTERS = LinearTile(128, 128, 64, 8, 4)  # of many rows, where the copy engine can't read them or there is no Gluon
_FEW_TILES = 264  # of 256 x 128: two for each SM of an H200; below, smaller ones keep more of them busy

_LEAST_PART = 512  # channels that a program multiplies at least
_LEAST_SAVED = 2560 * 256 * 128  # multiply-adds of a program: 12 µs on an H200; the host launches once more


def choose_linear_tile(capability: int, rows: int, columns: int) -> LinearTile:
    """The tile for x [rows, K] and a weight [columns, K] on a GPU of this capability (90: Hopper; 0: AMD).

    Hopper's were timed with the shapes of suite linear; those of other GPUs were only compiled.
    """
    if rows <= 16:
        return LinearTile(16, 64, 128, 4, 4)
    if rows <= 64:
        return LinearTile(64, 64, 128, 4, 4)
    if capability != 90:
        return POINTERS._replace(num_stages=4 if capability else 2)
    if -(-rows // 256) * -(-columns // 128) < _FEW_TILES:
        return LinearTile(128, 128, 128, 4, 6, "hopper")
    return LinearTile(256, 128, 128, 4, 4, "hopper")


def split_last_tiles(tile: LinearTile, tiles: int, processors: int, depth: int) -> tuple[int, int]:
    """(how many of the tiles are multiplied whole, how many programs share each of the others).

    Programs take tile after tile, and the last round may have work for a few of them only: then a tile of that round
    is shared, some channels each. Their sums go through memory and are added by a launch of its own (parts.py), so the
    shorter round has to save more than that costs.
    """
    rest = tiles % processors
    parts = min(processors // max(rest, 1), depth // _LEAST_PART)
    saved = (depth - depth // max(parts, 1)) * tile.block_m * tile.block_n
    return (tiles - rest, parts) if rest and saved >= _LEAST_SAVED else (tiles, 1)


def choose_weight_only_tile(capability: int, rows: int, *, fp32: bool = False) -> LinearTile:
    """The tile for x [rows, K] in 16 bit, or fp32, and a weight in 8 bit; compiled, never timed.

    Few rows: three tiles of 8 KiB of the weight are under way while one is multiplied, in programs so small that some
    fit on an SM beside each other. FP32 has no matrix units, and its operands are in registers.
    """
    stages = 4 if capability else 2
    if fp32:
        return LinearTile(16, 32, 32, 4, 2)
    if rows <= 16:
        return LinearTile(16, 32, 256, 2, stages)
    return LinearTile(64, 128, 64, 4, stages)
