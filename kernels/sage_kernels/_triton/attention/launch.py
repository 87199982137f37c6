"""Launch attention: choose the tile, then run the prologue and the tile's kernel.

All runs on q's device and current stream. Every kernel goes through `launch`, and memory between kernels comes from
`buffer` (../launch), so a call can be recorded while it is made, and replayed later.
"""

import torch

from ...facts.masking import NO_MASKING, UNLIMITED, Masking
from ...facts.numerics import LOG2_E, padded_head_dim, pv_dtype
from ...facts.recipe import DEFAULT_RECIPE, RECIPES
from ...facts.skipping import SkipState
from ...facts.state import HeadState, keeps_row_max, reads_row_max
from .. import compat
from ..launch import buffer, launch, processors_of
from ..primitives import as_loadable, broadcast_strides, head_width
from ..prologue.mask_tiles import MaskTiles, launch_mask_tiles
from ..prologue.pre_balance import launch_pre_balance
from ..prologue.prologue import Prepared, launch_prologue
from ..prologue.rotate import launch_rotate
from ..sequences import Packed, packed_arguments
from .compensate import launch_compensate, launch_pool_tiles
from .kernel import _attention_fwd_kernel
from .skip_tiles import launch_skip_tiles
from .tiles import Tile, choose_tail, choose_tile, query_slice


def copyable_by_engine(v: torch.Tensor) -> torch.Tensor:
    """Return V if the bulk copy engine can read it, else a contiguous copy.

    v: [B, S, H, D]. The engine needs rows aligned to 16 bytes.
    """
    strides = v.stride()[:3]
    # no descriptor holds a stride of 0 (expanded), nor the huge one that a dimension of size 1 may have
    if v.data_ptr() % 16 == 0 and all(0 < s < 2**36 and s * v.element_size() % 16 == 0 for s in strides):
        return v
    return v.clone(memory_format=torch.contiguous_format)


def is_band(masking: Masking) -> bool:
    """Return True if attention is causal or has a sliding window."""
    return masking.left != UNLIMITED or masking.right != UNLIMITED


def device_tile(
    device: torch.device, width: int, scaling: str, masking: Masking = NO_MASKING, pv: str = "16bit",
    lagged: bool = False, packed: bool = False, hopper: bool = True,
) -> Tile:  # fmt: skip
    """Return the tile of a launch on `device`.

    Args:
        width, scaling, pv: as in `tiles.choose_tile`.
        masking: of the call.
        lagged: rows have maxima of the previous call, or keep theirs for the next.
        packed: packed sequences, which the Hopper kernel does not have.
        hopper: the Hopper kernel has the recipe.

    Raises: NotImplementedError if the device can't run the recipe.
    """
    if device.type != "cuda":  # Triton's interpreter, which has no Gluon
        return Tile(64, 64 if width <= 128 else 32, 4, 2, "tma" if compat.TensorDescriptor else "pointers")
    major, minor = torch.cuda.get_device_capability(device)
    capability = 0 if torch.version.hip else major * 10 + minor
    if capability and capability < 80:
        raise NotImplementedError(
            f"GPU: got compute capability {major}.{minor}, expected 8.0 or newer; use scaled_dot_product_attention"
        )
    if pv == "fp8_e4m3" and capability < 89:
        name = torch.cuda.get_device_name(device)
        raise NotImplementedError(
            f"recipe: got P and V in FP8 on {name} (compute capability {major}.{minor}), expected an NVIDIA GPU of "
            f"8.9 or newer; use recipe={DEFAULT_RECIPE!r}"
        )
    by_row, running = masking.by_row, not lagged
    tile = choose_tile(capability, width, scaling, by_row, pv, running, masking.by_mask)
    if tile.kernel == "hopper" and (packed or not hopper or not compat.has_gluon()):
        tile = choose_tile(capability, width, scaling, True, pv, running)
    if tile.kernel == "tma" and compat.TensorDescriptor is None:  # this Triton has no descriptors: a tile for pointers
        tile = choose_tile(89 if pv == "fp8_e4m3" else 80, width, scaling, by_row, pv, running)
    return tile


def tile_of_lists(device: torch.device, head_dim: int, pv: str) -> Tile:
    """Return the tile of launches with lists of key tiles.

    It is the same with and without known row maxima, because lists outlive a call.
    """
    return device_tile(device, head_width(padded_head_dim(head_dim)), "planned", NO_MASKING, pv, lagged=True)


def can_be_cut(tile: Tile, masking: Masking, mask: MaskTiles) -> bool:
    """Return True if several programs may share a query tile.

    That is so in the Hopper kernel, if all query tiles have equally many keys.
    """
    return tile.kernel == "hopper" and mask.kind == "none" and not is_band(masking)


def launch_attention_fwd(
    q, k, v, *, scale, scaling, smooth_k, state: HeadState | None, return_lse, recipe: str = DEFAULT_RECIPE,
    masking: Masking = NO_MASKING, rotation: str = "none", tile: Tile | None = None, packed: tuple | None = None,
    skip: SkipState | None = None,
):  # fmt: skip
    """Launch the prologue and the attention kernel on q's device and current stream.

    Arguments are checked already.

    Args:
        tile: overrides the tile table (benchmarks, tests).
        packed: the two tensors of a Packed, for sequences packed into q, k and v of batch 1. `masking` then has no
            mask, and its offset is not read: the last row of a sequence is at its last key.
        skip: lists of key tiles to skip, for calls with a state and without masking.

    Returns: out [B, S_q, H, D] contiguous in q.dtype, lse [B, S_q, H] fp32 or None.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    if head_dim != padded_head_dim(head_dim):
        # rare values of head_dim: channels of zeros change nothing but the layout
        extra = (0, padded_head_dim(head_dim) - head_dim)
        q, k, v = (torch.nn.functional.pad(x, extra) for x in (q, k, v))
        out, lse = launch_attention_fwd(
            q, k, v, scale=scale, scaling=scaling, smooth_k=smooth_k, state=state, return_lse=return_lse,
            recipe=recipe, masking=masking, rotation=rotation, tile=tile, packed=packed, skip=skip,
        )  # fmt: skip
        return out[..., :head_dim].contiguous(), lse

    packed = None if packed is None else Packed(*packed)
    # what to run: format of P and V, softmax reference, tile
    width = head_width(head_dim)
    if state is not None:
        scaling = "planned"
    own = RECIPES[recipe]
    pv = own.pv
    is_fp8, is_16_bit = pv == "fp8_e4m3", pv == "16bit"
    lagged, keeps_max = (own.keeps_rows and f(state, masking) for f in (reads_row_max, keeps_row_max))
    kind = {} if packed is None else {"packed": True}
    kind |= {} if own.hopper else {"hopper": False}
    # with and without known row maxima, lists need the same tile
    tile = tile or device_tile(q.device, width, scaling, masking, pv, lagged or skip is not None, **kind)
    if skip is not None and (skip.block_q, skip.block_k) != (tile.block_m, tile.block_n):
        raise ValueError(
            f"skip: got lists of tiles of {skip.block_q} x {skip.block_k}, expected {tile.block_m} x {tile.block_n}; "
            "make them with sage_kernels.new_skip_state"
        )
    if tile.kernel == "hopper" and not own.hopper:
        raise NotImplementedError(f"tile: got {tile} for {recipe}, expected one of the general kernel")
    reference = "first" if tile.keep_first_max else "running"
    if is_fp8:
        reference = "lagged" if lagged else "running"
    if pv == "int8":
        reference = "first" if tile.kernel == "hopper" else "tile"

    # inputs as the kernels read them, outputs
    if is_16_bit:
        v = v.to(pv_dtype(q.dtype))
    q, k, v = (x if x.stride(3) == 1 or head_dim == 1 else x.contiguous() for x in (q, k, v))
    out = buffer(batch, seq_q, heads, head_dim, dtype=q.dtype, device=q.device, returned=True)
    compensates = skip is not None and skip.compensates
    has_lse = return_lse or compensates
    lse = buffer(batch, seq_q, heads, device=q.device, returned=return_lse) if has_lse else None
    with torch.cuda.device_of(q):
        # which key tiles are visited, and how many programs share a query tile
        mask = launch_mask_tiles(
            masking, heads, kv_heads, seq_q, seq_kv, tile.block_m, tile.block_n, marks=tile.kernel == "hopper"
        )
        if rotation == "hadamard":
            balance = None
            if smooth_k and state is None:  # a plan is of channels that were rotated only
                centered = masking.may_be_centered and not return_lse
                balance = launch_pre_balance(
                    q, k, mask=mask, packed=packed, left=masking.left, centered=centered
                )  # fmt: skip
            q, k = launch_rotate(q, k, balance, packed)
        # triton.cdiv takes two microseconds on the host
        tiles = -(-seq_q // tile.block_m) if packed is None else packed.slots(seq_q, tile.block_m)
        tiles *= batch * heads
        cut = can_be_cut(tile, masking, mask)
        tail = choose_tail(tiles, seq_kv, processors_of(q.device)) if cut else None
        partials = arrived = None
        if tail is not None:
            slots = (tiles - tail.whole) * tail.pieces * (tile.block_m // 64)
            partials = buffer(slots, 64, width + 3, device=q.device)
            arrived = buffer(slots // tail.pieces, dtype=torch.int32, device=q.device)

        # codes and scales
        # with a state also where no maxima are kept yet: one kernel serves both, and it takes seconds to compile
        return_center = (
            has_lse or masking.sinks is not None or masking.softcap > 0 or (own.keeps_rows and state is not None)
        )
        prepared = launch_prologue(
            q, k, None if is_16_bit else v, scaling=scaling, smooth_k=smooth_k, state=state, mask=mask,
            return_center=return_center,
            block_n=tile.block_n, width=width, rotation=rotation, zeroed=arrived,
            overlap=tile.kernel == "hopper", packed=packed, left=masking.left,
            qk=own.qk, pv=pv,
        )  # fmt: skip
        if skip is not None:
            lengths = {"seq_kv": seq_kv, "width": width}
            of_scores = {"kv_heads": kv_heads, "scale": scale, **lengths}
            if compensates:
                pooled = launch_pool_tiles(v, prepared, block_n=skip.block_k, dtype=q.dtype, **lengths)
            mask, left_out = launch_skip_tiles(q, prepared, skip, **of_scores)
        if not is_16_bit:
            v = prepared.values
        elif tile.kernel != "pointers":
            v = copyable_by_engine(v)

        # the first arguments of either kernel: tensors, then numbers
        none = prepared.scale  # stands for tensors that the call does not have; never read
        row_max = (state.row_max if lagged else state.row_max_next) if keeps_max else None
        recorded = (None, None, None) if state is None else (state.stats, state.row, state.counts)
        tensors = (out, lse, prepared.center, prepared.q_weight, prepared.q_amax, *recorded, row_max,
                   prepared.value_scale)  # fmt: skip
        first = [none if x is None else x for x in tensors]
        first += (0 if state is None else state.plan.shape[-1], q.stride(0), q.stride(1), q.stride(2))
        sizes = (seq_q, seq_kv, heads, heads // kv_heads, float(scale))
        constants = {
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "BLOCK_N": tile.block_n,
            "SCALING": scaling,
            "RETURN_LSE": has_lse,
            "MASK": mask.kind,
            "HAS_BIAS": masking.mask is not None and masking.mask.dtype != torch.bool,
            "HAS_LEFT": masking.left != UNLIMITED,
            "HAS_RIGHT": masking.right != UNLIMITED,
            "REFERENCE": reference,
            "KEEPS_MAX": keeps_max,
            "PV": pv,
        }
        if tile.kernel == "hopper":
            constants["SLICE"] = query_slice(seq_kv, is_band(masking), mask.kind not in ("none", "tiles"), lagged)
            constants["SPLIT"] = cut
            parts = [none if partials is None else partials]
            parts.append(none.view(torch.int32) if arrived is None else arrived)
            parts += tail or (tiles, 1)
            _launch_hopper(tile, tiles, q, prepared, v, first, masking, mask, parts, sizes, constants)
        else:
            constants |= {"QK": own.qk, "SUMS_CODES": own.sums_codes}
            _launch_plain(tile, tiles, q, prepared, v, first, masking, mask, packed, sizes, constants)
        if compensates:
            launch_compensate(q, pooled, prepared, left_out, mask.numbers, out, lse, skip, **of_scores)
    return out, lse if return_lse else None


def _launch_hopper(tile: Tile, tiles: int, q, prepared: Prepared, v, first, masking, mask, parts, sizes, constants):
    """Launch the Gluon kernel for `tiles` query tiles.

    parts: memory for partial sums, counters of arrived pieces, and the two numbers of a Tail.
    """
    from ..hopper_primitives import describe
    from .hopper import kernel as hopper

    block_n, width, none = tile.block_n, constants["WIDTH"], prepared.scale
    scales = prepared.scale
    if constants["SCALING"] == "per_token":
        scales = describe(scales.view(-1, block_n), [1, block_n])
    value_block = [1, block_n, 1, width] if constants["PV"] == "16bit" else [width, block_n]
    whole, pieces = parts[2:]
    launch(
        hopper.attention_fwd_hopper_kernel, whole + (tiles - whole) * pieces,
        q, describe(prepared.codes.view(-1, width), [block_n, width]), scales, describe(v, value_block), *first,
        *_mask_arguments(masking, mask, none, hopper=True), *parts, *sizes,
        **constants, NUM_BUFFERS=tile.num_stages, GROUPS=tile.block_m // 64,
        num_warps=4, launch_pdl=True, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_plain(tile: Tile, tiles: int, q, prepared: Prepared, v, first, masking, mask, packed, sizes, constants):
    """Launch the Triton kernel for `tiles` query tiles; it reads by descriptors or by pointers."""
    block_n, width = tile.block_n, constants["WIDTH"]
    codes, values = prepared.codes.view(-1, width), v
    value_strides = v.stride()[:3] if constants["PV"] == "16bit" else (0, 0, 0)  # the layout of 8-bit values is fixed
    use_tma = tile.kernel == "tma"
    if use_tma:
        value_block = [1, block_n, 1, width] if constants["PV"] == "16bit" else [width, block_n]
        codes = compat.TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [block_n, width])
        values = compat.TensorDescriptor(v, list(v.shape), list(v.stride()), value_block)
    launch(
        _attention_fwd_kernel, tiles,
        q, codes, prepared.scale, values, *first, *value_strides,
        *_mask_arguments(masking, mask, prepared.scale), *packed_arguments(packed, prepared.scale), *sizes,
        **constants, BLOCK_M=tile.block_m, STAGES=tile.num_stages, USE_TMA=use_tma, num_warps=tile.num_warps,
        SOFTCAP=masking.softcap > 0, HAS_SINKS=masking.sinks is not None,
        TILE_ADDS_BITS=tile.adds_bits, PACKED=packed is not None, PARTS=tile.parts, ASM=tile.asm,
        enable_fp_fusion=False,
    )  # fmt: skip


def _mask_arguments(masking: Masking, mask: MaskTiles, none: torch.Tensor, hopper: bool = False) -> list:
    """Return the arguments from mask_ptr to offset (Hopper kernel) or softcap (Triton kernel)."""
    given, strides = None, [0, 0, 0, 0]
    if mask.kind == "rows":
        given = as_loadable(masking.mask)
        if hopper and given.stride(3) != 1:
            given = given.contiguous()
        strides = broadcast_strides(given)
    of_list, reach = [mask.reach, mask.tiles, mask.numbers], [*mask.reach_strides]
    window = [masking.left, masking.right, masking.offset]
    if hopper:
        tensors, numbers = [given, *of_list], [*strides[:3], *reach, *mask.list_strides[:2], *window]
    else:
        tensors = [given, *of_list, masking.sinks]
        numbers = [*strides, *reach, *mask.list_strides, *window, masking.softcap * LOG2_E]
    return [*(none if x is None else x for x in tensors), *numbers]
