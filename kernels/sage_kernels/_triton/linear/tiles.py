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
        prefetch: bytes of each row of the weight that L2 reads while the launch before still runs, a multiple of 128;
            0: none.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    lanes: int = 1
    parts: int = 1
    prefetch: int = 0


# Rows of Hopper's table: (most rows, most columns, tile). The first that fits counts. Chosen by a sweep of INT8
# weights on an H200, in graphs of products whose weights exceed L2, as tiles that lose little over the shapes of
# models from 1 to 70 billion parameters; e4m3 takes the same tiles. Behind each are cases of bench_few_rows.py that
# run it. Up to 4,224 columns, tiles of 16 rows of the weight are one round of two programs an SM. With more rows than
# 8 the activation is read so often that taller tiles, shared by programs, read less.
_ANY = 2**62
_HOPPER = (
    (8, 4224, FewRowsTile(8, 16, 128, 4, 6, lanes=4, prefetch=1024)),  # llama3_8b_out, llama3_8b_down
    (8, 7168, FewRowsTile(8, 16, 256, 4, 3, lanes=4, prefetch=1024)),  # llama3_8b_qkv
    (8, 12288, FewRowsTile(8, 16, 256, 2, 4, lanes=2, prefetch=1024)),  # llama3_70b_out, llama3_70b_down
    (8, _ANY, FewRowsTile(8, 32, 128, 4, 3, lanes=4)),  # llama3_8b_up, llama3_8b_head
    (16, 4224, FewRowsTile(16, 32, 128, 4, 3, lanes=4, parts=2)),  # llama3_8b_out, llama3_8b_down
    (16, _ANY, FewRowsTile(16, 32, 128, 4, 3, lanes=4)),  # llama3_8b_qkv, llama3_8b_up, llama3_8b_head
    (32, 4224, FewRowsTile(32, 128, 128, 4, 4, parts=8)),  # llama3_8b_out, llama3_8b_down
    (32, 12288, FewRowsTile(32, 64, 64, 4, 3, lanes=4, parts=2)),  # llama3_8b_qkv
    (32, _ANY, FewRowsTile(32, 64, 128, 4, 4)),  # llama3_8b_up, llama3_8b_head
    (_ANY, 4224, FewRowsTile(64, 64, 128, 4, 4, parts=4)),  # llama3_8b_out, llama3_8b_down
    (_ANY, 12288, FewRowsTile(64, 64, 128, 4, 4, parts=2)),  # llama3_8b_qkv
    (_ANY, _ANY, FewRowsTile(64, 128, 128, 4, 4, parts=2)),  # llama3_8b_up, llama3_8b_head
)


def choose_weight_only_tile(
    capability: int, rows: int, columns: int, *, fp32: bool = False, batch_invariant: bool = False
) -> FewRowsTile:
    """Choose the tile for x [rows, K] in 16 bit or fp32 and an 8-bit weight [columns, K].

    batch_invariant: the same tile for any number of rows. fp32 has no tensor cores and keeps its operands in
    registers. Other GPUs than Hopper were only compiled for.
    """
    rows = _ANY if batch_invariant else rows
    if fp32:
        return FewRowsTile(16, 32, 32, 4, 2)
    if capability == 90:
        return next(tile for most, widest, tile in _HOPPER if rows <= most and columns <= widest)
    stages = 3 if capability else 2
    if rows <= 8:
        return FewRowsTile(8, 16, 128, 4, stages, lanes=4)
    return FewRowsTile(16, 16, 64, 4, stages, lanes=4) if rows <= 16 else FewRowsTile(64, 64, 64, 4, stages)
