"""Rotate Q and K by a Hadamard matrix in one launch; results are contiguous and in the inputs' dtype.

It is a matmul with ±1 on the tensor cores. A butterfly of log2(n) sums in registers would need a layout change for
every bit: compiled for sm_90, 1048 instructions and 68 barriers for 64 rows of 128 channels, against 534 and a few
barriers here.
"""

import torch
import triton
import triton.language as tl

from ...facts.numerics import rotation_block
from ..launch import buffer, launch
from ..sequences import Packed, packed_arguments
from .pre_balance import PreBalance


ROWS = 64  # tokens of one matmul
TILES = 4  # matmuls of a program: amortises making the matrix
# Channels of one matmul. Tensor cores need at least 16. A matrix of 256 would fill the shared memory of small GPUs, so
# 256 channels are two matmuls of 128, and the sum and difference of their results.
MIN_WIDTH, MAX_WIDTH = 16, 128


@triton.jit
def _signs(WIDTH: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Return the block-diagonal Hadamard matrix [WIDTH, WIDTH], unscaled: (-1)^popcount(i & j), else 0.

    Blocks have BLOCK channels; WIDTH <= 128.
    """
    i, j = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    bits = i & j
    bits = bits ^ (bits >> 4)
    odd = (0x6996 >> (bits & 15)) & 1  # bit n of 0x6996 is the parity of n
    return tl.where((i // BLOCK) == (j // BLOCK), 1 - 2 * odd, 0).to(dtype)


@triton.jit
def _product(x, signs, SPLIT: tl.constexpr):
    """Return x · signs, summed in fp32; every product with ±1 is exact.

    SPLIT: write fp32 x as a sum of three bf16 numbers, for tensor cores.
    """
    if SPLIT:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        y = tl.dot(high, signs, tl.dot(middle, signs, tl.dot(low, signs)))
    else:
        y = tl.dot(x, signs, input_precision="ieee")
    return y


@triton.jit
def _smoothed(x, center_ptr, factor_ptr, inside, is_key):
    """Return (x - centre) · factor, rounded to x's dtype; Q has no centre."""
    centered = x.to(tl.float32) - tl.load(center_ptr, mask=inside & is_key, other=0.0)
    return (centered * tl.load(factor_ptr, mask=inside, other=1.0)).to(x.dtype)


@triton.jit
def _sequences_of(tokens, cu_ptr, sequences):
    """Return the packed sequence of each token [ROWS]; tokens behind the last one are taken for its own."""
    number = tokens * 0
    for i in range(1, sequences):
        number += (tokens >= tl.load(cu_ptr + i)).to(tl.int32)
    return number


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "heads", "kv_heads", "q_programs", "q_chunks", "k_chunks",
                               "sequences"])  # fmt: skip
def _rotate_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, center_ptr, k_factor_ptr, q_factor_ptr, cu_q_ptr, cu_k_ptr, sequences,
    stride_qb, stride_qs, stride_qh, stride_qd, stride_kb, stride_ks, stride_kh, stride_kd,
    seq_q, seq_kv, heads, kv_heads, q_programs, q_chunks, k_chunks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, SPLIT: tl.constexpr, BALANCED: tl.constexpr, VECTOR: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Rotate one block of channels of one head of Q or K, of ROWS · TILES tokens.

    BALANCED: subtract the centre (of K) and multiply by the factor first, vectors of VECTOR numbers a head.
    """
    program = tl.program_id(0)
    is_key = program >= q_programs
    x_ptr, out_ptr, seq, h_count, chunks = q_ptr, q_out_ptr, seq_q, heads, q_chunks
    stride_b, stride_s, stride_h, stride_d = stride_qb, stride_qs, stride_qh, stride_qd
    factor_ptr, cu_ptr, group = q_factor_ptr, cu_q_ptr, heads // kv_heads
    if is_key:
        program -= q_programs
        x_ptr, out_ptr, seq, h_count, chunks = k_ptr, k_out_ptr, seq_kv, kv_heads, k_chunks
        stride_b, stride_s, stride_h, stride_d = stride_kb, stride_ks, stride_kh, stride_kd
        factor_ptr, cu_ptr, group = k_factor_ptr, cu_k_ptr, 1
    block = program % BLOCKS  # programs next to each other read the same tokens
    head = program // BLOCKS % h_count
    chunk = program // BLOCKS // h_count
    b = (chunk // chunks).to(tl.int64)
    first = (chunk % chunks) * (ROWS * TILES)
    first_channel = block * (BLOCK * HALVES)
    x_ptr += b * stride_b + head.to(tl.int64) * stride_h + first_channel.to(tl.int64) * stride_d
    row_size = h_count * (BLOCKS * BLOCK * HALVES)  # of the output
    out_ptr += b * seq * row_size + head * (BLOCKS * BLOCK * HALVES) + first_channel
    channels = tl.arange(0, WIDTH)[None, :]
    signs = _signs(WIDTH, BLOCK, tl.bfloat16 if SPLIT else x_ptr.dtype.element_ty)
    of_head = (b * kv_heads + head // group) * VECTOR + first_channel
    is_channel = channels < BLOCK
    for tile in tl.range(0, TILES, num_stages=2):
        rows = first + tile * ROWS + tl.arange(0, ROWS)
        x = x_ptr + rows.to(tl.int64)[:, None] * stride_s + channels * stride_d
        out = out_ptr + rows.to(tl.int64)[:, None] * row_size + channels
        inside = (rows < seq)[:, None]
        if BLOCK != WIDTH:
            inside = inside & is_channel
        x_0 = tl.load(x, mask=inside, other=0.0)
        if BALANCED:
            if PACKED:  # a vector for each row's own sequence
                sequence = _sequences_of(rows, cu_ptr, sequences)
                of_row = (sequence * kv_heads + head // group) * VECTOR + first_channel
                at = of_row.to(tl.int64)[:, None] + channels
                known = inside
            else:
                at = of_head + channels
                known = is_channel
            x_0 = _smoothed(x_0, center_ptr + at, factor_ptr + at, known, is_key)
        y = _product(x_0, signs, SPLIT)
        if HALVES == 2:
            x_1 = tl.load(x + BLOCK * stride_d, mask=inside, other=0.0)
            if BALANCED:
                x_1 = _smoothed(x_1, center_ptr + at + BLOCK, factor_ptr + at + BLOCK, known, is_key)
            z = _product(x_1, signs, SPLIT)
            tl.store(out + BLOCK, ((y - z) * SCALE).to(out_ptr.dtype.element_ty), mask=inside)
            y += z
        tl.store(out, (y * SCALE).to(out_ptr.dtype.element_ty), mask=inside)


def launch_rotate(
    q: torch.Tensor, k: torch.Tensor, balance: PreBalance | None = None, packed: Packed | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply Q and K [B, S, H, D] by the block-diagonal Hadamard matrix of `reference.ref_rotate`.

    balance: what comes before it; packed: the sequences that it is of.

    D must be a multiple of 8; dtypes fp16, bf16 or fp32, sums in fp32. Any strides are accepted. In Triton's
    interpreter fp32 is not split, because its bf16 matmul is broken; bf16 inputs give wrong results there.

    Returns: contiguous tensors of the same shapes and dtypes.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    whole = rotation_block(head_dim)
    halves = whole // min(whole, MAX_WIDTH)
    block, blocks = whole // halves, head_dim // whole
    q_out, k_out = (buffer(*x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    q_chunks, k_chunks = (triton.cdiv(seq, ROWS * TILES) for seq in (seq_q, seq_kv))
    q_programs, k_programs = (batch * n * blocks for n in (q_chunks * heads, k_chunks * kv_heads))
    split = q.dtype == torch.float32 and q.is_cuda
    vectors = (q_out,) * 3 if balance is None else balance  # stand-ins are never read
    with torch.cuda.device_of(q):
        launch(
            _rotate_kernel, q_programs + k_programs,
            q, k, q_out, k_out, *vectors, *packed_arguments(packed, vectors[0]), *q.stride(), *k.stride(),
            seq_q, seq_kv, heads, kv_heads, q_programs, q_chunks, k_chunks,
            BLOCKS=blocks, BLOCK=block, HALVES=halves, WIDTH=max(block, MIN_WIDTH), SCALE=whole**-0.5,
            ROWS=ROWS, TILES=TILES, SPLIT=split, BALANCED=balance is not None,
            VECTOR=1 if balance is None else balance.center.shape[2],
            PACKED=packed is not None and balance is not None,
            num_warps=8 if split or balance is not None else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out
