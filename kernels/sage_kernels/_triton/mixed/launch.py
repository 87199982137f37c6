"""Launch mixed attention: quantise K, choose blocks, attend; on q's device and current stream."""

import torch

from ...facts.block_budget import has_fp4, millionths, promoted_a_row, rows_of_block
from ...facts.numerics import padded_head_dim, pv_dtype
from ...facts.recipe import BLOCK, FP4_GROUPS, Mixed
from ..launch import buffer, launch, processors_of
from ..primitives import head_width
from .kernel import _mixed_attention_kernel
from .prepare import _prepare_mixed_kernel
from .select import _select_blocks_kernel


# Key blocks scored at a time by head width, and compared at a time to find the largest scores. Not timed.
CHUNK = {64: 64, 128: 32, 256: 16}
SPAN = 256
# Programs per SM that choose blocks, each for one block of query rows at a time.
SELECTING = 8
# Programs per SM that quantise K. Each samples its head's tokens first, so more of them took longer on an H100.
PREPARING = 2


def stages_of(width: int, base: str) -> int:
    """Pipeline stages of the attention kernel's loop over ordinary blocks; not timed."""
    return 2 if width <= 128 else 1


def warps_of(width: int, block_q: int = BLOCK) -> int:
    """Warps of the attention kernel."""
    return 8 if width == 256 or block_q > BLOCK else 4


def preparing_warps(width: int, base: str) -> int:
    """Warps of the kernel that quantises K."""
    return 8 if width == 256 or base in FP4_GROUPS else 4


def launch_mixed_attention(
    q, k, v, *, options: Mixed, causal: bool, offset: int, scale: float, return_lse: bool, return_blocks: bool,
    packed_fp4: bool | None = None, block_q: int = 0,
):  # fmt: skip
    """Launch the three kernels of mixed attention. Arguments are checked already.

    Args:
        offset: with `causal`, row i sees keys up to i + offset.
        packed_fp4, block_q: override `has_fp4` and `rows_of_block`.

    Returns: out [B, S_q, H, D] contiguous in q.dtype; lse [B, S_q, H] fp32 or None; the chosen blocks, int8 [B, H, row
    blocks, key blocks], or None.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    if head_dim != padded_head_dim(head_dim):
        extra = (0, padded_head_dim(head_dim) - head_dim)
        padded = (torch.nn.functional.pad(x, extra) for x in (q, k, v))
        out, lse, chosen = launch_mixed_attention(
            *padded, options=options, causal=causal, offset=offset, scale=scale, return_lse=return_lse,
            return_blocks=return_blocks, packed_fp4=packed_fp4, block_q=block_q,
        )  # fmt: skip
        return out[..., :head_dim].contiguous(), lse, chosen
    v = v.to(pv_dtype(q.dtype))
    q, k, v = (x if x.stride(3) == 1 or head_dim == 1 else x.contiguous() for x in (q, k, v))
    device, width, base = q.device, head_width(head_dim), options.base
    is_fp4 = base in FP4_GROUPS
    packed_fp4 = is_fp4 and (has_fp4(device) if packed_fp4 is None else packed_fp4)
    block_q = block_q or rows_of_block(device, base)
    key_blocks, row_blocks = -(-seq_kv // BLOCK), -(-seq_q // block_q)
    rows = batch * heads * row_blocks
    shape = {"HEAD_DIM": head_dim, "WIDTH": width, "BLOCK": BLOCK}
    out = buffer(batch, seq_q, heads, head_dim, dtype=q.dtype, device=device, returned=True)
    lse = buffer(batch, seq_q, heads, device=device, returned=True) if return_lse else None
    chosen = None
    if return_blocks:
        chosen = buffer(batch, heads, row_blocks, key_blocks, dtype=torch.int8, device=device, returned=True)
    with torch.cuda.device_of(q):
        code_type = torch.uint8 if packed_fp4 else torch.float16 if is_fp4 else torch.int8
        heads_of_keys = batch * kv_heads
        codes = buffer(
            heads_of_keys, key_blocks * BLOCK, width // 2 if packed_fp4 else width, dtype=code_type, device=device
        )
        k_scale = buffer(heads_of_keys, key_blocks * BLOCK, device=device)
        group_scale = k_scale  # stands for the scales of groups that other formats do not have; never read
        if packed_fp4:
            group_type = torch.float8_e4m3fn if base == "nvfp4" else torch.uint8
            groups = width // FP4_GROUPS[base]
            group_scale = buffer(heads_of_keys, key_blocks * BLOCK, groups, dtype=group_type, device=device)
        center, q_weight = (buffer(heads_of_keys, width, device=device) for _ in range(2))
        blocks = buffer(heads_of_keys, key_blocks, 2, width, device=device)
        chunks = max(1, min(key_blocks, -(-PREPARING * processors_of(device) // heads_of_keys)))
        tiles = -(-key_blocks // chunks)
        chunks = -(-key_blocks // tiles)
        launch(
            _prepare_mixed_kernel, chunks * heads_of_keys,
            q, k, codes, group_scale, k_scale, center, q_weight, blocks, *q.stride()[:3], *k.stride()[:3],
            seq_q, seq_kv, kv_heads, heads // kv_heads, chunks, tiles,
            **shape, SAMPLED=32 if width == 256 else 64, BASE=base, SELECTOR=options.selector, PACKED_FP4=packed_fp4,
            num_warps=preparing_warps(width, base), enable_fp_fusion=False,
        )  # fmt: skip
        programs = min(rows, SELECTING * processors_of(device))
        scores = buffer(programs, -(-key_blocks // SPAN) * SPAN, dtype=torch.int32, device=device)
        lists = buffer(rows, key_blocks, dtype=torch.int16, device=device)
        numbers = buffer(rows, 3, dtype=torch.int32, device=device)
        skips = options.action == "skip"
        keep = 0 if skips else promoted_a_row(seq_q, seq_kv, causal, offset, float(options.budget), block_q)
        launch(
            _select_blocks_kernel, programs,
            q, blocks, scores, lists, numbers, lists if chosen is None else chosen, *q.stride()[:3],
            seq_q, seq_kv, heads, heads // kv_heads, offset, keep, millionths(options), rows,
            **shape, BLOCK_Q=block_q, CHUNK=CHUNK[width], SPAN=SPAN, SELECTOR=options.selector, SKIPS=skips,
            CAUSAL=causal, STORE_CHOSEN=chosen is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        launch(
            _mixed_attention_kernel, rows,
            q, k, v, codes, group_scale, k_scale, center, q_weight, lists, numbers,
            out, out if lse is None else lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            seq_q, seq_kv, heads, heads // kv_heads, offset, float(scale),
            **shape, BLOCK_Q=block_q, STAGES=stages_of(width, base), BASE=base, CAUSAL=causal, PROMOTES=not skips,
            RETURN_LSE=lse is not None, PACKED_FP4=packed_fp4, num_warps=warps_of(width, block_q),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, lse, chosen
