"""Tile sizes of the attention kernels by GPU, head width and scaling.

Each row names its evidence; nothing is autotuned at call time. The width is head_dim padded to 64, 128 or 256.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """Sizes and options of one launch of an attention kernel.

    Attributes:
        block_m, block_n: query rows of a program, and keys of a turn of its loop.
        num_warps, num_stages: of the Triton kernel. In the Hopper kernel num_stages is the number of K/V buffers.
        kernel: "pointers" (cp.async), "tma" (the bulk copy engine of sm_90 and later; elsewhere Triton emulates
            descriptors without cp.async) or "hopper" (the warp-specialised Gluon kernel, sm_90 only).
        keep_first_max: the softmax reference over completely visible tiles is the largest score of the first key tile:
            no max, no rescaling. Rows with much larger scores later are computed again in the same launch.
        adds_bits: with a running max and a scale per tile, integer scores of completely visible tiles become floats by
            an addition: the mantissa of 1.5·2^23 has room for them. Where accumulators live in registers (mma.sync),
            products start with that number and nothing is converted. Chosen where it takes fewer instructions.
            Programs with scales too large for it convert all of their scores (ADDED_BITS_LIMIT).
        parts: with P·V in INT8, how many parts of the channels are multiplied one after the other. More parts mean
            fewer integer sums at a time.
        asm: INT8 codes of P are packed by NVIDIA instructions that the compiler does not find by itself.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    kernel: str
    keep_first_max: bool = False
    adds_bits: bool = False
    parts: int = 1
    asm: bool = False

    @property
    def scale_rows(self) -> int:
        """Query rows that share a quantisation scale with the scaling "per_block".

        In the Hopper kernel these are the 64 rows of one warpgroup.
        """
        return 64 if self.kernel == "hopper" else self.block_m


# Timed on an H200 by bench_tiles.py at N=4096 to 16384: the first tile's max as the reference beats the running max.
# Three consumers of small tiles hide the exponentials better than two of large ones. Width 256 is not timed: the
# largest tiles that do not spill.
_HOPPER = {
    64: Tile(192, 64, 4, 6, "hopper", True),
    128: Tile(192, 64, 4, 6, "hopper", True),
    256: Tile(64, 64, 4, 2, "tma"),
}
_HOPPER_256_PER_TOKEN = Tile(64, 32, 4, 2, "tma")
# A mask that differs by row: with two consumers there are registers for its elements.
_HOPPER_MASK = {64: Tile(128, 64, 4, 6, "hopper", True), 128: Tile(128, 64, 4, 6, "hopper", True)}
# The Hopper kernel has no soft cap and no sinks. Not timed: tiles whose loop over complete tiles does not spill.
_HOPPER_ROWS = {64: Tile(64, 128, 4, 3, "tma"), 128: Tile(64, 128, 8, 2, "tma")}
_OTHER_ROWS = Tile(64, 64, 8, 2, "pointers")
# Not timed: chosen from registers, spills and loop counts of the compiled kernels (tests/codegen.json). At
# width 256 anything larger than 32 x 32 spills on the GPUs whose matrix operands live in registers.
_WIDE = Tile(32, 32, 4, 2, "pointers")
_AMPERE = {
    64: Tile(128, 64, 4, 3, "pointers", adds_bits=True),
    128: Tile(128, 64, 8, 3, "pointers", adds_bits=True),
    256: _WIDE,
}
# 99 KB of shared memory a block
_SMALL_SHARED_MEMORY = {
    64: Tile(128, 64, 8, 2, "pointers", adds_bits=True),
    128: Tile(128, 64, 8, 2, "pointers", adds_bits=True),
    256: _WIDE,
}
# 64 keys spill at width 128
_CONSUMER_BLACKWELL = {
    64: Tile(128, 64, 8, 2, "pointers", adds_bits=True),
    128: Tile(128, 32, 8, 2, "pointers", adds_bits=True),
    256: _WIDE,
}
# 4 warps spill at width 64
_BLACKWELL = {
    64: Tile(128, 64, 8, 3, "pointers", adds_bits=True),
    128: Tile(128, 64, 8, 3, "pointers"),
    256: Tile(64, 32, 8, 2, "pointers"),
}
_AMD = {width: tile._replace(adds_bits=False) for width, tile in _AMPERE.items()}
# P and V in FP8: timed on an H200 at widths 64 and 128. The others are not: the largest tiles whose loop over
# complete tiles does not spill.
_FP8_WIDE = Tile(32, 32, 8, 2, "pointers")
_FP8 = {
    90: {64: Tile(192, 64, 4, 5, "hopper"), 128: Tile(192, 64, 4, 4, "hopper"), 256: Tile(64, 32, 8, 2, "tma")},
    100: {
        64: Tile(128, 64, 8, 3, "pointers", adds_bits=True),
        128: Tile(64, 64, 8, 3, "pointers"),
        256: Tile(64, 32, 8, 2, "pointers"),
    },
    89: {
        64: Tile(128, 64, 8, 2, "pointers", adds_bits=True),
        128: Tile(128, 32, 8, 2, "pointers", adds_bits=True),
        256: _FP8_WIDE,
    },
}
# With a running max, timed as well: two consumers with large tiles take fewer maxima and rescale less often.
_FP8_HOPPER_RUNNING = Tile(128, 128, 4, 3, "hopper")
# A mask that differs by row, not timed: each tile's products have a sum of their own, so larger tiles spill.
_FP8_HOPPER_ROWS = {64: Tile(64, 64, 4, 3, "tma"), 128: Tile(64, 64, 8, 2, "tma")}
_FP8_OTHER_ROWS = Tile(32, 64, 8, 2, "pointers")
# P and V in INT8, not timed. With this many keys in a tile, integer sums become floats as rarely as 16-bit sums are
# rescaled: fewer instructions a key than with P and V in 16 bit. At width 128 the largest that fits the registers.
_INT8_WIDE = Tile(32, 64, 8, 2, "pointers")
_INT8_64 = Tile(128, 128, 8, 2, "pointers", adds_bits=True, asm=True)
_INT8 = {
    80: {64: _INT8_64, 128: _INT8_64._replace(parts=4)},
    86: {64: _INT8_64, 128: Tile(128, 128, 8, 2, "pointers", adds_bits=True, parts=2)},
    90: {64: Tile(64, 128, 4, 3, "tma"), 128: Tile(64, 64, 8, 3, "tma"), 256: Tile(64, 64, 8, 2, "tma")},
    100: {64: Tile(128, 64, 8, 3, "pointers"), 128: Tile(128, 64, 8, 3, "pointers")},
    120: {64: _INT8_64, 128: Tile(128, 64, 8, 2, "pointers", adds_bits=True)},
    0: {64: Tile(128, 64, 8, 3, "pointers"), 128: Tile(128, 64, 8, 3, "pointers")},
}
# INT8 P and V in the Hopper kernel: as many keys as fit. A scale per key leaves fewer registers. At width 64, where
# three consumers with tiles of 64 keys fit, they were slower on an H100.
_INT8_HOPPER = Tile(128, 128, 4, 4, "hopper", True)
_INT8_HOPPER_PER_TOKEN = Tile(128, 64, 4, 6, "hopper", True)
_INT8_ROWS = {90: Tile(64, 64, 8, 2, "tma"), 0: Tile(32, 64, 8, 2, "pointers")}


def _int8_tile(capability: int, width: int, by_row: bool) -> Tile:
    if by_row and width <= 128:
        return _INT8_ROWS[90 if capability == 90 else 0]
    family = 0
    if capability:
        family = max(at for at in _INT8 if at <= capability)
    return _INT8[family].get(width, _INT8_WIDE)


def choose_tile(
    capability: int, width: int, scaling: str, by_row: bool = False, pv: str = "16bit", running: bool = False,
    by_mask: bool = False,
) -> Tile:  # fmt: skip
    """Return the tile of a launch.

    Args:
        capability: compute capability such as 90; 0: AMD.
        width: head_width of the call.
        scaling: "planned" included.
        by_row: True for a mask that differs from row to row, a soft cap or sinks. A mask of keys is none of these:
            such calls take the tile of plain attention, so a padded sample keeps its bits, unless one of the two
            calls has its last query tiles cut along the keys (`choose_tail`).
        pv: format of P and V in the recipe. "fp8_e4m3" needs capability 89; "int8" and "int8_tensor" run everywhere.
        running: with 8-bit P, True if no row maxima of the previous step are known.
        by_mask: by_row, for a mask alone.
    """
    if pv == "int8" and capability == 90 and width <= 128 and not by_row:
        return _INT8_HOPPER_PER_TOKEN if scaling == "per_token" and width == 128 else _INT8_HOPPER
    if pv in ("int8", "int8_tensor"):
        return _int8_tile(capability, width, by_row)
    if by_mask and capability == 90 and width <= 128 and pv == "16bit":
        return _HOPPER_MASK[width]
    if by_row and capability == 90 and width <= 128:
        return (_HOPPER_ROWS if pv == "16bit" else _FP8_HOPPER_ROWS)[width]
    if by_row and width == 128:
        return _OTHER_ROWS if pv == "16bit" else _FP8_OTHER_ROWS
    if pv == "fp8_e4m3":
        if capability == 90 and width <= 128 and running:
            return _FP8_HOPPER_RUNNING
        return _FP8[90 if capability == 90 else 100 if 100 <= capability < 120 else 89][width]
    if capability == 90:
        return _HOPPER_256_PER_TOKEN if width == 256 and scaling == "per_token" else _HOPPER[width]
    if capability in (86, 89):
        return _SMALL_SHARED_MEMORY[width]
    if capability in (120, 121):
        return _CONSUMER_BLACKWELL[width]
    if 100 <= capability < 120:
        return _BLACKWELL[width]
    return _AMPERE[width] if capability else _AMD[width]


# Costs of cutting a query tile, in keys that a program walks in the same time: a program's begin and end (clocks read
# in the kernel on an H200, width 128), and adding one piece to the sum of all.
_BEGIN_AND_END = 1400
_SUM_OF_PIECE = 64
_SHORTEST_PIECE = 512
MAX_PIECES = 8


class Tail(NamedTuple):
    """How the last query tiles of a launch are cut along the keys, where they would leave most SMs idle.

    Attributes:
        whole: how many query tiles, the first ones, have one program each.
        pieces: programs of each other query tile.
    """

    whole: int
    pieces: int


def choose_tail(tiles: int, seq_kv: int, processors: int) -> Tail | None:
    """Choose how to cut the last query tiles of a launch along the keys; None if it is not worth it.

    tiles: query tiles, equally long; processors: SMs, each of which runs one program at a time.
    """
    rest = tiles % processors

    def keys(pieces: int) -> float:
        """Return the time of the last query tiles, cut into so many pieces, in keys."""
        rounds = -(-rest * pieces // processors)
        return rounds * (seq_kv / pieces + _BEGIN_AND_END) + (_SUM_OF_PIECE * pieces if pieces > 1 else 0)

    most = min(MAX_PIECES, seq_kv // _SHORTEST_PIECE)
    best = min(range(1, most + 1), key=keys, default=1)
    return Tail(tiles - rest, best) if rest and keys(best) < 0.9 * keys(1) else None


def query_slice(seq_kv: int, band: bool, masked: bool, lagged: bool) -> int:
    """Return how many query rows a warpgroup of the Hopper kernel quantises at a time: 16, 32 or all 64.

    In slices a program begins sooner, which shows where it has few keys to walk. With many keys the kernel is at the
    GPU's power cap: a sooner begin gains nothing, and the loop comes out slower, except with the reference of the step
    before. Chosen by timing on an H200.

    Args:
        seq_kv: keys of the call.
        band: the call is causal or has a sliding window.
        masked: there is a mask of keys. Beside it, slices make the loop spill registers (Triton 3.7.1).
        lagged: 8-bit P with the softmax reference of the previous step.
    """
    if band and not masked:
        return 16
    return 32 if (lagged or seq_kv < 8192) and not masked else 64
