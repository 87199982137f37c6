"""RMSNorm and rotary embedding of the heads of Q and K, in one pass over memory.

Parts of a joint sequence (text and image) are written to their places in one result.
"""

import torch
import triton
import triton.language as tl

from ..launch import buffer, launch


_TOKENS, _HEADS = 4, 8  # of a program: a token's angles are read once for _HEADS heads


@triton.jit
def _load_pairs(ptr, inside, PAIRS: tl.constexpr, HALF: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load both channels of each rotated pair as two fp32 tensors [TOKENS, HEADS, HALF].

    ptr: addresses of rows, [TOKENS, HEADS, 1].
    """
    if PAIRS:  # channels 2i and 2i + 1
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.load(ptr + channel, mask=inside & (channel < HEAD_DIM), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], HALF, 2]))
    else:  # channels i and i + HEAD_DIM / 2
        channel = tl.arange(0, HALF)[None, None, :]
        inside = inside & (channel < HEAD_DIM // 2)
        a = tl.load(ptr + channel, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(ptr + channel + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(ptr, a, b, inside, PAIRS: tl.constexpr, HALF: tl.constexpr, HEAD_DIM: tl.constexpr):
    a, b = a.to(ptr.dtype.element_ty), b.to(ptr.dtype.element_ty)
    if PAIRS:
        channel = tl.arange(0, 2 * HALF)[None, None, :]
        x = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * HALF])
        tl.store(ptr + channel, x, mask=inside & (channel < HEAD_DIM))
    else:
        channel = tl.arange(0, HALF)[None, None, :]
        inside = inside & (channel < HEAD_DIM // 2)
        tl.store(ptr + channel, a, mask=inside)
        tl.store(ptr + channel + HEAD_DIM // 2, b, mask=inside)


@triton.jit
def _finish_heads(
    out_ptr, a, b, scale, head, token, inside, weight_ptr, cos_ptr, sin_ptr, stride_ct, stride_cc, stride_st,
    stride_sc, tokens, table_first,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ACROSS_HEADS: tl.constexpr, ROTARY: tl.constexpr, HALF_TABLE: tl.constexpr,
):  # fmt: skip
    """Scale, weight and rotate both channels of each pair, and store them.

    out_ptr: addresses of rows, [TOKENS, HEADS, 1]. scale: [TOKENS, HEADS or 1, 1]; read with NORM only.
    """
    pair = tl.arange(0, HALF)
    second = pair + HEAD_DIM // 2
    at = pair
    if PAIRS:
        at, second = 2 * pair, 2 * pair + 1
    is_pair = pair < HEAD_DIM // 2
    if NORM:
        a, b = a * scale, b * scale
    if HAS_WEIGHT:
        if ACROSS_HEADS:
            weight_ptr += head[:, None] * HEAD_DIM
            known = tl.max(inside.to(tl.int32), 0).to(tl.int1) & is_pair[None, :]
            a = a * tl.load(weight_ptr + at[None, :], mask=known, other=0.0).to(tl.float32)[None, :, :]
            b = b * tl.load(weight_ptr + second[None, :], mask=known, other=0.0).to(tl.float32)[None, :, :]
        else:
            a = a * tl.load(weight_ptr + at, mask=is_pair, other=0.0).to(tl.float32)[None, None, :]
            b = b * tl.load(weight_ptr + second, mask=is_pair, other=0.0).to(tl.float32)[None, None, :]
    if ROTARY:
        row = (table_first + token).to(tl.int64)[:, None]
        known = (token < tokens)[:, None] & is_pair[None, :]
        if HALF_TABLE:  # the table has one angle for each pair
            at = pair
            second = pair
        cos = cos_ptr + row * stride_ct
        sin = sin_ptr + row * stride_st
        cos_a = tl.load(cos + at[None, :] * stride_cc, mask=known, other=0.0).to(tl.float32)[:, None, :]
        sin_a = tl.load(sin + at[None, :] * stride_sc, mask=known, other=0.0).to(tl.float32)[:, None, :]
        cos_b, sin_b = cos_a, sin_a
        if not HALF_TABLE:
            cos_b = tl.load(cos + second[None, :] * stride_cc, mask=known, other=0.0).to(tl.float32)[:, None, :]
            sin_b = tl.load(sin + second[None, :] * stride_sc, mask=known, other=0.0).to(tl.float32)[:, None, :]
        a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    _store_pairs(out_ptr, a, b, inside, PAIRS, HALF, HEAD_DIM)


@triton.jit(
    do_not_specialize=["tokens", "first", "total", "q_heads", "k_heads", "q_groups", "groups", "table_first", "eps"],
    do_not_specialize_on_alignment=["cos_ptr", "sin_ptr"],
)
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_ct, stride_cc, stride_st, stride_sc,
    tokens, first, total, q_heads, k_heads, q_groups, groups, table_first, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, ACROSS_HEADS: tl.constexpr, ROTARY: tl.constexpr,
    HALF_TABLE: tl.constexpr,
):  # fmt: skip
    """Write tokens [first, first + tokens) of the result.

    Grid: samples × tiles of tokens × groups of heads; groups of Q's heads come before those of K's. With ACROSS_HEADS
    Q and K are one group each, whose program reads all heads twice: for the norm, then for the result.
    """
    program = tl.program_id(0)
    group, tile = program % groups, program // groups
    tiles = tl.cdiv(tokens, TOKENS)
    sample, token = (tile // tiles).to(tl.int64), (tile % tiles) * TOKENS + tl.arange(0, TOKENS)
    is_q = group < q_groups
    heads = tl.where(is_q, q_heads, k_heads)
    here = token.to(tl.int64)[:, None, None]
    if is_q:
        x_ptr = q_ptr + sample * stride_qb + here * stride_qs
    else:
        x_ptr = k_ptr + sample * stride_kb + here * stride_ks
    stride_h = tl.where(is_q, stride_qh, stride_kh)
    out_ptr = (q_out_ptr if is_q else k_out_ptr) + (sample * total + first + here) * heads * HEAD_DIM
    weight_ptr = q_weight_ptr if is_q else k_weight_ptr
    if ACROSS_HEADS:
        square = tl.zeros([TOKENS], tl.float32)
        for start in range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)
            inside = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
            there = head.to(tl.int64)[None, :, None]
            a, b = _load_pairs(x_ptr + there * stride_h, inside, PAIRS, HALF, HEAD_DIM)
            square += tl.sum(tl.sum(a * a, 2) + tl.sum(b * b, 2), 1)
        mean = tl.div_rn(square, tl.zeros_like(square) + heads * HEAD_DIM)
        scale = tl.rsqrt(mean + eps)[:, None, None]
        for start in range(0, heads, HEADS):
            head = start + tl.arange(0, HEADS)
            inside = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
            there = head.to(tl.int64)[None, :, None]
            a, b = _load_pairs(x_ptr + there * stride_h, inside, PAIRS, HALF, HEAD_DIM)
            _finish_heads(
                out_ptr + there * HEAD_DIM, a, b, scale, head, token, inside, weight_ptr, cos_ptr, sin_ptr, stride_ct,
                stride_cc, stride_st, stride_sc, tokens, table_first,
                HEAD_DIM, HALF, PAIRS, NORM, HAS_WEIGHT, ACROSS_HEADS, ROTARY, HALF_TABLE,
            )  # fmt: skip
    else:
        head = tl.where(is_q, group, group - q_groups) * HEADS + tl.arange(0, HEADS)
        inside = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
        there = head.to(tl.int64)[None, :, None]
        a, b = _load_pairs(x_ptr + there * stride_h, inside, PAIRS, HALF, HEAD_DIM)
        scale = 1.0
        if NORM:
            mean = tl.div_rn(tl.sum(a * a, 2) + tl.sum(b * b, 2), tl.zeros_like(tl.sum(a, 2)) + HEAD_DIM)
            scale = tl.rsqrt(mean + eps)[:, :, None]
        _finish_heads(
            out_ptr + there * HEAD_DIM, a, b, scale, head, token, inside, weight_ptr, cos_ptr, sin_ptr, stride_ct,
            stride_cc, stride_st, stride_sc, tokens, table_first,
            HEAD_DIM, HALF, PAIRS, NORM, HAS_WEIGHT, ACROSS_HEADS, ROTARY, HALF_TABLE,
        )  # fmt: skip


def launch_qk_norm_rope(q, k, q_weight, k_weight, norm, eps, cos, sin, pairs, across_heads):
    """Launch `sage_kernels.qk_norm_rope`, once for each part of the sequence."""
    batch, _, q_heads, head_dim = q[0].shape
    k_heads, total = k[0].shape[2], sum(x.shape[1] for x in q)
    q_out = buffer(batch, total, q_heads, head_dim, dtype=q[0].dtype, device=q[0].device, returned=True)
    k_out = buffer(batch, total, k_heads, head_dim, dtype=q[0].dtype, device=q[0].device, returned=True)
    q_groups, k_groups = (1, 1) if across_heads else (-(-q_heads // _HEADS), -(-k_heads // _HEADS))
    half = 1 << max(3, (head_dim // 2 - 1).bit_length())
    first = 0
    with torch.cuda.device_of(q_out):
        for i, (x, y) in enumerate(zip(q, k, strict=True)):
            tokens = x.shape[1]
            if tokens:
                table = [None, None] if not cos else [t[i if len(t) > 1 else 0] for t in (cos, sin)]
                is_turned = table[0] is not None
                weights = [q_weight[i], k_weight[i]]
                strides = [0 if t is None else t.stride(dim) for t in table for dim in (0, 1)]
                launch(
                    _qk_norm_rope_kernel, batch * -(-tokens // _TOKENS) * (q_groups + k_groups),
                    x, y, q_out, k_out, *(q_out if t is None else t for t in (*weights, *table)),
                    *x.stride()[:3], *y.stride()[:3], *strides,
                    tokens, first, total, q_heads, k_heads, q_groups, q_groups + k_groups,
                    0 if len(cos) > 1 else first, eps,
                    HEAD_DIM=head_dim, HALF=half, TOKENS=_TOKENS, HEADS=_HEADS, PAIRS=pairs, NORM=norm,
                    HAS_WEIGHT=weights[0] is not None, ACROSS_HEADS=across_heads, ROTARY=is_turned,
                    HALF_TABLE=is_turned and table[0].shape[1] * 2 == head_dim, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
            first += tokens
    return q_out, k_out
