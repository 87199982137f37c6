"""The prologue: one launch that quantises K, and V if P·V is in 8 bit, before the attention kernel.

Each program quantises keys (prepare_keys.py) or values (prepare_values.py for FP8, prepare_value_codes.py for INT8).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...facts.masking import FAINT, UNLIMITED
from ...facts.numerics import divide, sampled_balance, sampled_center
from ...facts.state import HeadState, shape_key
from ..compat import gdc_launch_dependents, parameters
from ..launch import buffer, launch, processors_of
from ..sequences import Packed, packed_arguments
from .mask_tiles import MaskTiles
from .prepare_keys import prepare_keys
from .prepare_value_codes import launch_value_reach, prepare_value_codes, value_rows
from .prepare_values import KEYS, launch_value_amax, prepare_values


# Timed on an H200 at width 128. A program holds one tile of keys in registers and can't hide the latency of its loads;
# the other programs of the SM do that. All programs of keys run at once, since each begins with loads that depend on
# each other.
_REGISTERS = 128  # of a thread at most
_WARPS_OF_PROCESSOR = 16  # fit on an SM, which has 65,536 registers
_ZEROS = tl.constexpr(128)  # numbers zeroed at a time
CODE_TYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "16bit": None}
# Steps (of KEYS values) of one program in FP8: in calls with fewer than _LONG tokens of all heads, and in longer ones
_VALUE_STEPS, _LONG = (4, 8), 2**20
_CODE_STEPS = (16, 32)  # the same in INT8, where each program first computes centre and scales of its channels


@triton.jit(
    do_not_specialize=[
        "shape_key",
        "seq_q",
        "seq_kv",
        "key_programs",
        "programs_per_head",
        "tiles",
        "kv_heads",
        "group",
        "state_width",
        "stride_rb",
        "stride_rh",
        "value_chunks",
        "value_spans",
        "value_chunk_keys",
        "value_steps",
        "zeros",
        "sequences",
        "left",
    ]  # fmt: skip
)
def _prologue_kernel(
    q_ptr, k_ptr, k_int_ptr, k_scale_ptr, center_ptr, q_weight_ptr, head_amax_ptr,
    v_ptr, v_codes_ptr, v_scale_ptr, v_amax_ptr,
    plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr, shape_key, state_width,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    reach_ptr, extent_ptr, stride_rb, stride_rh, cu_q_ptr, cu_k_ptr, sequences, left, seq_q, seq_kv, kv_heads, group,
    key_programs, programs_per_head, tiles, value_chunks, value_chunk_keys, value_spans, value_steps,
    zeroed_ptr, zeros,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, SCALING: tl.constexpr,
    SMOOTH: tl.constexpr, STORE_CENTER: tl.constexpr, HAS_MASK: tl.constexpr, ROWS: tl.constexpr,
    HAS_VALUES: tl.constexpr, CHANNELS: tl.constexpr, OVERLAP: tl.constexpr, PACKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, PV: tl.constexpr,
):  # fmt: skip
    if OVERLAP:  # programs of the attention kernel may start on free SMs; they wait for this launch before they read
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program == 0:
        for first in range(0, zeros, _ZEROS):
            number = first + tl.arange(0, _ZEROS)
            tl.store(zeroed_ptr + number, tl.zeros([_ZEROS], tl.int32), mask=number < zeros)
    is_key, number = True, program
    if HAS_VALUES:
        # programs of keys and of values alternate: while the former check their plan, the latter keep the memory busy
        paired = 2 * tl.minimum(key_programs, tl.num_programs(0) - key_programs)
        is_key = tl.where(program < paired, program % 2 == 0, paired < 2 * key_programs)
        number = tl.where(program < paired, program // 2, program - paired // 2)
    if is_key:
        prepare_keys(
            number, q_ptr, k_ptr, k_int_ptr, k_scale_ptr, center_ptr, q_weight_ptr, head_amax_ptr,
            plan_ptr, plan_scale_ptr, stats_ptr, counts_ptr, row_ptr, shape_key, state_width,
            stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, reach_ptr, extent_ptr, stride_rb,
            stride_rh, cu_q_ptr, cu_k_ptr, sequences, left, seq_q, seq_kv, kv_heads, group, programs_per_head, tiles,
            HEAD_DIM, WIDTH, BLOCK_N, SCALING, SMOOTH, STORE_CENTER, HAS_MASK, ROWS, PACKED, HAS_LEFT,
        )  # fmt: skip
    elif HAS_VALUES and (PV == "int8" or PV == "int8_tensor"):
        prepare_value_codes(
            number, v_ptr, v_codes_ptr, v_scale_ptr, v_amax_ptr, stride_vb, stride_vs, stride_vh, reach_ptr,
            extent_ptr, stride_rb, stride_rh, tl.cdiv(seq_kv, BLOCK_N) * BLOCK_N, seq_kv, kv_heads, value_chunks,
            value_spans, value_steps, HEAD_DIM, WIDTH, BLOCK_N, CHANNELS, HAS_MASK, PV,
        )  # fmt: skip
    elif HAS_VALUES:
        prepare_values(
            number, v_ptr, v_codes_ptr, v_scale_ptr, v_amax_ptr, plan_ptr, plan_scale_ptr, stats_ptr,
            counts_ptr, row_ptr, shape_key, state_width, stride_vb, stride_vs, stride_vh, reach_ptr, stride_rb,
            stride_rh, cu_q_ptr, cu_k_ptr, sequences, left, seq_q, seq_kv, kv_heads, value_chunks, value_chunk_keys,
            value_spans, value_steps,
            HEAD_DIM, WIDTH, CHANNELS, SCALING == "planned", HAS_MASK, PACKED, HAS_LEFT,
        )  # fmt: skip


class Prepared(NamedTuple):
    """Results of the prologue for the attention kernel; None for those that a recipe has not.

    Attributes:
        codes: of K, int8 or float8_e4m3fn [B·H_kv, tiles·block_n, width], zero beyond the sequence and head_dim.
        scale: of K, fp32 [B·H_kv, tiles], or [B·H_kv, tiles·block_n] if scales are per token.
        center: fp32 [B, H_kv, width], the centre subtracted from K. None unless the LSE is returned.
        q_weight: fp32 [B, H_kv, width], 1 / balance, by which attention multiplies Q.
        q_amax: fp32 [B, H], for scaling "per_head" alone.
        values: codes of V, float8_e4m3fn or int8 [B·H_kv·steps·width, 128], transposed and permuted in steps of 128
            keys. None if P·V is in 16 bit.
        value_scale: fp32 [B, H_kv, width] (FP8) or [B, H_kv, rows, width] (INT8: prepare_value_codes.py).
    """

    codes: torch.Tensor
    scale: torch.Tensor
    center: torch.Tensor | None
    q_weight: torch.Tensor
    q_amax: torch.Tensor | None
    values: torch.Tensor | None
    value_scale: torch.Tensor | None


def warps_of(block_n: int, width: int) -> int:
    """Return the warps of a program, so that a thread holds at most 64 numbers of a key tile."""
    return 4 if block_n * width <= 8192 else 8


def constants_of(num_warps: int, width: int) -> dict:
    """Return the kernel's constants ROWS (keys of a slice) and CHANNELS (of V in a program)."""
    # a slice has 8 elements a thread; with this many channels, loads and stores of V's transposition are whole sectors
    return {"ROWS": 8 * 32 * num_warps // width, "CHANNELS": min(8 * num_warps, width)}


def launch_prologue(
    q, k, v, *, scaling, smooth_k, state: HeadState | None, mask: MaskTiles, return_center, block_n, width, rotation,
    zeroed: torch.Tensor | None = None, overlap: bool = False, packed: Packed | None = None, left: int = UNLIMITED,
    qk: str = "int8", pv: str = "fp8_e4m3",
) -> Prepared:  # fmt: skip
    """Quantise K [B, S_kv, H_kv, D], and V if given, for the attention kernel.

    Args:
        q: read for the balance and for the check of the plan; its codes are made in the attention kernel.
        v: of k's shape, or None if P·V is in 16 bit.
        scaling: "per_token", "per_block", "per_head", or "planned", which needs `state`.
        smooth_k: subtract the centre from K and move its balance to Q.
        mask: hidden keys get codes of zero and do not count for scales. A key with a bias of -1e30 or less for all
            rows does not count for V's scales (unless all keys are such) and is clipped at 7 times of them.
        return_center: store the centre, as the LSE needs it.
        block_n: keys of a tile of the attention kernel.
        width: channels of a row of the buffers, a power of two >= D.
        rotation: the rotation of q and k; a plan holds for one rotation only.
        zeroed: int32, counters of the attention kernel, set to 0 here.
        overlap: let the next launch on the stream begin before this one ends; it must wait by itself (launch_pdl).
        packed: the sequences of q, k and v, with batch 1; not with "planned" or "per_head". B and the tiles of
            `Prepared` then are of the sequences.
        left: sliding window of packed sequences: how many keys before its own a row sees.
        qk, pv: number formats of the recipe; pv matters only if v is given.
    """
    batch, seq_kv, kv_heads, head_dim = k.shape
    heads = batch * kv_heads
    samples = batch if packed is None else packed.sequences
    # not triton.cdiv, which takes two microseconds on the host
    n_tiles = -(-seq_kv // block_n) if packed is None else packed.slots(seq_kv, block_n)
    planned, has_mask, has_values = scaling == "planned", mask.reach is not None, v is not None

    q_amax = k_amax = None
    if scaling == "per_head":
        # for comparison: reductions over the whole head, which planned scales avoid
        queries, keys = q.transpose(1, 2).float(), k.transpose(1, 2).float()
        counts = mask.reach[..., :seq_kv] > FAINT if has_mask else None
        center = sampled_center(keys, counts) if smooth_k else torch.zeros_like(keys[:, :, :1])
        balance = sampled_balance(queries, keys, center, counts) if smooth_k else torch.ones_like(center)
        balanced = (keys - center) * balance
        balanced = balanced if counts is None else torch.where(counts[..., None], balanced, 0.0)
        k_amax = balanced.abs().amax((2, 3)).contiguous()
        q_weight = divide(1.0, balance).repeat_interleave(q.shape[2] // kv_heads, 1)
        q_amax = (queries * q_weight).abs().amax((2, 3)).contiguous()
    n_steps = -(-seq_kv // KEYS.value) if packed is None else packed.slots(seq_kv, KEYS.value)
    is_int8 = pv.startswith("int8")
    rows = (value_rows(n_steps, block_n),) if is_int8 else ()
    value_type, code_type = CODE_TYPES["int8" if is_int8 else pv], CODE_TYPES[qk]
    prepared = Prepared(
        codes=buffer(heads, n_tiles * block_n, width, dtype=code_type, device=k.device),
        scale=buffer(heads, n_tiles * (block_n if scaling == "per_token" else 1), device=k.device),
        center=buffer(samples, kv_heads, width, device=k.device) if return_center else None,
        q_weight=buffer(samples, kv_heads, width, device=k.device),
        q_amax=q_amax,
        values=buffer(heads * n_steps * width, KEYS.value, dtype=value_type, device=k.device) if has_values else None,
        value_scale=buffer(samples, kv_heads, *rows, width, device=k.device) if has_values else None,
    )
    v_amax, chunk_keys = None, 0
    if has_values and is_int8:
        v_amax = launch_value_reach(v, mask=mask, width=width)
    elif has_values and not planned:
        v_amax, chunk_keys = launch_value_amax(v, mask=mask, width=width, packed=packed, seq_q=q.shape[1], left=left)
    num_warps = warps_of(block_n, width)
    constants = constants_of(num_warps, width)
    at_once = processors_of(k.device) * (_WARPS_OF_PROCESSOR // num_warps)
    tiles = -(-heads * n_tiles // at_once)
    programs = -(-n_tiles // tiles) if packed is None else packed.slots(seq_kv, tiles * block_n)
    steps = (_CODE_STEPS if is_int8 else _VALUE_STEPS)[heads * seq_kv >= _LONG]
    spans = -(-n_steps // steps) if packed is None else packed.slots(seq_kv, steps * KEYS.value)
    value_programs = spans * (width // constants["CHANNELS"]) * heads if has_values else 0
    none = prepared.scale  # stands for pointers that are never read
    plan, plan_scale, stats, counts, row = state[:5] if planned else (none,) * 5
    v_strides = v.stride()[:3] if has_values else (0, 0, 0)
    tensors = [prepared.center, prepared.q_weight, k_amax, v, prepared.values, prepared.value_scale, v_amax]
    launch(
        _prologue_kernel, programs * heads + value_programs,
        q, k, prepared.codes, prepared.scale, *(none if x is None else x for x in tensors),
        plan, plan_scale, stats, counts, row,
        shape_key(batch, q.shape[1], seq_kv, rotation) if planned else 0, plan.shape[-1],
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2), *v_strides,
        mask.reach if has_mask else none, mask.extent if mask.extent is not None else none, *mask.reach_strides,
        *packed_arguments(packed, none), left, q.shape[1], seq_kv, kv_heads, q.shape[2] // kv_heads,
        programs * heads, programs, tiles, v_amax.shape[1] if v_amax is not None else 0, chunk_keys, spans, steps,
        # the same dtype with and without counters, so that there is one kernel
        none.view(torch.int32) if zeroed is None else zeroed, 0 if zeroed is None else zeroed.numel(),
        HEAD_DIM=head_dim, WIDTH=width, BLOCK_N=block_n, SCALING=scaling, SMOOTH=smooth_k,
        STORE_CENTER=return_center, HAS_MASK=has_mask, HAS_VALUES=has_values, **constants, OVERLAP=overlap,
        PACKED=packed is not None, HAS_LEFT=packed is not None and left != UNLIMITED, PV=pv if has_values else "16bit",
        num_warps=num_warps, maxnreg=_REGISTERS if parameters(_prologue_kernel) else None, enable_fp_fusion=False,
    )  # fmt: skip
    return prepared
