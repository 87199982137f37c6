"""Tile sizes of the 8-bit matmuls, by GPU and by the number of rows and columns."""

from typing import NamedTuple


class LinearTile(NamedTuple):
    """Sizes of one variant of a matmul kernel.

    Attributes:
        block_m, block_n, block_k: of a tile.
        num_warps, num_stages: of a program; for the Hopper kernel num_stages is the number of slots of its ring.
        kernel: "pointers" (matmul.py) or "hopper" (hopper/).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    kernel: str = "pointers"


POINTERS = LinearTile(128, 128, 64, 8, 4)  # for many rows, if there is no Gluon or the copy engine can't read them
_FEW_TILES = 264  # of 256 x 128: two for each SM of an H200; with fewer, smaller tiles keep more SMs busy

# Limits for sharing the last tiles (`split_last_tiles`)
_LEAST_PART = 512  # channels of a part
_LEAST_SAVED = 2560 * 256 * 128  # multiply-adds that each program must save: 12 µs on an H200, for one more launch


def choose_linear_tile(capability: int, rows: int, columns: int) -> LinearTile:
    """Choose the tile for x [rows, K] and a weight [columns, K] on a GPU of this capability.

    capability: 90 is Hopper, 0 is AMD. Hopper's tiles were timed with the shapes of the benchmark suite "linear"; the
    tiles of other GPUs were only compiled.
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
    """Decide whether programs share the last tiles of the Hopper matmul.

    Programs take tile after tile, and the last round may have work for only a few of them. Then several programs share
    each tile of that round, and each multiplies some of its channels. Their sums go through memory and are added by
    another launch (`_add_parts_kernel`), so the shorter round must save more than that costs.

    Returns: the number of tiles multiplied whole, and how many programs share each of the others (1: none is shared).
    """
    rest = tiles % processors
    parts = min(processors // max(rest, 1), depth // _LEAST_PART)
    saved = (depth - depth // max(parts, 1)) * tile.block_m * tile.block_n
    return (tiles - rest, parts) if rest and saved >= _LEAST_SAVED else (tiles, 1)


class FewRowsTile(NamedTuple):
    """Sizes of one variant of the kernel for few rows and an 8-bit weight.

    Attributes:
        block_m, block_n, block_k: of a tile; a step multiplies lanes · block_k of the depth.
        num_warps, num_stages: of a program.
        lanes: warps divide the depth of a step into so many pieces.
        parts: so many programs share a tile, each with some of the depth.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    lanes: int = 1
    parts: int = 1


def choose_weight_only_tile(
    capability: int, rows: int, columns: int, depth: int, *, fp32: bool = False, batch_invariant: bool = False
) -> FewRowsTile:
    """Choose the tile for x [rows, depth] in 16 bit or fp32 and an 8-bit weight [columns, depth].

    fp32 has no tensor cores and keeps its operands in registers. batch_invariant: the same tile for any number of rows.
    """
    if fp32:
        return FewRowsTile(16, 32, 32, 4, 2)
    stages = 4 if capability else 2
    if rows <= 8 and not batch_invariant:
        return FewRowsTile(8, 16, 128, 4, stages, lanes=4)
    if rows <= 16 and not batch_invariant:
        return FewRowsTile(16, 16, 128, 4, stages, lanes=4)
    return FewRowsTile(64, 64, 128, 4, stages)
