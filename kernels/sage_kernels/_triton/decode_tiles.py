"""How a decode call is cut: tiles, and the number of parts that its keys are split into. No tuning at call time."""

import functools
from typing import NamedTuple

import torch
import triton

from .tiles import head_width


class DecodeTile(NamedTuple):
    """How the kernel is cut: query rows and keys of a tile, warps, keys in flight, programs that fit on an SM, and
    registers a thread may have (0: what the compiler likes)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    per_sm: int
    max_registers: int = 0


# Timed on an H200 with one query, 8 heads of 128 channels, groups of 4. Fewer warps wait less for each other, and six
# programs of two have more bytes on their way than four of four: 4.1 instead of 3.7 TB/s from 2^20 tokens on. At 2^18
# tokens the four warps of the other tile begin and end sooner.
_LONG_TILE = DecodeTile(8, 64, 2, 2, 6, 168)
LONG = 2**20

MIN_TILES = 4  # key tiles that are worth a split of their own
MAX_SPLITS = 256


@functools.lru_cache(maxsize=4096)
def decode_tile(head_dim: int, rows: int, tokens: int = 0, capability: int = 0) -> DecodeTile:
    """The tile of a call with `rows` rows (queries · heads of a group) per key/value head.

    Not timed but for _LONG_TILE: chosen from registers, spills and loop counts of the compiled kernels
    (`python tests/codegen.py`).

    Args:
        tokens: of all key/value heads and samples.
        capability: compute capability such as 90; 0: AMD, or a CPU.
    """
    block_m = max(8, min(32, triton.next_power_of_2(rows)))  # 64 rows spill, and take more instructions a row
    if block_m == _LONG_TILE.block_m and head_width(head_dim) == 128 and capability == 90 and tokens >= LONG:
        return _LONG_TILE
    if head_width(head_dim) == 256:
        return DecodeTile(block_m, 32, 4, 2, 2)
    return DecodeTile(block_m, 64, 4, 2, {8: 4, 16: 3, 32: 2}[block_m])


@functools.lru_cache(maxsize=4096)
def choose_splits(programs: int, key_tiles: int, slots: int) -> int:
    """Into how many parts the keys are cut: a function of shapes alone, so that results repeat.

    The least number that is within 5 % of the best use of `slots` programs at a time, counted in key tiles.
    """
    numbers = range(1, max(1, min(key_tiles // MIN_TILES, MAX_SPLITS)) + 1)
    work = [triton.cdiv(programs * n, slots) * triton.cdiv(key_tiles, n) for n in numbers]
    return next(n for n, tiles in zip(numbers, work, strict=True) if tiles <= 1.05 * min(work))


@functools.cache
def decode_capability(device: torch.device) -> int:
    """For decode_tile."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def programs_at_once(device: torch.device, tile: DecodeTile) -> int:
    """Programs that a GPU runs together: what the number of splits is chosen to fill."""
    if device.type != "cuda":  # Triton's interpreter
        return 8
    capability = decode_capability(device)
    if 0 < capability < 80:
        raise NotImplementedError(
            f"GPU: got compute capability {capability / 10}, expected 8.0 or newer; use a 16-bit cache"
        )
    return torch.cuda.get_device_properties(device).multi_processor_count * tile.per_sm
