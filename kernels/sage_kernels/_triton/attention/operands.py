"""Key and value tiles of one program, and P·V."""

import triton
import triton.language as tl

from ..primitives import ROUND_MAGIC, ROUND_MAGIC_BITS, round_to_int8
from ..prologue.prepare_values import KEYS as _STEP_KEYS


@triton.jit
def load_keys(keys, row, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, USE_TMA: tl.constexpr):
    """Codes of one key tile, transposed for the score matmul: [WIDTH, BLOCK_N]. The buffer is padded: no mask."""
    if USE_TMA:
        codes = keys.load([row, 0]).T
    else:
        tile = keys + row.to(tl.int64) * WIDTH
        codes = tl.load(tile + tl.arange(0, BLOCK_N)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])
    return codes


@triton.jit
def load_values(values, b, token, first_key, h_kv, first_step, seq_kv, reach, stride_vb, stride_vs, stride_vh,
                 BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, USE_TMA: tl.constexpr,
                 MASKED: tl.constexpr, MASK: tl.constexpr, PV: tl.constexpr, PACKED: tl.constexpr,
                 HALVES: tl.constexpr):  # fmt: skip
    """One value tile [BLOCK_N, WIDTH], or two halves of its channels; only a masked tile may reach beyond the sequence
    or hold hidden keys.

    first_key: row of V of the sequence's first token; first_step: the head's first step of prepared values.
    """
    offs_n = tl.arange(0, BLOCK_N)
    channels = tl.arange(0, WIDTH)
    if PV != "16bit":  # prepared: transposed, zero wherever nothing is to be seen
        row = (first_step + token // _STEP_KEYS) * WIDTH
        if USE_TMA:
            tile = values.load([row, token % _STEP_KEYS]).T
        else:
            at = token % _STEP_KEYS
            if PV == "int8":  # what the compiler loses in the remainder, and its copies of 16 bytes with it
                at = tl.multiple_of(at, BLOCK_N)
            base = values + row.to(tl.int64) * _STEP_KEYS + at
            if HALVES:  # of the channels, see `add_product`
                half = base + tl.arange(0, WIDTH // 2)[None, :] * _STEP_KEYS + offs_n[:, None]
                tile = (tl.load(half), tl.load(half + WIDTH // 2 * _STEP_KEYS))
            else:
                tile = tl.load(base + channels[None, :] * _STEP_KEYS + offs_n[:, None])
    else:
        if USE_TMA:  # the copy engine fills what lies outside with zeros
            tile = values.load([b, first_key + token, h_kv, 0]).reshape([BLOCK_N, WIDTH])
            if MASKED and PACKED:  # here another sequence lies outside
                tile = tl.where((token + offs_n < seq_kv)[:, None], tile, 0.0).to(tile.dtype)
        else:
            row = (first_key + token).to(tl.int64)
            base = values + b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh + row * stride_vs
            pointers = base + offs_n.to(tl.int64)[:, None] * stride_vs + channels[None, :]
            if MASKED:
                valid = (token + offs_n < seq_kv)[:, None] & (channels < HEAD_DIM)[None, :]
                tile = tl.load(pointers, mask=valid, other=0.0)
            elif HEAD_DIM == WIDTH:
                tile = tl.load(pointers)
            else:
                tile = tl.load(pointers, mask=(channels < HEAD_DIM)[None, :], other=0.0)
        if MASKED and MASK != "none":  # keys that no row sees: a probability of 0 would not silence a NaN
            seen = tl.load(reach + token + offs_n) > float("-inf")
            tile = tl.where(seen[:, None], tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def in_operand_order(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """P [BLOCK_M, BLOCK_N] with its keys permuted inside each 16, as V is stored (prepare_values.py).

    A thread holds other columns of an accumulator than of an 8-bit operand. In this order they are the same ones, so
    nothing moves between threads; a sum over keys does not care.
    """
    p = tl.permute(tl.reshape(p, (BLOCK_M, BLOCK_N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(p, (BLOCK_M, BLOCK_N))


@triton.jit
def _add_codes(acc, rescale, codes, v, ADDS_BITS: tl.constexpr):
    """acc, rescaled, plus the product of INT8 codes, which is exact and below 2^22 for up to 256 keys."""
    product = tl.dot(codes, v, out_dtype=tl.int32)
    if ADDS_BITS:
        summand = (product + ROUND_MAGIC_BITS).to(tl.float32, bitcast=True) - ROUND_MAGIC
    else:
        summand = product.to(tl.float32)
    return tl.fma(acc, rescale[:, None], summand)


@triton.jit
def add_product(acc, rescale, p, v, PV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 ADDS_BITS: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    """acc + P·V; with 8-bit P acc is rescaled before. P is cast here: 8-bit tensors carried around a loop are unpacked
    and packed again.

    8-bit products of a tile are a sum of their own: the matrix unit cuts off what it adds to a long one. With all keys
    in one sum, outputs came out 5 % short at 4,096 keys and 39 % at 32,768 (kernels/README.md). Added in an
    FMA, as Triton makes one sum again of an addition. INT8 products become floats by an addition with ADDS_BITS, see
    `Tile`.
    """
    if PV == "fp8_e4m3":
        product = tl.dot(in_operand_order(p.to(tl.float8e4nv), BLOCK_M, BLOCK_N), v)
        acc = tl.fma(acc, rescale[:, None], product)
    elif PV == "int8":
        codes = in_operand_order(round_to_int8(p), BLOCK_M, BLOCK_N)
        if HALVES:  # one after the other: with integer sums of all channels at once, registers spill
            HALF: tl.constexpr = acc.shape[1] // 2
            first, second = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
            first = _add_codes(first, rescale, codes, v[0], ADDS_BITS)
            second = _add_codes(second, rescale, codes, v[1], ADDS_BITS)
            acc = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (BLOCK_M, 2 * HALF))
        else:
            acc = _add_codes(acc, rescale, codes, v, ADDS_BITS)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc
