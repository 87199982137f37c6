"""INT8-QK attention forward: Q quantised in the kernel, one key loop, P·V in 16 bit with fp32 accumulation.

The loop is rotated: P(j - 1)·V(j - 1) is issued right after Q·K(j), so the tensor cores work while the softmax of
    tile j
runs. Only the last tile is masked; all others pay nothing for a ragged sequence length.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..numerics import padded_head_dim, pv_dtype
from ..state import (
    STAT_FIELDS,
    STAT_Q_AMAX,
    HeadState,
)
from .prepare_keys import launch_prepare_keys
from .primitives import (
    dynamic_scale,
    load_tokens,
    nan_unless_finite,
    online_softmax_step,
    round_to_int8,
)
from .tiles import Tile, choose_tile, head_width


_STATS = tl.constexpr(STAT_FIELDS)
_STAT_Q_AMAX = tl.constexpr(STAT_Q_AMAX)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _record_queries(q, stats_ptr, row_ptr, h_kv, state_width, channels, HEAD_DIM: tl.constexpr):
    """Per-channel amax of this tile's queries, into the state."""
    row = tl.load(row_ptr) + h_kv
    stat = stats_ptr + row * (_STATS * state_width) + _STAT_Q_AMAX * state_width + channels
    tl.atomic_max(stat, tl.max(tl.abs(q), 0), mask=channels < HEAD_DIM)


@triton.jit
def _load_keys(keys, row, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, USE_TMA: tl.constexpr):
    """Codes of one key tile, transposed for the score matmul: [WIDTH, BLOCK_N]. The buffer is padded: no mask."""
    if USE_TMA:
        codes = keys.load([row, 0]).T
    else:
        tile = keys + row.to(tl.int64) * WIDTH
        codes = tl.load(tile + tl.arange(0, BLOCK_N)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])
    return codes


@triton.jit
def _load_values(values, b, token, h_kv, seq_kv, stride_vb, stride_vs, stride_vh,
                 BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, USE_TMA: tl.constexpr,
                 MASKED: tl.constexpr):  # fmt: skip
    """One value tile [BLOCK_N, WIDTH]; only a masked tile may reach beyond the sequence."""
    if USE_TMA:  # the copy engine fills what lies outside with zeros
        tile = values.load([b, token, h_kv, 0]).reshape([BLOCK_N, WIDTH])
    else:
        offs_n = tl.arange(0, BLOCK_N)
        channels = tl.arange(0, WIDTH)
        base = values + b.to(tl.int64) * stride_vb + h_kv.to(tl.int64) * stride_vh + token.to(tl.int64) * stride_vs
        pointers = base + offs_n.to(tl.int64)[:, None] * stride_vs + channels[None, :]
        if MASKED:
            valid = (token + offs_n < seq_kv)[:, None] & (channels < HEAD_DIM)[None, :]
            tile = tl.load(pointers, mask=valid, other=0.0)
        elif HEAD_DIM == WIDTH:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(channels < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["seq_q", "seq_kv", "heads", "group", "state_width"])
def _attention_fwd_kernel(
    q_ptr, keys, k_scale_ptr, values, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr,
    stats_ptr, row_ptr, state_width,
    stride_qb, stride_qs, stride_qh, stride_vb, stride_vs, stride_vh,
    seq_q, seq_kv, heads, group, softmax_scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SCALING: tl.constexpr, RETURN_LSE: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    m_tiles = tl.cdiv(seq_q, BLOCK_M)
    n_tiles = tl.cdiv(seq_kv, BLOCK_N)
    first_row = (tl.program_id(0) % m_tiles) * BLOCK_M
    head_of_batch = tl.program_id(0) // m_tiles  # b * H + h
    b = head_of_batch // heads
    h = head_of_batch % heads
    h_kv = h // group
    kv_head_of_batch = b * (heads // group) + h_kv
    k_row = kv_head_of_batch * n_tiles * BLOCK_N
    offs_m = first_row + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, WIDTH)
    SCALE_PER_KEY: tl.constexpr = SCALING == "per_token"
    LOG2_E: tl.constexpr = 1.4426950408889634

    # quantise Q: [BLOCK_M, WIDTH]
    q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
    q = load_tokens(q_base, offs_m, stride_qs, seq_q, HEAD_DIM, WIDTH, True).to(tl.float32)
    x = q
    if SCALING == "planned":
        x = q * tl.load(q_weight_ptr + kv_head_of_batch * WIDTH + channels)[None, :]
        _record_queries(q, stats_ptr, row_ptr, h_kv, state_width, channels, HEAD_DIM)
    amax = tl.max(tl.abs(x), 1)
    if SCALING == "per_block":
        amax = tl.zeros_like(amax) + tl.max(amax, 0)
    if SCALING == "per_head":
        amax = tl.zeros_like(amax) + tl.load(q_amax_ptr + head_of_batch)
    q_scale, inverse = dynamic_scale(amax)
    q_int = round_to_int8(x * inverse[:, None])
    row_scale = (q_scale + nan_unless_finite(q, 1)) * (softmax_scale * LOG2_E)

    # scales of the key tiles: one number a tile, or a vector of BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    if SCALE_PER_KEY:
        k_scales = k_scale_ptr + kv_head_of_batch * n_tiles * BLOCK_N + offs_n
        scale_step = BLOCK_N
    else:
        k_scales = k_scale_ptr + kv_head_of_batch * n_tiles
        scale_step = 1

    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    scores = tl.dot(q_int, _load_keys(keys, k_row, BLOCK_N, WIDTH, USE_TMA), out_dtype=tl.int32)
    p, running_max, running_sum, rescale = online_softmax_step(
        scores, row_scale, tl.load(k_scales), offs_n < seq_kv, running_max, running_sum, SCALE_PER_KEY, True
    )
    # always true, but not to the compiler: moves the row scales into the layout of the scores once, not once a tile
    row_scale = tl.where(running_sum > -1.0, row_scale, running_max)
    for tile in tl.range(1, n_tiles - 1, num_stages=STAGES):
        codes = _load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA)
        scores = tl.dot(q_int, codes, out_dtype=tl.int32)
        key_scale = tl.load(k_scales + tile * scale_step)
        v = _load_values(
            values, b, (tile - 1) * BLOCK_N, h_kv, seq_kv, stride_vb, stride_vs, stride_vh,
            BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, False,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc)
        p, running_max, running_sum, rescale = online_softmax_step(
            scores, row_scale, key_scale, None, running_max, running_sum, SCALE_PER_KEY, False
        )
        acc = acc * rescale[:, None]
    if n_tiles > 1:
        last = n_tiles - 1
        scores = tl.dot(q_int, _load_keys(keys, k_row + last * BLOCK_N, BLOCK_N, WIDTH, USE_TMA), out_dtype=tl.int32)
        v = _load_values(
            values, b, (last - 1) * BLOCK_N, h_kv, seq_kv, stride_vb, stride_vs, stride_vh,
            BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, False,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc)
        valid = last * BLOCK_N + offs_n < seq_kv
        key_scale = tl.load(k_scales + last * scale_step)
        p, running_max, running_sum, rescale = online_softmax_step(
            scores, row_scale, key_scale, valid, running_max, running_sum, SCALE_PER_KEY, True
        )
        acc = acc * rescale[:, None]
    v = _load_values(
        values, b, (n_tiles - 1) * BLOCK_N, h_kv, seq_kv, stride_vb, stride_vs, stride_vh,
        BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, True,
    )  # fmt: skip
    acc = tl.dot(p.to(v.dtype), v, acc)

    out = acc / running_sum[:, None]
    out_row = (b.to(tl.int64) * seq_q + offs_m) * heads + h  # contiguous [B, S_q, H, D]
    is_row = offs_m < seq_q
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + channels[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (channels < HEAD_DIM)[None, :],
    )
    if RETURN_LSE:
        # smoothing lowered every score of a row by q·c: put it back
        center = tl.load(center_ptr + kv_head_of_batch * WIDTH + channels)
        shift = tl.sum(q * center[None, :], 1) * softmax_scale
        tl.store(lse_ptr + out_row, (running_max + tl.log2(running_sum)) * _LN_2 + shift, mask=is_row)


def _copyable_by_engine(v: torch.Tensor) -> torch.Tensor:
    """V [B, S, H, D] itself where the bulk copy engine can read it (rows aligned to 16 bytes), else a copy."""
    strides = v.stride()[:3]
    # 0 (expanded) and the absurd stride of a dimension of size 1 can't be described
    if v.data_ptr() % 16 == 0 and all(0 < s < 2**36 and s * v.element_size() % 16 == 0 for s in strides):
        return v
    return v.clone(memory_format=torch.contiguous_format)


def _device_tile(device: torch.device, width: int, scaling: str) -> Tile:
    if device.type != "cuda":  # Triton's interpreter, which knows no Gluon
        return Tile(64, 64, 4, 2, "tma")
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 8:
        raise NotImplementedError(
            f"GPU: got compute capability {major}.{minor}, expected 8.0 or newer; use scaled_dot_product_attention"
        )
    return choose_tile(0 if torch.version.hip else major * 10 + minor, width, scaling)


def launch_attention_fwd(
    q, k, v, *, scale, scaling, smooth_k, state: HeadState | None, return_lse, tile: Tile | None = None
):
    """Launch the prologue and the attention kernel on q's device and current stream. Arguments are checked already.

    Args:
        tile: overrides the tile table (benchmarks, tests).
    Returns: out [B, S_q, H, D] contiguous in q.dtype, lse [B, S_q, H] fp32 or None.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    if head_dim != padded_head_dim(head_dim):
        # rare head dims: channels of zeros change nothing but the layout
        extra = (0, padded_head_dim(head_dim) - head_dim)
        q, k, v = (torch.nn.functional.pad(x, extra) for x in (q, k, v))
        out, lse = launch_attention_fwd(
            q, k, v, scale=scale, scaling=scaling, smooth_k=smooth_k, state=state, return_lse=return_lse, tile=tile
        )
        return out[..., :head_dim].contiguous(), lse
    width = head_width(head_dim)
    if state is not None:
        scaling = "planned"
    tile = tile or _device_tile(q.device, width, scaling)
    q, k, v = (x if x.stride(3) == 1 or head_dim == 1 else x.contiguous() for x in (q, k, v.to(pv_dtype(q.dtype))))
    out = torch.empty(batch, seq_q, heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, seq_q, heads, dtype=torch.float32, device=q.device) if return_lse else None
    with torch.cuda.device_of(q):
        keys = launch_prepare_keys(
            q,
            k,
            scaling=scaling,
            smooth_k=smooth_k,
            state=state,
            return_center=return_lse,
            block_n=tile.block_n,
            width=width,
        )
        codes = keys.codes.view(-1, width)
        if tile.kernel != "pointers":
            v = _copyable_by_engine(v)
        none = keys.scale  # never read where a pointer does not apply
        tensors = [none if x is None else x for x in (out, lse, keys.center, keys.q_weight, keys.q_amax)]
        tensors += [none, none] if state is None else [state.stats, state.row]
        numbers = [0 if state is None else state.plan.shape[-1], q.stride(0), q.stride(1), q.stride(2)]
        sizes = [seq_q, seq_kv, heads, heads // kv_heads, float(scale)]
        grid = (triton.cdiv(seq_q, tile.block_m) * batch * heads,)
        constants = {
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "BLOCK_N": tile.block_n,
            "SCALING": scaling,
            "RETURN_LSE": return_lse,
        }
        value_block = [1, tile.block_n, 1, width]
        if tile.kernel == "hopper":
            from . import attention_fwd_hopper as hopper

            hopper.attention_fwd_hopper_kernel[grid](
                q, hopper.describe(codes, [tile.block_n, width]), keys.scale, hopper.describe(v, value_block),
                *tensors, *numbers, *sizes, **constants, NUM_BUFFERS=tile.num_stages, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
            return out, lse
        use_tma = tile.kernel == "tma"
        if use_tma:
            codes = TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [tile.block_n, width])
        values = TensorDescriptor(v, list(v.shape), list(v.stride()), value_block) if use_tma else v
        _attention_fwd_kernel[grid](
            q, codes, keys.scale, values, *tensors, *numbers, v.stride(0), v.stride(1), v.stride(2), *sizes,
            **constants, BLOCK_M=tile.block_m, STAGES=tile.num_stages, USE_TMA=use_tma, num_warps=tile.num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, lse
