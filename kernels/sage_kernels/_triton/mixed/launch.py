"""How mixed attention is launched: codes of K, the choice of blocks, attention; on q's device and current stream."""

import torch

from ...facts.block_budget import HOPPER_ROWS, has_fp4, millionths, promoted_a_row, rows_of_block
from ...facts.numerics import padded_head_dim, pv_dtype
from ...facts.recipe import BLOCK, FP4_GROUPS, Mixed
from ..attention.launch import copyable_by_engine
from ..attention.tiles import choose_tail, query_slice
from ..launch import buffer, launch, processors_of
from ..primitives import head_width
from .kernel import _mixed_attention_kernel
from .prepare import _prepare_mixed_kernel
from .select import _select_blocks_kernel


# Not timed. Blocks of keys scored at a time, and looked at at a time for the largest scores.
CHUNK = {64: 64, 128: 32, 256: 16}
SPAN = 256
# As many as shared memory has room for beside Q in 8 and 16 bit.
HOPPER_BUFFERS = {64: 6, 128: 5}
# Row blocks that are chosen for at once, per SM.
SELECTING = 8
# Programs that ready K, per SM: each samples its head's tokens first, so that more of them took longer on an H100.
PREPARING = 2


def stages_of(width: int, base: str) -> int:
    """Pipeline stages of the loop over ordinary blocks; not timed."""
    return 2 if width <= 128 else 1


def warps_of(width: int, block_q: int = BLOCK) -> int:
    """Of the attention kernel."""
    return 8 if width == 256 or block_q > BLOCK else 4


def preparing_warps(width: int, base: str) -> int:
    return 8 if width == 256 or base in FP4_GROUPS else 4


def launch_mixed_attention(
    q, k, v, *, options: Mixed, causal: bool, offset: int, scale: float, return_lse: bool, return_blocks: bool,
    packed_fp4: bool | None = None, block_q: int = 0,
):  # fmt: skip
    """Arguments are checked already. offset: row i sees keys up to i + offset. packed_fp4, block_q: override
    `has_fp4` and `rows_of_block`.

    Returns: out [B, S_q, H, D] contiguous in q.dtype; lse [B, S_q, H] fp32 or None; which blocks were chosen, int8
    [B, H, row blocks, key blocks], or None.
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
    block_q = block_q or rows_of_block(device, base, head_dim)
    on_hopper = block_q == HOPPER_ROWS
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
        group_scale = k_scale  # never read where it does not apply
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
        lists = buffer(rows, key_blocks, dtype=torch.int32 if on_hopper else torch.int16, device=device)
        numbers = buffer(rows, 4, dtype=torch.int32, device=device)
        tail = choose_tail(rows, seq_kv, processors_of(device)) if on_hopper and not causal else None
        partials = arrived = None
        if tail is not None:
            slots = (rows - tail.whole) * tail.pieces * (block_q // 64)
            partials = buffer(slots, 64, width + 3, device=device)
            arrived = buffer(slots // tail.pieces, dtype=torch.int32, device=device)
        skips = options.action == "skip"
        keep = 0 if skips else promoted_a_row(seq_q, seq_kv, causal, offset, float(options.budget), block_q)
        launch(
            _select_blocks_kernel, programs,
            q, blocks, scores, lists, numbers, lists if chosen is None else chosen,
            numbers if arrived is None else arrived, *q.stride()[:3],
            seq_q, seq_kv, heads, heads // kv_heads, offset, keep, millionths(options), rows,
            0 if arrived is None else arrived.numel(),
            **shape, BLOCK_Q=block_q, CHUNK=CHUNK[width], SPAN=SPAN, SELECTOR=options.selector, SKIPS=skips,
            CAUSAL=causal, STORE_CHOSEN=chosen is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        sizes = (seq_q, seq_kv, heads, heads // kv_heads)
        if on_hopper:
            _launch_hopper(
                q, k, v, codes, k_scale, (out, lse, center, q_weight), lists, numbers, tail, partials, arrived,
                causal, offset, sizes, float(scale), width,
            )  # fmt: skip
            return out, lse, chosen
        launch(
            _mixed_attention_kernel, rows,
            q, k, v, codes, group_scale, k_scale, center, q_weight, lists, numbers,
            out, out if lse is None else lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *sizes, offset, float(scale),
            **shape, BLOCK_Q=block_q, STAGES=stages_of(width, base), BASE=base, CAUSAL=causal, PROMOTES=not skips,
            RETURN_LSE=lse is not None, PACKED_FP4=packed_fp4, num_warps=warps_of(width, block_q),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out, lse, chosen


def _launch_hopper(
    q, k, v, codes, k_scale, tensors, lists, numbers, tail, partials, arrived, causal, offset, sizes, scale, width
):
    """Attention by the Gluon kernel, whose tiles are the blocks. tensors: out, lse, center, q_weight. tail, partials,
    arrived: how the last programs share their blocks."""
    from ..attention.hopper.kernel import attention_fwd_hopper_kernel
    from ..hopper_primitives import describe

    rows, head_dim, seq_kv, half = len(lists), q.shape[3], sizes[1], [1, BLOCK, 1, width // 2]
    v, k = copyable_by_engine(v), copyable_by_engine(k.to(v.dtype))
    whole, pieces = tail or (rows, 1)
    out, lse, center, q_weight = tensors
    unused = k_scale
    counters = unused.view(torch.int32)
    launch(
        attention_fwd_hopper_kernel, whole + (rows - whole) * pieces,
        q, describe(codes.view(-1, width), [BLOCK, width]), describe(k_scale.view(-1, BLOCK), [1, BLOCK]),
        describe(v, [1, BLOCK, 1, width]), out, unused if lse is None else lse, center, q_weight,
        *[unused] * 6, 0, *q.stride()[:3], unused, lists, numbers, 0, 0, 0, 0, offset,
        unused if partials is None else partials, counters if arrived is None else arrived, whole, pieces,
        *sizes, scale, describe(k, half),
        HEAD_DIM=head_dim, WIDTH=width, BLOCK_N=BLOCK, SCALING="per_token", RETURN_LSE=lse is not None,
        MASK="blocks", HAS_BIAS=False, HAS_LEFT=False, HAS_RIGHT=causal, REFERENCE="first", KEEPS_MAX=False,
        PV="16bit", SLICE=query_slice(seq_kv, causal, False, False), SPLIT=not causal,
        NUM_BUFFERS=HOPPER_BUFFERS[width], GROUPS=HOPPER_ROWS // 64, num_warps=4, launch_pdl=True,
        enable_fp_fusion=False,
    )  # fmt: skip
