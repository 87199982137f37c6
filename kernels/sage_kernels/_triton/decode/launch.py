"""Launch decode attention over the INT8 KV cache: tile, splits, kernel and combine step."""

import torch

from ...facts.masking import UNLIMITED, Masking
from ...facts.numerics import LOG2_E
from ..compat import PROGRAMMATIC
from ..launch import buffer, capability_of, launch
from ..primitives import as_loadable, broadcast_strides, head_width
from .combine import _combine_kernel
from .kernel import _decode_attention_kernel
from .tiles import DecodeTile, choose_splits, decode_tile, programs_at_once


def _words(codes: torch.Tensor) -> torch.Tensor:
    """View codes [B, H_kv, S, D], D even, as int16 words [B, H_kv, S, D / 2].

    Copies only odd layouts, which `append_kv` never makes.
    """
    strides = codes.stride()
    if strides[3] != 1 or codes.storage_offset() % 2 or any(stride % 2 for stride in strides[:3]):
        codes = codes.contiguous()
    return codes.view(torch.int16)


def cut_decode(q_shape, kv_heads: int, capacity: int, left: int, device, tile: DecodeTile | None = None):
    """Choose how a call is divided: (tile, number of row tiles, number of splits of the keys).

    Args:
        q_shape: [B, S_q, H, D].
        capacity: tokens that the cache has room for.
        left: sliding window, as in Masking.
        tile: overrides the choice.
    """
    batch, seq_q, heads, head_dim = q_shape
    rows = seq_q * (heads // kv_heads)
    tile = tile or decode_tile(head_dim, rows, batch * kv_heads * capacity, capability_of(device))
    row_tiles = -(-rows // tile.block_m)  # not triton.cdiv, which takes two microseconds on the host
    reach = capacity if left == UNLIMITED else min(capacity, left + seq_q + tile.block_n)
    programs = batch * kv_heads * row_tiles
    return tile, row_tiles, choose_splits(programs, -(-reach // tile.block_n), programs_at_once(device, tile))


def launch_decode_attention(
    q, k_codes, k_scale, v_codes, v_scale, k_mean, lengths, *, ring: bool, masking: Masking, scale: float,
    return_lse: bool, splits: int | None = None, tile: DecodeTile | None = None, k_balance=None,
):  # fmt: skip
    """Launch the kernel, and the combine step if the keys are split, on q's device and current stream.

    Arguments are those of `ref_decode_attention`, checked and not empty.

    Args:
        splits, tile: override the choice (tests, benchmarks).
    Returns: out [B, S_q, H, D] contiguous in q.dtype, lse [B, S_q, H] fp32 or None.
    """
    batch, seq_q, heads, head_dim = q.shape
    kv_heads, capacity = k_codes.shape[1], k_codes.shape[2]
    if head_dim % 2:  # no model has that; a channel of zeros fills the last word
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
    capability = capability_of(q.device)
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
