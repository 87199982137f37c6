"""INT8-QK attention forward: Q quantised in the kernel, one key loop, P·V in 16 bit with fp32 accumulation.

The loop is rotated: P(j - 1)·V(j - 1) is issued right after Q·K(j), so the tensor cores work while the softmax of
tile j runs. It runs twice, over the key tiles that all rows of the program see wholly and then over those that need a
mask (band, mask tensor, ragged end), so the former pay nothing for the latter; hidden tiles are not visited.

With KEEP_FIRST_MAX the former run without a running max, and a third loop does everything again if that went wrong.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..masking import NO_MASKING, UNLIMITED, Masking
from ..numerics import LOG2_E, padded_head_dim, pv_dtype
from ..state import (
    STAT_FIELDS,
    STAT_Q_AMAX,
    HeadState,
)
from .mask_tiles import MaskTiles, as_loadable, broadcast_strides, launch_mask_tiles, load_bias
from .prepare_keys import launch_prepare_keys
from .primitives import (
    dynamic_scale,
    fixed_softmax_step,
    load_tokens,
    masked_softmax_step,
    nan_unless_finite,
    online_softmax_step,
    outgrown,
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


@triton.jit
def _without_hidden(v, reach, offs_n):
    """Values of keys that no row sees as zeros: a probability of 0 would not silence a NaN."""
    return tl.where((tl.load(reach + offs_n) > float("-inf"))[:, None], v, 0.0).to(v.dtype)


@triton.jit
def _load_mask(mask_rows, reach, offs_m, offs_n, stride_mq, stride_mk, left, right, offset, seq_q, seq_kv,
               MASK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):  # fmt: skip
    """Bias (base 2) and visibility of one tile, each broadcastable to [BLOCK_M, BLOCK_N]."""
    if MASK == "rows":
        inside = (offs_m < seq_q)[:, None] & (offs_n < seq_kv)[None, :]
        rows = offs_m.to(tl.int64)[:, None] * stride_mq
        bias = load_bias(mask_rows + rows + offs_n.to(tl.int64)[None, :] * stride_mk, inside)
        visible = bias > float("-inf")
    elif MASK == "keys":
        bias = tl.load(reach + offs_n)[None, :]
        visible = bias > float("-inf")
    else:
        visible = (offs_n < seq_kv)[None, :]
        bias = tl.zeros([1, 1], tl.float32)
        if HAS_LEFT:
            visible = visible & (offs_n[None, :] >= offs_m[:, None] + (offset - left))
        if HAS_RIGHT:
            visible = visible & (offs_n[None, :] <= offs_m[:, None] + (offset + right))
    return bias, visible


@triton.jit
def _band_tiles(first_row, seq_q, seq_kv, left, right, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):  # fmt: skip
    """The key tiles of the query rows from first_row on: the first visited one, the first that every row sees wholly,
    how many are so, and how many are visited."""
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
def _tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK: tl.constexpr, HAS_LEFT: tl.constexpr):
    """The i-th visited key tile: the wholly visible ones come first."""
    if MASK != "none":
        tile = tl.load(tiles_ptr + tl.where(i < full, i, n_tiles - 1 - (i - full)))
    elif HAS_LEFT:
        edge = first + i - full
        tile = tl.where(i < full, first_full + i, tl.where(edge >= first_full, edge + full, edge))
    else:
        tile = i
    return tile


@triton.jit(do_not_specialize=[
    "seq_q", "seq_kv", "heads", "group", "state_width", "left", "right", "offset",
    "reach_step_b", "reach_step_h", "list_step_b", "list_step_h", "list_step_m",
])  # fmt: skip
def _attention_fwd_kernel(
    q_ptr, keys, k_scale_ptr, values, out_ptr, lse_ptr, center_ptr, q_weight_ptr, q_amax_ptr,
    stats_ptr, row_ptr, state_width,
    stride_qb, stride_qs, stride_qh, stride_vb, stride_vs, stride_vh,
    mask_ptr, reach_ptr, tiles_ptr, numbers_ptr, sinks_ptr, stride_mb, stride_mh, stride_mq, stride_mk,
    reach_step_b, reach_step_h, list_step_b, list_step_h, list_step_m, left, right, offset, softcap,
    seq_q, seq_kv, heads, group, softmax_scale,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SCALING: tl.constexpr, RETURN_LSE: tl.constexpr, USE_TMA: tl.constexpr, MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, KEEP_FIRST_MAX: tl.constexpr,
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
    # smoothing lowered every score of a row by q·c: whatever is not invariant to that gets it back. Base 2.
    shift = tl.zeros([BLOCK_M], tl.float32)
    if RETURN_LSE or SOFTCAP or HAS_SINKS:
        center = tl.load(center_ptr + kv_head_of_batch * WIDTH + channels)
        shift = tl.sum(q * center[None, :], 1) * (softmax_scale * LOG2_E)

    # the key tiles to visit: from the mask's list, or from the band
    first = 0
    first_full = 0
    reach = reach_ptr
    mask_rows = mask_ptr
    if MASK == "none":
        first, first_full, full, visited = _band_tiles(
            first_row, seq_q, seq_kv, left, right, offset, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT
        )
    else:
        which = b * list_step_b + h * list_step_h + (first_row // BLOCK_M) * list_step_m
        tiles_ptr += which.to(tl.int64) * n_tiles
        full = tl.load(numbers_ptr + which * 2)
        visited = tl.load(numbers_ptr + which * 2 + 1)
        reach += b.to(tl.int64) * reach_step_b + h_kv * reach_step_h
        mask_rows += b.to(tl.int64) * stride_mb + h.to(tl.int64) * stride_mh
    plain = full
    if SOFTCAP:
        plain = 0  # no tile takes the plain path

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
    tile = _tile_at(0, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
    scores = tl.dot(q_int, _load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA), out_dtype=tl.int32)
    bias, visible = _load_mask(
        mask_rows, reach, offs_m, tile * BLOCK_N + offs_n, stride_mq, stride_mk, left, right, offset, seq_q, seq_kv,
        MASK, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    p, running_max, running_sum, rescale = masked_softmax_step(
        scores, row_scale, tl.load(k_scales + tile * scale_step), shift, bias, visible, softcap, running_max,
        running_sum, SCALE_PER_KEY, SOFTCAP, HAS_BIAS,
    )  # fmt: skip
    # always true, but not to the compiler: moves the row scales into the layout of the scores once, not once a tile
    row_scale = tl.where(running_sum > -1.0, row_scale, running_max)
    for i in tl.range(1, plain, num_stages=STAGES):
        before = _tile_at(i - 1, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        tile = _tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        codes = _load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA)
        scores = tl.dot(q_int, codes, out_dtype=tl.int32)
        key_scale = tl.load(k_scales + tile * scale_step)
        v = _load_values(
            values, b, before * BLOCK_N, h_kv, seq_kv, stride_vb, stride_vs, stride_vh,
            BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, False,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc)
        if KEEP_FIRST_MAX:
            p, running_sum = fixed_softmax_step(scores, row_scale, key_scale, running_max, running_sum, SCALE_PER_KEY)
        else:
            p, running_max, running_sum, rescale = online_softmax_step(
                scores, row_scale, key_scale, running_max, running_sum, SCALE_PER_KEY
            )
            acc = acc * rescale[:, None]
    for i in tl.range(tl.maximum(plain, 1), visited, num_stages=1):
        before = _tile_at(i - 1, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        tile = _tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
        codes = _load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA)
        scores = tl.dot(q_int, codes, out_dtype=tl.int32)
        v = _load_values(
            values, b, before * BLOCK_N, h_kv, seq_kv, stride_vb, stride_vs, stride_vh,
            BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, True,
        )  # fmt: skip
        if MASK != "none":
            v = _without_hidden(v, reach, before * BLOCK_N + offs_n)
        acc = tl.dot(p.to(v.dtype), v, acc)
        bias, visible = _load_mask(
            mask_rows, reach, offs_m, tile * BLOCK_N + offs_n, stride_mq, stride_mk, left, right, offset, seq_q,
            seq_kv, MASK, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        p, running_max, running_sum, rescale = masked_softmax_step(
            scores, row_scale, tl.load(k_scales + tile * scale_step), shift, bias, visible, softcap, running_max,
            running_sum, SCALE_PER_KEY, SOFTCAP, HAS_BIAS,
        )  # fmt: skip
        acc = acc * rescale[:, None]
    tile = _tile_at(tl.maximum(visited, 1) - 1, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
    v = _load_values(
        values, b, tile * BLOCK_N, h_kv, seq_kv, stride_vb, stride_vs, stride_vh,
        BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, True,
    )  # fmt: skip
    if MASK != "none":
        v = _without_hidden(v, reach, tile * BLOCK_N + offs_n)
    acc = tl.dot(p.to(v.dtype), v, acc)
    if KEEP_FIRST_MAX:
        if outgrown(acc, running_sum):  # rare: everything again with a running max, one tile after the other
            running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            running_sum = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
            for i in tl.range(0, visited, num_stages=1):
                tile = _tile_at(i, tiles_ptr, n_tiles, first, first_full, full, MASK, HAS_LEFT)
                codes = _load_keys(keys, k_row + tile * BLOCK_N, BLOCK_N, WIDTH, USE_TMA)
                scores = tl.dot(q_int, codes, out_dtype=tl.int32)
                bias, visible = _load_mask(
                    mask_rows, reach, offs_m, tile * BLOCK_N + offs_n, stride_mq, stride_mk, left, right, offset,
                    seq_q, seq_kv, MASK, HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
                p, running_max, running_sum, rescale = masked_softmax_step(
                    scores, row_scale, tl.load(k_scales + tile * scale_step), shift, bias, visible, softcap,
                    running_max, running_sum, SCALE_PER_KEY, SOFTCAP, HAS_BIAS,
                )  # fmt: skip
                v = _load_values(
                    values, b, tile * BLOCK_N, h_kv, seq_kv, stride_vb, stride_vs, stride_vh,
                    BLOCK_N, HEAD_DIM, WIDTH, USE_TMA, True,
                )  # fmt: skip
                if MASK != "none":
                    v = _without_hidden(v, reach, tile * BLOCK_N + offs_n)
                acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])

    if SOFTCAP:
        shift = shift * 0.0  # the capped scores are the true ones
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + h) * LOG2_E - shift
        new_max = tl.maximum(running_max, sink)
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(running_max - reference)
        acc = acc * rescale[:, None]
        running_sum = tl.fma(running_sum, rescale, tl.exp2(sink - reference))
        running_max = new_max
    sees_nothing = (running_sum == 0.0) & (running_max == float("-inf"))
    out = tl.where(sees_nothing[:, None], 0.0, acc / running_sum[:, None])
    out_row = (b.to(tl.int64) * seq_q + offs_m) * heads + h  # contiguous [B, S_q, H, D]
    is_row = offs_m < seq_q
    tl.store(
        out_ptr + out_row[:, None] * HEAD_DIM + channels[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (channels < HEAD_DIM)[None, :],
    )
    if RETURN_LSE:
        tl.store(lse_ptr + out_row, (running_max + tl.log2(running_sum) + shift) * _LN_2, mask=is_row)


def _copyable_by_engine(v: torch.Tensor) -> torch.Tensor:
    """V [B, S, H, D] itself where the bulk copy engine can read it (rows aligned to 16 bytes), else a copy."""
    strides = v.stride()[:3]
    # 0 (expanded) and the absurd stride of a dimension of size 1 can't be described
    if v.data_ptr() % 16 == 0 and all(0 < s < 2**36 and s * v.element_size() % 16 == 0 for s in strides):
        return v
    return v.clone(memory_format=torch.contiguous_format)


def _by_row(masking: Masking) -> bool:
    """Whether more than a band or a mask of keys comes between the scores and the softmax."""
    return (masking.mask is not None and not masking.by_key) or masking.softcap > 0 or masking.sinks is not None


def _device_tile(device: torch.device, width: int, scaling: str, masking: Masking = NO_MASKING) -> Tile:
    if device.type != "cuda":  # Triton's interpreter, which knows no Gluon
        return Tile(64, 64 if width <= 128 else 32, 4, 2, "tma")
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and major < 8:
        raise NotImplementedError(
            f"GPU: got compute capability {major}.{minor}, expected 8.0 or newer; use scaled_dot_product_attention"
        )
    return choose_tile(0 if torch.version.hip else major * 10 + minor, width, scaling, _by_row(masking))


def launch_attention_fwd(
    q, k, v, *, scale, scaling, smooth_k, state: HeadState | None, return_lse, masking: Masking = NO_MASKING,
    tile: Tile | None = None,
):  # fmt: skip
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
            q, k, v, scale=scale, scaling=scaling, smooth_k=smooth_k, state=state, return_lse=return_lse,
            masking=masking, tile=tile,
        )  # fmt: skip
        return out[..., :head_dim].contiguous(), lse
    width = head_width(head_dim)
    if state is not None:
        scaling = "planned"
    tile = tile or _device_tile(q.device, width, scaling, masking)
    q, k, v = (x if x.stride(3) == 1 or head_dim == 1 else x.contiguous() for x in (q, k, v.to(pv_dtype(q.dtype))))
    out = torch.empty(batch, seq_q, heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, seq_q, heads, dtype=torch.float32, device=q.device) if return_lse else None
    with torch.cuda.device_of(q):
        mask = launch_mask_tiles(masking, heads, kv_heads, seq_q, seq_kv, tile.block_m, tile.block_n)
        keys = launch_prepare_keys(
            q, k, scaling=scaling, smooth_k=smooth_k, state=state, mask=mask,
            return_center=return_lse or masking.sinks is not None or masking.softcap > 0,
            block_n=tile.block_n, width=width,
        )  # fmt: skip
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
            "MASK": mask.kind,
            "HAS_BIAS": masking.mask is not None and masking.mask.dtype != torch.bool,
            "HAS_LEFT": masking.left != UNLIMITED,
            "HAS_RIGHT": masking.right != UNLIMITED,
        }
        value_block = [1, tile.block_n, 1, width]
        if tile.kernel == "hopper":
            from . import attention_fwd_hopper as hopper

            scales = keys.scale
            if scaling == "per_token":
                scales = hopper.describe(scales.view(-1, tile.block_n), [1, tile.block_n])
            hopper.attention_fwd_hopper_kernel[grid](
                q, hopper.describe(codes, [tile.block_n, width]), scales, hopper.describe(v, value_block),
                *tensors, *numbers, *(none if x is None else x for x in (mask.reach, mask.tiles, mask.numbers)),
                mask.reach_strides[0], mask.list_strides[0], masking.left, masking.right, masking.offset, *sizes,
                **constants, NUM_BUFFERS=tile.num_stages, KEEP_FIRST_MAX=tile.keep_first_max, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
            return out, lse
        use_tma = tile.kernel == "tma"
        if use_tma:
            codes = TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [tile.block_n, width])
        values = TensorDescriptor(v, list(v.shape), list(v.stride()), value_block) if use_tma else v
        _attention_fwd_kernel[grid](
            q, codes, keys.scale, values, *tensors, *numbers, v.stride(0), v.stride(1), v.stride(2),
            *_mask_arguments(masking, mask, none), *sizes,
            **constants, BLOCK_M=tile.block_m, STAGES=tile.num_stages, USE_TMA=use_tma, num_warps=tile.num_warps,
            KEEP_FIRST_MAX=tile.keep_first_max, SOFTCAP=masking.softcap > 0, HAS_SINKS=masking.sinks is not None,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, lse


def _mask_arguments(masking: Masking, mask: MaskTiles, none: torch.Tensor) -> list:
    """The kernel's arguments from mask_ptr to softcap."""
    given, strides = None, (0, 0, 0, 0)
    if mask.kind == "rows":
        given = as_loadable(masking.mask)
        strides = broadcast_strides(given)
    tensors = [given, mask.reach, mask.tiles, mask.numbers, masking.sinks]
    return [
        *(none if x is None else x for x in tensors), *strides, *mask.reach_strides, *mask.list_strides,
        masking.left, masking.right, masking.offset, masking.softcap * LOG2_E,
    ]  # fmt: skip
