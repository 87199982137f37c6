"""The table of row counts up to which an 8-bit weight is multiplied by 16-bit rows.

A product of few rows waits for its weight to be read. Quantising the rows then saves nothing and costs a launch and
precision. With more rows the work decides, and the 8-bit matmul is faster. Layers ask this table; the ops do not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .crossover import ANY_GPU, gpu_class


WEIGHT_ONLY = "int8_weights"  # format of a layer whose weight is in INT8 and whose rows are always in 16 bit


class FewRows(NamedTuple):
    """One row of the table. The first row that fits a call counts.

    Attributes:
        gpu: class of GPUs, see `crossover.gpu_class`, or ANY_GPU.
        format: of the weight, "int8" or "fp8"; "" for both.
        weights: fewest elements of the weight, N · K, that the row is for.
        rows: most rows of a call that is few.
    """

    gpu: str
    format: str
    weights: int
    rows: int


# Hopper: above these, cuBLAS with 16-bit weights was as fast in a case of suite linear_few_rows. Others: not measured
FEW_ROWS = (
    FewRows("hopper", "int8", 2**26, 32),
    FewRows("hopper", "int8", 2**24, 16),
    FewRows(ANY_GPU, "", 0, 8),
)
# An eager call that no CUDA graph captures takes some 15 µs more on the host than a 16-bit one. A weight of so many
# elements is read in 17 µs less, at 4 TB/s
LEAST_EAGER = 2**26


@functools.cache
def most_rows(device: torch.device, format: str, weights: int) -> int:
    """Return the most rows that are few for a weight of N · K elements on a device; 0 on a CPU."""
    gpu = gpu_class(device)
    fits = (row for row in FEW_ROWS if row.gpu in (gpu, ANY_GPU) and row.format in (format, ""))
    return next((row.rows for row in fits if weights >= row.weights), 0) if gpu else 0


# traced code asks once, while it is traced: the answer depends on the arguments alone
_traced_most_rows = torch.compiler.assume_constant_result(lambda *arguments: most_rows(*arguments))


def are_few(device: torch.device, format: str, rows: int, columns: int, depth: int) -> bool:
    """Return True if x [rows, depth] should stay in 16 bit for a weight [columns, depth] of this format.

    No device sync, traceable by Dynamo.
    """
    limit = _traced_most_rows if torch.compiler.is_compiling() else most_rows
    return rows <= limit(device, format, columns * depth)
