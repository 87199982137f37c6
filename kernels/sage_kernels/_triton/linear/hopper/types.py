"""Named tuples that the functions of the Hopper matmul pass to each other."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl

from ...ring import CodeRing


BLOCK_K = gl.constexpr(128)  # bytes of a row of codes in a slot: the widest swizzle of the copy engine
PART = gl.constexpr(32)  # columns of the output stored at a time


class Sizes(NamedTuple):
    """Sizes of the matmul: x [rows, depth] times w [columns, depth] gives out [rows, columns_out].

    Each of the `programs` takes every `programs`-th unit, of `units` in all. Units are the `whole` tiles, then `parts`
    parts of each remaining tile (`unit_of`). If tiles remain, `whole` is a multiple of `programs`.
    """

    rows: gl.tensor
    columns: gl.tensor
    columns_out: gl.tensor
    depth: gl.tensor
    programs: gl.tensor
    units: gl.tensor
    whole: gl.tensor
    parts: gl.tensor


class Vectors(NamedTuple):
    """Scales of rows and columns, the bias, and the gate with its strides.

    Row r of the output is multiplied by the gate of sample r // tokens and token r % tokens.
    """

    x_scale_ptr: gl.tensor
    w_scale_ptr: gl.tensor
    bias_ptr: gl.tensor
    gate_ptr: gl.tensor
    tokens: gl.tensor
    stride_gb: gl.tensor
    stride_gt: gl.tensor


class Operands(NamedTuple):
    """Arguments of both warpgroups.

    Attributes:
        out_desc, residual_desc: tensor descriptors.
        parts: shared memory [2 · buffers, rows of a warpgroup, PART], from which the output is copied.
        sums_ptr: memory for the sums of parts of tiles.
    """

    ring: CodeRing
    parts: gl.shared_memory_descriptor
    out_desc: gl.tensor
    residual_desc: gl.tensor
    sums_ptr: gl.tensor
    vectors: Vectors
    sizes: Sizes


class Kind(NamedTuple):
    """Compile-time constants of the kernel. Those not listed are as in ../matmul.py.

    Attributes:
        rows: of a warpgroup, half of a tile's.
        block_n, block_out: columns of a tile, and of its output (half as many if gated).
        group: rows of tiles walked together, see `tile_of`.
        buffers: of `Operands.parts`, for each warpgroup.
        split: the last tiles are multiplied in parts.
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
