"""Tile sizes and number of key splits of a decode call. Nothing is tuned at call time."""

import functools
from typing import NamedTuple

import torch
import triton

from ..launch import capability_of
from ..primitives import head_width


class DecodeTile(NamedTuple):
    """Sizes of one variant of the decode kernel.

    Attributes:
        block_m, block_n: query rows and keys of a tile.
        num_warps, num_stages: warps of a program, key tiles in flight.
        per_sm: programs that fit on an SM.
        max_registers: limit for a thread; 0: none.
        read_once: tell L2 that keys are read once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    max_registers: int = 0
    read_once: bool = False


# Timed on an H200 with one query, 8 key/value heads, head_dim 128, groups of 4. From 2^20 tokens on, programs of two
# warps are faster: fewer warps wait less for each other, and six such programs have more bytes in flight than four of
# four warps. At 2^18 tokens the four warps of the short tile start and finish sooner; read_once helps there, but not
# at 2^20.
_LONG_TILE = DecodeTile(8, 64, 2, 2, 6, 168)
_SHORT_TILE = DecodeTile(8, 64, 4, 2, 4, read_once=True)
LONG = 2**20

MAX_SPLITS = 256
# Costs on an H200, in the time of one key tile: of starting a program, and of the combine step
START, COMBINE = 2, 1


@functools.lru_cache(maxsize=4096)
def decode_tile(head_dim: int, rows: int, tokens: int = 0, capability: int = 0) -> DecodeTile:
    """Choose the tile of a call with `rows` rows (queries · heads of a group) per key/value head.

    Only the two tiles above were timed. The others were chosen from registers, spills and loop counts of the compiled
    kernels (`python tests/kernels/codegen/codegen.py`).

    Args:
        tokens: of all key/value heads and samples.
        capability: compute capability such as 90; 0: AMD, or a CPU.
    """
    width = head_width(head_dim)
    few_warps = capability == 90 and rows > 8
    # 64 rows spill registers and take more instructions a row; so do 32 rows of two warps at width 256
    block_m = max(8, min(16 if few_warps and width == 256 else 32, triton.next_power_of_2(rows)))
    if few_warps:
        # Two warps, so that no wgmma is used: ptxas loses its descriptors if the loop over full tiles is skipped (as
        # in attention/hopper), and with four warps the loop over the other tiles gave NaN on an H200.
        return DecodeTile(block_m, 32, 2, 2, 4)
    if width == 128 and capability == 90:
        return _LONG_TILE if tokens >= LONG else _SHORT_TILE
    if width == 256:
        return DecodeTile(block_m, 32, 4, 2, 2)
    return DecodeTile(block_m, 64, 4, 2, {8: 4, 16: 3, 32: 2}[block_m])


@functools.lru_cache(maxsize=4096)
def choose_splits(programs: int, key_tiles: int, slots: int) -> int:
    """Choose into how many parts the keys are split, from shapes alone, so that results repeat.

    Returns the smallest number with an estimated time within 5 % of the least. Times are counted in key tiles.

    programs: without a split. slots: programs that run at a time.
    """
    numbers = range(1, max(1, min(key_tiles, MAX_SPLITS)) + 1)
    waves = [triton.cdiv(programs * n, slots) for n in numbers]
    time = [w * (triton.cdiv(key_tiles, n) + START) + COMBINE * (n > 1) for n, w in zip(numbers, waves, strict=True)]
    return next(n for n, tiles in zip(numbers, time, strict=True) if tiles <= 1.05 * min(time))


@functools.cache
def programs_at_once(device: torch.device, tile: DecodeTile) -> int:
    """Return how many programs a GPU runs at a time; the number of splits is chosen to fill it."""
    if device.type != "cuda":  # Triton's interpreter
        return 8
    capability = capability_of(device)
    if 0 < capability < 80:
        raise NotImplementedError(
            f"GPU: got compute capability {capability / 10}, expected 8.0 or newer; use a 16-bit cache"
        )
    return torch.cuda.get_device_properties(device).multi_processor_count * tile.per_sm
