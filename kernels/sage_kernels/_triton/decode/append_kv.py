"""Quantise new tokens into an INT8 KV cache: K and V of all heads in one launch."""

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..primitives import AMAX_FLOOR, INT8_MAX, head_width, nan_unless_finite, round_to_int8


@triton.jit
def _round_to_bf16(x):
    """Round x to bf16's precision, nearest even, still in fp32: the interpreter's own cast truncates."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def _store_tokens(x, codes_ptr, scale_ptr, slots, stride_codes, stride_scale, kept, channels, HEAD_DIM: tl.constexpr):
    """Quantise fp32 tokens x [tokens, WIDTH] and store codes and scales in their slots."""
    amax = tl.maximum(tl.max(tl.abs(x), 1), AMAX_FLOOR)
    scale = _round_to_bf16(tl.div_rn(amax, amax * 0.0 + INT8_MAX) + nan_unless_finite(x, 1))
    finite = scale == scale
    inverse = tl.where(finite, tl.div_rn(scale * 0.0 + 1.0, scale), 0.0)
    codes = round_to_int8(tl.where(finite[:, None], x * inverse[:, None], 0.0))
    pointers = codes_ptr + slots[:, None] * stride_codes + channels[None, :]
    tl.store(pointers, codes, mask=kept[:, None] & (channels < HEAD_DIM)[None, :])
    tl.store(scale_ptr + slots * stride_scale, scale.to(tl.bfloat16), mask=kept)


_LENGTHS = ["start", "number", "capacity", "heads", "stride_ksb", "stride_ksh", "stride_vsb", "stride_vsh"]


@triton.jit(do_not_specialize=_LENGTHS)
def _append_kv_kernel(k_ptr, v_ptr, mean_ptr, balance_ptr, k_codes_ptr, k_scale_ptr, v_codes_ptr, v_scale_ptr,
                      position_ptr, start, number, capacity, heads,
                      stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
                      stride_kcb, stride_kch, stride_kcn, stride_ksb, stride_ksh, stride_ksn,
                      stride_vcb, stride_vch, stride_vcn, stride_vsb, stride_vsh, stride_vsn,
                      HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, HAS_MEAN: tl.constexpr,
                      HAS_BALANCE: tl.constexpr, ON_DEVICE: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """Append BLOCK_T new tokens of one head of one sample. Grid: blocks of tokens of all heads."""
    blocks = tl.cdiv(number, BLOCK_T)
    which = tl.program_id(0)
    head = (which // blocks).to(tl.int64)
    b = head // heads
    h = head % heads
    tokens = (which % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.arange(0, WIDTH)
    is_token = tokens < number

    first = tl.full([], 0, tl.int64) + start
    if ON_DEVICE:
        first = tl.load(position_ptr).to(tl.int64)
    slots = first + tokens
    if RING:
        slots = slots % capacity
    kept = is_token & (slots < capacity) & (slots >= 0)

    inside = is_token[:, None] & (channels < HEAD_DIM)[None, :]
    tokens = tokens.to(tl.int64)[:, None]
    k = tl.load(k_ptr + b * stride_kb + h * stride_kh + tokens * stride_kn + channels[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + b * stride_vb + h * stride_vh + tokens * stride_vn + channels[None, :], mask=inside, other=0.0)
    k = k.to(tl.float32)
    if HAS_MEAN:
        mean = tl.load(mean_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=0.0)
        k = k - mean[None, :]
    if HAS_BALANCE:
        balance = tl.load(balance_ptr + head * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=1.0)
        k = k * balance[None, :]
    _store_tokens(
        k, k_codes_ptr + b * stride_kcb + h * stride_kch, k_scale_ptr + b * stride_ksb + h * stride_ksh, slots,
        stride_kcn, stride_ksn, kept, channels, HEAD_DIM,
    )  # fmt: skip
    _store_tokens(
        v.to(tl.float32), v_codes_ptr + b * stride_vcb + h * stride_vch, v_scale_ptr + b * stride_vsb + h * stride_vsh,
        slots, stride_vcn, stride_vsn, kept, channels, HEAD_DIM,
    )  # fmt: skip


def launch_append_kv(
    k, v, k_mean, k_codes, k_scale, v_codes, v_scale, *, position, start: int, ring: bool, k_balance=None
) -> None:
    """Launch `sage_kernels.append_kv` on k's device and current stream.

    Arguments are checked, and k is not empty.

    position: the first new token's position, an integer tensor [] on the device; None: `start` is used.
    """
    batch, heads, number, head_dim = k.shape
    k, v = (x if x.stride(3) == 1 or head_dim == 1 else x.contiguous() for x in (k, v))
    for x in (k_codes, v_codes):
        if x.stride(3) != 1 and head_dim != 1:
            raise NotImplementedError(f"k_codes, v_codes: got strides {x.stride()}, expected the last to be 1")
    block = 1 if number == 1 else 16
    strides = [stride for x in (k, v, k_codes, k_scale, v_codes, v_scale) for stride in x.stride()[:3]]
    with torch.cuda.device_of(k):
        launch(
            _append_kv_kernel, batch * heads * triton.cdiv(number, block),
            k, v, *(k_scale if x is None else x.contiguous() for x in (k_mean, k_balance)),
            k_codes, k_scale, v_codes, v_scale, k_scale if position is None else position,
            start, number, k_codes.shape[2], heads, *strides,
            HEAD_DIM=head_dim, WIDTH=head_width(head_dim), BLOCK_T=block, HAS_MEAN=k_mean is not None,
            HAS_BALANCE=k_balance is not None, ON_DEVICE=position is not None, RING=ring,
            num_warps=1 if block == 1 else 4, enable_fp_fusion=False,
        )  # fmt: skip
