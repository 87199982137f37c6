"""Key and value tiles of one program, and P·V."""

import triton
import triton.language as tl

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
                 MASKED: tl.constexpr, MASK: tl.constexpr, PV: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """One value tile [BLOCK_N, WIDTH]; only a masked tile may reach beyond the sequence or hold hidden keys.

    first_key: row of V of the sequence's first token; first_step: the head's first step of prepared values.
    """
    offs_n = tl.arange(0, BLOCK_N)
    channels = tl.arange(0, WIDTH)
    if PV == "fp8_e4m3":  # prepared: transposed, zero wherever nothing is to be seen
        row = (first_step + token // _STEP_KEYS) * WIDTH
        if USE_TMA:
            tile = values.load([row, token % _STEP_KEYS]).T
        else:
            base = values + row.to(tl.int64) * _STEP_KEYS + token % _STEP_KEYS
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
        if MASKED and (MASK == "keys" or MASK == "rows"):  # a probability of 0 would not silence a NaN
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
def add_product(acc, rescale, p, v, PV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """acc + P·V; with 8-bit P acc is rescaled before. P is cast here: 8-bit tensors carried around a loop are unpacked
    and packed again.

    8-bit products of a tile are a sum of their own: the matrix unit cuts off what it adds to a long one. With all keys
    in one sum, outputs came out 5 % short at 4,096 keys and 39 % at 32,768 (kernels/README.md). Added in an
    FMA, as Triton makes one sum again of an addition.
    """
    if PV == "fp8_e4m3":
        product = tl.dot(in_operand_order(p.to(tl.float8e4nv), BLOCK_M, BLOCK_N), v)
        acc = tl.fma(acc, rescale[:, None], product)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc
