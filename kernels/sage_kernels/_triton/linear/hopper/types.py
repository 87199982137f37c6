"""What the functions of the Hopper matmul hand each other, by name; the ring, which has methods, is in ring.py."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl

from ...ring import CodeRing


BLOCK_K = gl.constexpr(128)  # bytes of a row of codes in a slot: what the copy engine swizzles at once
PART = gl.constexpr(32)  # columns of the output that are stored together


class Sizes(NamedTuple):
    """x [rows, depth] and w [columns, depth] give out [rows, columns_out]; each program takes every `programs`-th of
    the `units`: `whole` tiles, then `parts` parts of each of the other tiles (units.py). If there are others, `whole`
    is a multiple of `programs`."""

    rows: gl.tensor
    columns: gl.tensor
    columns_out: gl.tensor
    depth: gl.tensor
    programs: gl.tensor
    units: gl.tensor
    whole: gl.tensor
    parts: gl.tensor


class Vectors(NamedTuple):
    """Scales of rows and columns, the bias, and the gate with its strides: row r of the output is multiplied by the
    gate of sample r / tokens and token r % tokens."""

    x_scale_ptr: gl.tensor
    w_scale_ptr: gl.tensor
    bias_ptr: gl.tensor
    gate_ptr: gl.tensor
    tokens: gl.tensor
    stride_gb: gl.tensor
    stride_gt: gl.tensor


class Operands(NamedTuple):
    """What both warpgroups are started with. out_desc, residual_desc: descriptors; parts: shared memory [2 · buffers,
    rows of a warpgroup, PART] from which the output is copied; sums_ptr: where the sums of parts of tiles go."""

    ring: CodeRing
    parts: gl.shared_memory_descriptor
    out_desc: gl.tensor
    residual_desc: gl.tensor
    sums_ptr: gl.tensor
    vectors: Vectors
    sizes: Sizes


class Kind(NamedTuple):
    """What the kernel is compiled for.

    rows: of a warpgroup, half of a tile's; block_n: columns of a tile, block_out: of its output; group: rows of tiles
    walked together; buffers: of `Operands.parts`, one warpgroup's; split: the last tiles are multiplied in parts; the
    others as in ../matmul.py.
    """

    rows: gl.constexpr
    block_n: gl.constexpr
    block_out: gl.constexpr
    group: gl.constexpr
    buffers: gl.constexpr
    activation: gl.constexpr
    gated: gl.constexpr
    has_bias: gl.constexpr
    gate: gl.constexpr
    has_residual: gl.constexpr
    fp8: gl.constexpr
    split: gl.constexpr
