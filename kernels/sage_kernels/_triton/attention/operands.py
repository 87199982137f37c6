"""Parts of the kernel: statistics of queries, the order of key tiles, their loads, and P·V."""

import triton
import triton.language as tl

from ...facts import recipe
from ...facts.state import STAT_FIELDS, STAT_K_MAX, STAT_K_MIN, STAT_Q_AMAX
from ..primitives import ROUND_MAGIC_BITS, record_amax, round_to_int8
from ..prologue.prepare_values import KEYS as _STEP_KEYS


_STATS = tl.constexpr(STAT_FIELDS)
_STAT_Q_AMAX = tl.constexpr(STAT_Q_AMAX)
_STAT_K_MAX = tl.constexpr(STAT_K_MAX)
_STAT_K_MIN = tl.constexpr(STAT_K_MIN)
_P_CODE_MAGIC = tl.constexpr(recipe.P_CODE_MAGIC)
# Packs the second bytes of four registers into one. The compiler would first move each of them to the lowest byte.
_SECOND_BYTES = tl.constexpr(
    "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x51; prmt.b32 high, $3, $4, 0x51; prmt.b32 $0, low, high, 0x5410; }"
)


@triton.jit
def record_queries(q, stats_ptr, row_ptr, h_kv, state_width, channels, HEAD_DIM: tl.constexpr):
    """Raise the per-channel amax of Q in the state's statistics by this tile's queries."""
    row = tl.load(row_ptr) + h_kv
    stat = stats_ptr + row * (_STATS * state_width) + _STAT_Q_AMAX * state_width
    record_amax(stat, tl.max(tl.abs(q), 0), channels, HEAD_DIM)


@triton.jit
def to_midrange(center, stats_ptr, row_ptr, h_kv, state_width, channels, HEAD_DIM: tl.constexpr):
    """Return K's centre less the midrange of each channel of K in this call, fp32 [WIDTH].

    Row maxima are kept as max scores (log2) with K centred on the midrange of this call, known once K is quantised.
    The centre would not do: it is the midrange of an earlier call. It moves from step to step with the outliers in it,
    and moves every score of a row by q times that.
    """
    is_channel = channels < HEAD_DIM
    stat = stats_ptr + (tl.load(row_ptr) + h_kv) * (_STATS * state_width) + channels
    high = tl.load(stat + _STAT_K_MAX * state_width, mask=is_channel, other=0.0)
    low = tl.load(stat + _STAT_K_MIN * state_width, mask=is_channel, other=0.0)
    return center - (high * 0.5 + low * 0.5)  # halves first: their sum can't overflow


@triton.jit
def band_tiles(first_row, seq_q, seq_kv, left, right, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Return which key tiles BLOCK_M query rows from first_row on see, as four int32 numbers.

    first: the first visited tile; first_full: the first tile that every row sees completely; full: the number of
    those; visited: the number of all visited tiles. Scalars only, because Gluon calls it too.
    """
    last_row = tl.minimum(first_row + BLOCK_M, seq_q) - 1
    any_first = 0
    all_first = 0
    any_last = seq_kv
    all_last = seq_kv
    if HAS_LEFT:
        any_first = tl.maximum(first_row + offset - left, 0)
        all_first = tl.maximum(last_row + offset - left, 0)
    if HAS_RIGHT:
        any_last = tl.minimum(last_row + offset + right + 1, seq_kv)
        all_last = tl.minimum(first_row + offset + right + 1, seq_kv)
    first = any_first // BLOCK_N
    visited = tl.maximum(tl.cdiv(tl.maximum(any_last, 0), BLOCK_N) - first, 0)
    first_full = tl.cdiv(all_first, BLOCK_N)
    full = tl.maximum(tl.maximum(all_last, 0) // BLOCK_N - first_full, 0)
    return tl.where(visited > 0, first, 0), first_full, full, visited


@triton.jit
def tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK: tl.constexpr, HAS_LEFT: tl.constexpr):
    """Return the i-th key tile to visit; those that all rows see completely come first.

    In a list (MASK) they stand at its front, and those that need a mask at its end.
    """
    if MASK != "none":
        tile = tl.load(tiles_ptr + tl.where(i < full, i, n_tiles - 1 - (i - full)))
    elif HAS_LEFT:
        edge = first + i - full
        tile = tl.where(i < full, first_full + i, tl.where(edge >= first_full, edge + full, edge))
    else:
        tile = first + i
    return tile


@triton.jit
def load_keys(keys, row, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, USE_TMA: tl.constexpr):
    """Load the codes of one key tile, transposed for the score matmul: [WIDTH, BLOCK_N].

    The buffer is padded to whole tiles, so no mask is needed.
    """
    if USE_TMA:
        codes = keys.load([row, 0]).T
    else:
        tile = keys + row.to(tl.int64) * WIDTH
        codes = tl.load(tile + tl.arange(0, BLOCK_N)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])
    return codes


@triton.jit
def score_product(q_codes, k_codes, QK: tl.constexpr):
    """Multiply codes of Q and K: [BLOCK_M, BLOCK_N], exact int32 of INT8, or fp32 sums of e4m3."""
    if QK == "int8":
        scores = tl.dot(q_codes, k_codes, out_dtype=tl.int32)
    else:
        scores = tl.dot(q_codes, k_codes)
    return scores


@triton.jit
def load_values(values, sums, b, token, first_key, h_kv, first_step, seq_kv, reach, stride_vb, stride_vs, stride_vh,
                 BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, USE_TMA: tl.constexpr,
                 MASKED: tl.constexpr, MASK: tl.constexpr, PV: tl.constexpr, PACKED: tl.constexpr,
                 PARTS: tl.constexpr):  # fmt: skip
    """Load one value tile, [BLOCK_N, WIDTH].

    Only a tile that is MASKED may reach beyond the sequence or hold hidden keys. first_key: row of V of the sequence's
    first token; first_step: the head's first step of values as the prologue lays them out. With V in INT8 it returns a
    tuple: the codes of each of PARTS parts of the channels, then the `sums` of each part (see `_add_codes`).
    """
    offs_n = tl.arange(0, BLOCK_N)
    channels = tl.arange(0, WIDTH)
    if PV != "16bit":  # laid out by the prologue: transposed, and zero where hidden
        row = (first_step + token // _STEP_KEYS) * WIDTH
        if USE_TMA:
            tile = values.load([row, token % _STEP_KEYS]).T
        else:
            at = token % _STEP_KEYS
            if PV != "fp8_e4m3":  # a remainder hides this from the compiler, which needs it for 16-byte copies
                at = tl.multiple_of(at, BLOCK_N)
            base = values + row.to(tl.int64) * _STEP_KEYS + at
            part = base + tl.arange(0, WIDTH // PARTS)[None, :] * _STEP_KEYS + offs_n[:, None]
            next_part = WIDTH // PARTS * _STEP_KEYS
            if PARTS == 4:
                tile = (tl.load(part), tl.load(part + next_part), tl.load(part + 2 * next_part),
                        tl.load(part + 3 * next_part))  # fmt: skip
            elif PARTS == 2:
                tile = (tl.load(part), tl.load(part + next_part))
            else:
                tile = tl.load(part)
        if PV != "fp8_e4m3":
            of_part = sums + token // BLOCK_N * WIDTH + tl.arange(0, WIDTH // PARTS)
            if PARTS == 4:
                tile += (tl.load(of_part), tl.load(of_part + WIDTH // 4), tl.load(of_part + WIDTH // 2),
                         tl.load(of_part + WIDTH // 4 * 3))  # fmt: skip
            elif PARTS == 2:
                tile += (tl.load(of_part), tl.load(of_part + WIDTH // 2))
            else:
                tile = (tile, tl.load(of_part))
    else:
        if USE_TMA:  # the copy engine fills what lies outside with zeros
            tile = values.load([b, first_key + token, h_kv, 0]).reshape([BLOCK_N, WIDTH])
            if MASKED and PACKED:  # behind this sequence lies another one
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
        if MASKED and (MASK == "keys" or MASK == "rows"):  # a probability of 0 times NaN is NaN
            seen = tl.load(reach + token + offs_n) > float("-inf")
            tile = tl.where(seen[:, None], tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def in_operand_order(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Permute the keys of P [BLOCK_M, BLOCK_N] inside each 16, into the order of V (prepare_values.py).

    A thread holds other columns of an accumulator than of an 8-bit operand. In this order they are the same, so no
    data moves between threads. A sum over keys does not depend on their order.
    """
    p = tl.permute(tl.reshape(p, (BLOCK_M, BLOCK_N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(p, (BLOCK_M, BLOCK_N))


@triton.jit
def _codes_of(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr):
    """Round P to INT8 codes, less 128 and in operand order; see P_CODE_MAGIC in facts/recipe.py."""
    j = tl.arange(0, BLOCK_N)
    # Steps differ among each 8 keys. A thread holds two of these keys and has two steps, which its lane decides.
    step = _P_CODE_MAGIC + 0.0625 + 0.5 * ((j ^ j // 8) % 2).to(tl.float32)
    step += 0.25 * (j // 2 % 2).to(tl.float32) + 0.125 * (j // 4 % 2).to(tl.float32)
    bits = in_operand_order((p + step[None, :]).to(tl.int32, bitcast=True), BLOCK_M, BLOCK_N)
    if ASM:
        codes = tl.inline_asm_elementwise(_SECOND_BYTES, "=r,r,r,r,r", [bits], dtype=tl.int8, is_pure=True, pack=4)
    else:
        codes = (bits >> 8).to(tl.int8)
    return codes


@triton.jit
def _add_codes(acc, rescale, codes, v, sums):
    """Return acc, rescaled, plus a product of INT8 codes.

    The product is exact, and below 2^22 for up to 128 keys.

    sums: fp32 [channels], see `sums_of` of the prologue: what the product lacks as P's codes are 128 too small, less
    ROUND_MAGIC. The bits of ROUND_MAGIC, added to the integer product, make it a float that is ROUND_MAGIC too large.
    """
    product = tl.dot(codes, v, out_dtype=tl.int32) + ROUND_MAGIC_BITS
    return tl.fma(acc, rescale[:, None], product.to(tl.float32, bitcast=True) + sums[None, :])


@triton.jit
def _halves(acc):
    """Split acc into two halves of the channels."""
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _whole(first, second):
    """Join two halves of the channels."""
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def _add_halves(acc, rescale, codes, v_0, v_1, sums_0, sums_1):
    first, second = _halves(acc)
    first = _add_codes(first, rescale, codes, v_0, sums_0)
    second = _add_codes(second, rescale, codes, v_1, sums_1)
    return _whole(first, second)


@triton.jit
def add_product(acc, rescale, p, v, PV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                PARTS: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return acc + P·V; with 8-bit P, acc is rescaled first.

    P is cast here, because 8-bit tensors that pass from one turn of a loop to the next are unpacked and packed again.

    Each tile's product with 8-bit P is a sum of its own, because the matrix unit cuts off what it adds to a long sum.
    With all keys in one sum, outputs came out 5 % short at 4,096 keys and 39 % at 32,768 (kernels/README.md). It is
    added in an FMA: Triton would merge a plain addition into the product's sum.
    """
    if PV == "fp8_e4m3":
        product = tl.dot(in_operand_order(p.to(tl.float8e4nv), BLOCK_M, BLOCK_N), v)
        acc = tl.fma(acc, rescale[:, None], product)
    elif PV == "int8" or PV == "int8_tensor":
        if PV == "int8":
            codes = _codes_of(p, BLOCK_M, BLOCK_N, ASM)
        else:
            codes = in_operand_order(round_to_int8(p), BLOCK_M, BLOCK_N)
        if PARTS == 4:  # part after part: integer sums of all channels at once spill registers
            first, second = _halves(acc)
            first = _add_halves(first, rescale, codes, v[0], v[1], v[4], v[5])
            second = _add_halves(second, rescale, codes, v[2], v[3], v[6], v[7])
            acc = _whole(first, second)
        elif PARTS == 2:
            acc = _add_halves(acc, rescale, codes, v[0], v[1], v[2], v[3])
        else:
            acc = _add_codes(acc, rescale, codes, v[0], v[1])
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc


@triton.jit
def store_nothing(out_ptr, lse_ptr, sinks_ptr, first_out, first_row, seq_q, h, heads, BLOCK_M: tl.constexpr,
                  HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, RETURN_LSE: tl.constexpr,
                  HAS_SINKS: tl.constexpr):  # fmt: skip
    """Write the result of rows without keys: zeros, and an LSE of the sink alone or -inf."""
    offs_m = first_row + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, WIDTH)
    is_row = offs_m < seq_q
    out_row = (first_out + offs_m).to(tl.int64) * heads + h
    inside = is_row[:, None] & (channels < HEAD_DIM)[None, :]
    out = tl.zeros([BLOCK_M, WIDTH], tl.float32).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM + channels[None, :], out, mask=inside)
    if RETURN_LSE:
        lse = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if HAS_SINKS:
            lse = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + h)
        tl.store(lse_ptr + out_row, lse, mask=is_row)
