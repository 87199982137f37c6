"""Attention of few queries over an INT8 KV cache, split over the keys, with a combine step.

Reading the cache is the work; the instructions beside it have to fit into the time that takes. The heads of a group
share one tile of rows, and the rows are the narrow side of the tensor cores' products (8, not 16).

Scores: Q is two INT8 codes a channel (15 bits), K is never converted, and the cache's rounding is all the error there
is. The second integer product costs 16 matrix instructions for 64 keys of 128 channels; converting K would cost 320.
Values: INT8 is exact in fp16. A value's scale is part of the exponent, so what fp16 has to hold is the product of
probability and value relative to the largest of its tile, whatever the scores and the values are by themselves.
"""

import torch
import triton
import triton.language as tl

from ...masking import UNLIMITED, Masking
from ...numerics import LOG2_E
from ..compat import PROGRAMMATIC, gdc_launch_dependents, gdc_wait
from ..launch import buffer, launch
from ..masks import as_loadable, broadcast_strides, load_bias
from ..primitives import AMAX_FLOOR, INT8_MAX, head_width, nan_unless_finite, round_to_int
from .tiles import DecodeTile, choose_splits, decode_capability, decode_tile, programs_at_once


_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(LOG2_E)
_LOW_STEPS = tl.constexpr(254.0)  # steps of a query's second code in one of its first; see reference/decode.py
_LOW_STEPS_INT = tl.constexpr(254)
_TWO_LOG2_E = tl.constexpr(2.8853900817779268)
# Two words of 16 bits, each the codes of an even and an odd channel of one value -> two fp16 numbers of the even and
# two of the odd channel. The byte c + 128 of a code c is the low byte of the fp16 number 1152 + c: 5 instructions for
# 4 numbers, where conversion instructions run at a quarter of the rate.
_TO_FP16 = tl.constexpr("""{
    .reg .b32 bytes, offset;
    mov.b32 offset, 0x64806480;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 $0, bytes, 0x64646464, 0x4240;
    prmt.b32 $1, bytes, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, offset;
    sub.f16x2 $1, $1, offset;
}""")


@triton.jit
def _quantize_queries(q):
    """Rows q [BLOCK_M, WIDTH] fp32 as scale · (high + low / 254): two INT8 tiles and scales [BLOCK_M]."""
    amax = tl.maximum(tl.max(tl.abs(q), 1), AMAX_FLOOR)
    ratio = q * tl.div_rn(amax * 0.0 + INT8_MAX, amax)[:, None]
    high = round_to_int(ratio)
    low = round_to_int((ratio - high.to(tl.float32)) * _LOW_STEPS)
    scale = tl.div_rn(amax, amax * 0.0 + INT8_MAX) + nan_unless_finite(q, 1)
    return high.to(tl.int8), low.to(tl.int8), scale


@triton.jit
def _load_tile(base, slots, stride, inside, WORDS: tl.constexpr, USED: tl.constexpr, MASKED: tl.constexpr,
               EVICTION: tl.constexpr):  # fmt: skip
    """Words [BLOCK_N, WORDS] of the tokens in `slots`; only the first USED of a token are read."""
    words = tl.arange(0, WORDS)[None, :]
    pointers = base + (slots * stride)[:, None] + words
    if MASKED:
        tile = tl.load(pointers, mask=inside[:, None] & (words < USED), other=0, eviction_policy=EVICTION)
    elif USED == WORDS:
        tile = tl.load(pointers, eviction_policy=EVICTION)
    else:
        tile = tl.load(pointers, mask=words < USED, other=0, eviction_policy=EVICTION)
    return tile


@triton.jit
def _as_fp16(words, ASM: tl.constexpr):
    """int16 words of two codes as two fp16 tiles, even and odd channels; exact."""
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            _TO_FP16, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = ((words << 8) >> 8).to(tl.float16)
        odd = (words >> 8).to(tl.float16)
    return even, odd


@triton.jit
def _slots(tile, first_slot, capacity, BLOCK_N: tl.constexpr, RING: tl.constexpr):
    """Where the tokens of a key tile lie: (a slot int64, the tokens counted from there [BLOCK_N])."""
    offs_n = tl.arange(0, BLOCK_N)
    if RING:
        slots = (tile * BLOCK_N + offs_n).to(tl.int64) + first_slot
        first, slots = tl.full([], 0, tl.int64), tl.where(slots >= capacity, slots - capacity, slots)
    else:
        first, slots = tl.full([], 0, tl.int64) + tile * BLOCK_N, offs_n
    return first, slots


@triton.jit
def _load_codes(tile, n_keys, first_slot, capacity, k_base, v_base, stride_kn, stride_vn, HEAD_DIM: tl.constexpr,
                WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr,
                EVICTION: tl.constexpr):  # fmt: skip
    """Of a key tile, the codes of K [BLOCK_N, WIDTH] int8 and the words of V [BLOCK_N, WIDTH / 2] int16."""
    inside = tile * BLOCK_N + tl.arange(0, BLOCK_N) < n_keys
    first, slots = _slots(tile, first_slot, capacity, BLOCK_N, RING)
    k_base += first * stride_kn
    v_base += first * stride_vn
    k = _load_tile(k_base, slots, stride_kn, inside, WIDTH, HEAD_DIM, MASKED, EVICTION)
    v = _load_tile(v_base, slots, stride_vn, inside, WIDTH // 2, HEAD_DIM // 2, MASKED, EVICTION)
    return k, v


@triton.jit
def _load_scales(tile, n_keys, first_slot, capacity, k_scales, v_scales, stride_ksn, stride_vsn,
                 BLOCK_N: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Of a key tile, the scales of K and of V, bf16 [BLOCK_N] each."""
    first, slots = _slots(tile, first_slot, capacity, BLOCK_N, RING)
    k_scales += first * stride_ksn
    v_scales += first * stride_vsn
    if MASKED:
        inside = tile * BLOCK_N + tl.arange(0, BLOCK_N) < n_keys
        k_scale = tl.load(k_scales + slots * stride_ksn, mask=inside, other=0.0)
        v_scale = tl.load(v_scales + slots * stride_vsn, mask=inside, other=1.0)
    else:
        k_scale = tl.load(k_scales + slots * stride_ksn)
        v_scale = tl.load(v_scales + slots * stride_vsn)
    return k_scale, v_scale


@triton.jit
def _step(tile, n_keys, k, v, k_scale, v_scale, high, low, row_scale, shift, positions, mask_rows, stride_mk, is_row,
          left, right, softcap, even, odd, top, total, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
          MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
          SOFTCAP: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """One tile of keys of the online softmax, whose reference `top` is that of probability times value scale.

    Tiles are [keys, rows] and [channels, rows]: the tensor cores' narrow side is then 8, not 16. `total` is such a
    tile, too: its sum over the keys, which all warps share, is taken once, after the last tile.
    """
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = keys < n_keys
    k_scale = k_scale.to(tl.float32)
    v_scale = v_scale.to(tl.float32)

    scores = tl.dot(k, high.T, out_dtype=tl.int32) * _LOW_STEPS_INT + tl.dot(k, low.T, out_dtype=tl.int32)
    x = scores.to(tl.float32) * k_scale[:, None]
    weight = tl.log2(v_scale)[:, None]
    if SOFTCAP:
        x = tl.fma(x, row_scale[None, :], shift[None, :]) * tl.div_rn(softcap * 0.0 + 1.0, softcap)
        x = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(x * _TWO_LOG2_E)))  # cap · tanh
        x = x + weight
    else:
        x = tl.fma(x, row_scale[None, :], weight)
    if MASKED:
        visible = inside[:, None]
        if HAS_LEFT:
            visible = visible & (keys[:, None] >= (positions - left)[None, :])
        if HAS_RIGHT:
            visible = visible & (keys[:, None] <= (positions + right)[None, :])
        if MASK == "keys":
            bias = load_bias(mask_rows + keys.to(tl.int64) * stride_mk, inside)[:, None]
        if MASK == "rows":
            pointers = mask_rows[None, :] + keys.to(tl.int64)[:, None] * stride_mk
            bias = load_bias(pointers, is_row[None, :] & inside[:, None])
        if MASK != "none":
            visible = visible & (bias > float("-inf"))
            if HAS_BIAS:
                x = x + bias
        x = tl.where(visible, x, float("-inf"))

    tile_top = tl.max(x, 0)
    reference = tile_top
    if MASKED:  # a row that sees nothing of the tile has a max of -inf: no difference may be taken from that
        reference = tl.where(tile_top == float("-inf"), 0.0, tile_top)
    e = tl.exp2(x - reference[None, :])
    share = e * (1.0 / v_scale)[:, None]
    if MASKED:
        share = tl.where(visible, share, 0.0)  # the scale of a hidden value may be NaN
    new_top = tl.maximum(top, tile_top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - safe)
    tile_rescale = tl.exp2(tile_top - safe)
    total = tl.fma(share, tile_rescale[None, :], total * rescale[None, :])
    p = e.to(tl.float16)
    v_even, v_odd = _as_fp16(v.T, ASM)
    even = tl.fma(tl.dot(v_even, p), tile_rescale[None, :], even * rescale[None, :])
    odd = tl.fma(tl.dot(v_odd, p), tile_rescale[None, :], odd * rescale[None, :])
    return even, odd, new_top, total


# Lengths change with every token: none of them may make a new kernel.
_VARYING = ["seq_q", "capacity", "left", "right", "row_tiles", "stride_ksb", "stride_ksh", "stride_vsb", "stride_vsh",
            "stride_mb", "stride_mh", "stride_mq", "splits", "all_rows"]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["k_scale_ptr", "v_scale_ptr", "mask_ptr"])
def _decode_attention_kernel(
    q_ptr, k_codes_ptr, k_scale_ptr, v_words_ptr, v_scale_ptr, mean_ptr, balance_ptr, lengths_ptr, mask_ptr, sinks_ptr,
    out_ptr, lse_ptr, stride_qb, stride_qs, stride_qh,
    stride_kcb, stride_kch, stride_kcn, stride_ksb, stride_ksh, stride_ksn,
    stride_vcb, stride_vch, stride_vcn, stride_vsb, stride_vsh, stride_vsn,
    stride_mb, stride_mh, stride_mq, stride_mk, stride_length,
    seq_q, capacity, kv_heads, row_tiles, splits, all_rows, left, right, softcap, softmax_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_BALANCE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    HAS_SINKS: tl.constexpr, RING: tl.constexpr, PARTIAL: tl.constexpr, RETURN_LSE: tl.constexpr, ASM: tl.constexpr,
    EVICTION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: up to BLOCK_M rows (query, head) of one key/value head, and one split of its keys.

    PARTIAL: out [splits, B, S_q, H, D] and lse [splits, B, S_q, H], both fp32, base 2, for the combine step. OVERLAP:
    that is launched when all programs have seen their keys, and then waits for what they write.
    """
    which = tl.program_id(0)
    row_tile = which * 0
    if row_tiles > 1:  # programs that read the same keys follow one another
        row_tile = which % row_tiles
        which = which // row_tiles
    split = which % splits
    head = which // splits
    # counted in 32 bits, which saves registers over the loop; what they make with strides needs 64
    sample, kv_head = head // kv_heads, head % kv_heads
    b, h_kv = sample.to(tl.int64), kv_head.to(tl.int64)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = rows < seq_q * GROUP
    s = rows // GROUP
    h = kv_head * GROUP + rows % GROUP
    channels = tl.arange(0, WIDTH)

    # the tokens there are, and where the rows stand among them
    seen = tl.full([], 0, tl.int64) + capacity
    if HAS_LENGTHS:
        seen = tl.maximum(tl.load(lengths_ptr + b * stride_length).to(tl.int64), 0)
    n_keys = tl.minimum(seen, capacity).to(tl.int32)
    first_slot = tl.where(seen > capacity, seen % capacity, 0)
    offset = n_keys - seq_q
    positions = offset + s

    # key tiles: those that some row sees, of them those that all rows see wholly, and this split's share of both
    first_s = row_tile * BLOCK_M // GROUP
    last_s = tl.minimum(row_tile * BLOCK_M + BLOCK_M - 1, seq_q * GROUP - 1) // GROUP
    begin = 0
    end = tl.cdiv(n_keys, BLOCK_N)
    full_begin = 0
    full_end = n_keys // BLOCK_N
    if HAS_LEFT:
        begin = tl.maximum(offset + first_s - left, 0) // BLOCK_N
        full_begin = tl.cdiv(tl.maximum(offset + last_s - left, 0), BLOCK_N)
    if HAS_RIGHT:
        end = tl.minimum(end, tl.cdiv(tl.maximum(offset + last_s + right + 1, 0), BLOCK_N))
        full_end = tl.minimum(full_end, tl.maximum(offset + first_s + right + 1, 0) // BLOCK_N)
    if MASK != "none":
        full_end = 0
    share = tl.cdiv(tl.maximum(end - begin, 0), splits)
    begin = begin + split * share
    end = tl.minimum(begin + share, end)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(end, begin))
    full_end = tl.maximum(tl.minimum(full_end, end), full_begin)

    k_base = k_codes_ptr + b * stride_kcb + h_kv * stride_kch
    v_base = v_words_ptr + b * stride_vcb + h_kv * stride_vch
    k_scales = k_scale_ptr + b * stride_ksb + h_kv * stride_ksh
    v_scales = v_scale_ptr + b * stride_vsb + h_kv * stride_vsh
    q_rows = b * stride_qb + s.to(tl.int64) * stride_qs + h.to(tl.int64) * stride_qh
    inside = is_row[:, None] & (channels < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    balanced = q
    if HAS_BALANCE:
        balance = tl.load(balance_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=1.0)
        balanced = q * tl.div_rn(balance * 0.0 + 1.0, balance)[None, :]
    high, low, q_scale = _quantize_queries(balanced)
    row_scale = q_scale * (softmax_scale * _LOG2_E / _LOW_STEPS)
    shift = tl.zeros([BLOCK_M], tl.float32)
    if HAS_MEAN and (SOFTCAP or HAS_SINKS or RETURN_LSE):
        mean = tl.load(mean_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=0.0)
        shift = tl.sum(q * mean[None, :], 1) * (softmax_scale * _LOG2_E)

    mask_rows = mask_ptr + b * stride_mb
    if MASK == "rows":
        mask_rows += h.to(tl.int64) * stride_mh + s.to(tl.int64) * stride_mq
    even = tl.zeros([WIDTH // 2, BLOCK_M], tl.float32)
    odd = tl.zeros([WIDTH // 2, BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if full_begin < full_end:
        k_scale, v_scale = _load_scales(
            full_begin, n_keys, first_slot, capacity, k_scales, v_scales, stride_ksn, stride_vsn, BLOCK_N, RING, False
        )
        for tile in tl.range(full_begin, full_end, num_stages=STAGES):
            # a tile ahead by hand: Triton orders ahead what products read, and none reads the scales
            next_k_scale, next_v_scale = _load_scales(
                tl.minimum(tile + 1, full_end - 1), n_keys, first_slot, capacity, k_scales, v_scales, stride_ksn,
                stride_vsn, BLOCK_N, RING, False,
            )  # fmt: skip
            k, v = _load_codes(
                tile, n_keys, first_slot, capacity, k_base, v_base, stride_kcn, stride_vcn, HEAD_DIM, WIDTH, BLOCK_N,
                RING, False, EVICTION,
            )  # fmt: skip
            even, odd, top, total = _step(
                tile, n_keys, k, v, k_scale, v_scale, high, low, row_scale, shift, positions, mask_rows, stride_mk,
                is_row, left, right, softcap, even, odd, top, total, BLOCK_N, False, MASK, HAS_BIAS, HAS_LEFT,
                HAS_RIGHT, SOFTCAP, ASM,
            )  # fmt: skip
            k_scale, v_scale = next_k_scale, next_v_scale
    # few tiles without a mask: looking ahead there would only take registers from the loop above
    edge_stages: tl.constexpr = STAGES if MASK != "none" else 1
    for i in tl.range(0, tl.maximum(end - begin, 0) - (full_end - full_begin), num_stages=edge_stages):
        tile = begin + i
        tile += tl.where(tile >= full_begin, full_end - full_begin, 0)
        k_scale, v_scale = _load_scales(
            tile, n_keys, first_slot, capacity, k_scales, v_scales, stride_ksn, stride_vsn, BLOCK_N, RING, True
        )
        k, v = _load_codes(
            tile, n_keys, first_slot, capacity, k_base, v_base, stride_kcn, stride_vcn, HEAD_DIM, WIDTH, BLOCK_N,
            RING, True, EVICTION,
        )  # fmt: skip
        even, odd, top, total = _step(
            tile, n_keys, k, v, k_scale, v_scale, high, low, row_scale, shift, positions, mask_rows, stride_mk,
            is_row, left, right, softcap, even, odd, top, total, BLOCK_N, True, MASK, HAS_BIAS, HAS_LEFT, HAS_RIGHT,
            SOFTCAP, ASM,
        )  # fmt: skip

    if OVERLAP:
        gdc_launch_dependents()
    total = tl.sum(total, 0)
    acc = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), (BLOCK_M, WIDTH))
    if SOFTCAP:
        shift = shift * 0.0  # the capped scores are the true ones
    if HAS_SINKS:  # in one split's sum
        sink = tl.load(sinks_ptr + h, mask=is_row & (split == 0), other=float("-inf")) * _LOG2_E - shift
        new_top = tl.maximum(top, sink)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - safe)
        acc = acc * rescale[:, None]
        total = tl.fma(total, rescale, tl.exp2(sink - safe))
        top = new_top
    out = tl.where(((total == 0.0) & (top == float("-inf")))[:, None], 0.0, acc / total[:, None])
    lse = top + tl.log2(total) + shift
    if not RING:
        overflow = seen > capacity  # tokens that had no room: no number is right
        out = tl.where(overflow, float("nan"), out)
        lse = tl.where(overflow, float("nan"), lse)
    batch_rows = ((sample * seq_q + s) * (kv_heads * GROUP) + h).to(tl.int64)  # contiguous [B, S_q, H]
    if PARTIAL:
        batch_rows += split.to(tl.int64) * all_rows
        tl.store(lse_ptr + batch_rows, lse, mask=is_row)
    elif RETURN_LSE:
        tl.store(lse_ptr + batch_rows, lse * _LN_2, mask=is_row)
    tl.store(
        out_ptr + batch_rows[:, None] * HEAD_DIM + channels[None, :], out.to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit(do_not_specialize=["splits", "all_rows"])
def _combine_kernel(partial_ptr, partial_lse_ptr, out_ptr, lse_ptr, splits, all_rows, HEAD_DIM: tl.constexpr,
                    WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
                    RETURN_LSE: tl.constexpr, OVERLAP: tl.constexpr):  # fmt: skip
    """One program: BLOCK_D channels of one row's splits, in their order, so the sum is the same every time."""
    if OVERLAP:
        gdc_wait()
    parts: tl.constexpr = WIDTH // BLOCK_D
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    channels = part * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in tl.range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        rows = split.to(tl.int64) * all_rows + row
        lse = tl.load(partial_lse_ptr + rows, mask=split < splits, other=float("-inf"))
        inside = (split < splits)[:, None] & (channels < HEAD_DIM)[None, :]
        values = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + channels[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(lse - safe)
        rescale = tl.exp2(top - safe)
        acc = acc * rescale + tl.sum(values * weight[:, None], 0)
        total = total * rescale + tl.sum(weight, 0)
        top = new_top
    out = tl.where((total == 0.0) & (top == float("-inf")), 0.0, acc / total)
    tl.store(out_ptr + row * HEAD_DIM + channels, out.to(out_ptr.dtype.element_ty), mask=channels < HEAD_DIM)
    if RETURN_LSE:
        tl.store(lse_ptr + row, (top + tl.log2(total)) * _LN_2, mask=part == 0)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes [B, H_kv, S, D], D even, as 16-bit words [B, H_kv, S, D / 2]; a copy only of layouts append_kv has not."""
    strides = codes.stride()
    if strides[3] != 1 or codes.storage_offset() % 2 or any(stride % 2 for stride in strides[:3]):
        codes = codes.contiguous()
    return codes.view(torch.int16)


def cut_decode(q_shape, kv_heads: int, capacity: int, left: int, device, tile: DecodeTile | None = None):
    """How a call is cut: (tile, tiles of rows, parts of the keys).

    Args: q_shape: [B, S_q, H, D]. capacity: tokens of the cache. left: of the Masking. tile: overrides the choice.
    """
    batch, seq_q, heads, head_dim = q_shape
    rows = seq_q * (heads // kv_heads)
    tile = tile or decode_tile(head_dim, rows, batch * kv_heads * capacity, decode_capability(device))
    row_tiles = -(-rows // tile.block_m)  # triton.cdiv takes two microseconds on the host
    reach = capacity if left == UNLIMITED else min(capacity, left + seq_q + tile.block_n)
    programs = batch * kv_heads * row_tiles
    return tile, row_tiles, choose_splits(programs, -(-reach // tile.block_n), programs_at_once(device, tile))


def launch_decode_attention(
    q, k_codes, k_scale, v_codes, v_scale, k_mean, lengths, *, ring: bool, masking: Masking, scale: float,
    return_lse: bool, splits: int | None = None, tile: DecodeTile | None = None, k_balance=None,
):  # fmt: skip
    """Launch the kernel, and the combine step if the keys are split, on q's device and current stream.

    Arguments as `ref_decode_attention`, checked; nothing is empty.

    Args:
        splits, tile: override the choice (tests, benchmarks).
    Returns: out [B, S_q, H, D] contiguous in q.dtype, lse [B, S_q, H] fp32 or None.
    """
    batch, seq_q, heads, head_dim = q.shape
    kv_heads, capacity = k_codes.shape[1], k_codes.shape[2]
    if head_dim % 2:  # no model's: a channel of zeros makes whole words
        q, k_codes, v_codes = (torch.nn.functional.pad(x, (0, 1)) for x in (q, k_codes, v_codes))
        k_mean = None if k_mean is None else torch.nn.functional.pad(k_mean, (0, 1))
        k_balance = None if k_balance is None else torch.nn.functional.pad(k_balance, (0, 1), value=1.0)
        out, lse = launch_decode_attention(
            q, k_codes, k_scale, v_codes, v_scale, k_mean, lengths, ring=ring, masking=masking, scale=scale,
            return_lse=return_lse, splits=splits, tile=tile, k_balance=k_balance,
        )  # fmt: skip
        return out[..., :head_dim].contiguous(), lse
    q, k_codes = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k_codes))
    v_words = _words(v_codes)
    tile, row_tiles, chosen = cut_decode(q.shape, kv_heads, capacity, masking.left, q.device, tile)
    splits = splits or chosen
    all_rows = batch * seq_q * heads
    out = buffer(batch, seq_q, heads, head_dim, dtype=q.dtype, device=q.device, returned=True)
    lse = buffer(batch, seq_q, heads, device=q.device, returned=True) if return_lse else None
    target, target_lse = out, lse
    if splits > 1:
        target = buffer(splits, all_rows, head_dim, device=q.device)
        target_lse = buffer(splits, all_rows, device=q.device)
    mask, kind = masking.mask, "none"
    if mask is not None:
        kind = "keys" if masking.by_key else "rows"
    capability = decode_capability(q.device)
    overlap = splits > 1 and capability >= 90 and PROGRAMMATIC
    none = k_scale  # never read where a pointer does not apply
    tensors = (
        *(x if x is None else x.contiguous() for x in (k_mean, k_balance)), lengths,
        None if mask is None else as_loadable(mask), masking.sinks, target, target_lse,
    )  # fmt: skip
    with torch.cuda.device_of(q):
        launch(
            _decode_attention_kernel, row_tiles * splits * batch * kv_heads,
            q, k_codes, k_scale, v_words, v_scale, *(none if x is None else x for x in tensors), *q.stride()[:3],
            *k_codes.stride()[:3], *k_scale.stride(), *v_words.stride()[:3], *v_scale.stride(),
            *((0, 0, 0, 0) if mask is None else broadcast_strides(mask)),
            0 if lengths is None or lengths.dim() == 0 else lengths.stride(0),
            seq_q, capacity, kv_heads, row_tiles, splits, all_rows, masking.left, masking.right,
            masking.softcap * LOG2_E, float(scale),
            GROUP=heads // kv_heads, HEAD_DIM=head_dim, WIDTH=head_width(head_dim), BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n, STAGES=tile.num_stages, MASK=kind,
            HAS_BIAS=mask is not None and mask.dtype != torch.bool,
            HAS_LEFT=masking.left != UNLIMITED, HAS_RIGHT=masking.right != UNLIMITED, SOFTCAP=masking.softcap > 0,
            HAS_MEAN=k_mean is not None, HAS_BALANCE=k_balance is not None, HAS_LENGTHS=lengths is not None,
            HAS_SINKS=masking.sinks is not None, RING=ring, PARTIAL=splits > 1, RETURN_LSE=return_lse,
            ASM=capability > 0, EVICTION="evict_first" if tile.read_once else "", OVERLAP=overlap,
            num_warps=tile.num_warps, enable_fp_fusion=False,
            **({"maxnreg": tile.max_registers} if tile.max_registers else {}),
        )  # fmt: skip
        if splits > 1:
            width, many = head_width(head_dim), splits > 16
            block_d = width // 4 if many else width
            launch(
                _combine_kernel, all_rows * (width // block_d),
                target, target_lse, out, target_lse if lse is None else lse, splits, all_rows, HEAD_DIM=head_dim,
                WIDTH=width, BLOCK_S=64 if many else 16, BLOCK_D=block_d, RETURN_LSE=return_lse,
                OVERLAP=overlap, num_warps=1 if many else 4, enable_fp_fusion=False,
                **({"launch_pdl": True} if overlap else {}),
            )  # fmt: skip
    return out, lse
