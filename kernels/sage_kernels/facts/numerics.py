"""Arithmetic shared by the reference and the launchers: number formats, sampled centres, balances."""

from __future__ import annotations

import math

import torch

from .recipe import (
    AMAX_FLOOR,
    BALANCE_NEAR_ABOVE,
    BALANCE_NEAR_BELOW,
    CHANNEL_FLOOR,
    E4M3_MAX,
    FIT_SAMPLES,
    INT8_MAX,
    V_AMAX_FLOOR,
    V_CODE,
)


CODE_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # of 8-bit linear layers
FORMATS_OF_CODES = {dtype: name for name, dtype in CODE_TYPES.items()}
LOG2_E = math.log2(math.e)
CENTER_SAMPLES = 128  # sampled tokens whose mean is the centre of a head without a plan
LOG_BITS = 14  # fraction bits of an integer base-2 logarithm: fp32's bits, shifted, are one within 0.09
LOG_SHIFT = 23 - LOG_BITS
ROW_CLIP, ROW_STEPS = 8.0, 2.0**12  # limit and integer steps of an element in its row's sum: 256 of them fit fp32
LARGEST_QUERY = 2.0**60  # larger elements of Q, infinite ones too, count as this when a plan is tried on a sample
BALANCE_STEP = 1 << 20  # step of a balance between powers of two, in fp32's bits
CENTER_STEPS = 2.0**22  # integer steps from 0 to the sample's largest element: 128 of them fit int32


def pv_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of P and V: the input's own 16-bit dtype; bf16 for fp32 inputs, whose range fp16 lacks."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def padded_head_dim(head_dim: int) -> int:
    """Round head_dim up to a multiple of 8, so that rows of 16-bit numbers are aligned to 16 bytes.

    The kernels work on this many channels.
    """
    return -(-head_dim // 8) * 8


def rotation_block(head_dim: int) -> int:
    """Size of the Hadamard matrix: the largest power of two that divides the padded head_dim."""
    channels = padded_head_dim(head_dim)
    return channels & -channels


def divide(number: float, x: torch.Tensor) -> torch.Tensor:
    """number / x, rounded once. PyTorch computes a Python number / x as reciprocal(x)·number.

    The kernels use div_rn.
    """
    return torch.full_like(x, number) / x


# Largest balance of a channel before a rotation, and 1 / the smallest: fp16 holds the products
WIDEST_BALANCE = 2.0**12


def sample_tokens(seq: int | torch.Tensor, device) -> torch.Tensor:
    """Choose the tokens that a head without a plan is sampled at: evenly spread, with a shear.

    The shear keeps samples from falling into the same column of all rows of an image. seq: tokens to choose from, a
    number or a tensor [..., 1] of them. Returns: [128] or [..., 128] int64.
    """
    i = torch.arange(CENTER_SAMPLES, device=device)
    if isinstance(seq, int):
        return i * seq // CENTER_SAMPLES + i % max(seq // CENTER_SAMPLES, 1)
    return i * seq // CENTER_SAMPLES + i % (seq // CENTER_SAMPLES).clamp_min(1)


def fit_tokens(seq: torch.Tensor) -> torch.Tensor:
    """Choose FIT_SAMPLES tokens, evenly spread, to test whether a plan fits.

    seq: int64 tokens [..., 1] to choose from. Returns: [..., FIT_SAMPLES].
    """
    return (torch.arange(FIT_SAMPLES, device=seq.device) * (seq // FIT_SAMPLES + 1)).minimum(seq.clamp_min(1) - 1)


def sample_keys(k: torch.Tensor, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample 128 of the keys [B, H, S, D], and mark the samples that count.

    Returns: keys [B, H, 128, D], and bool [B, H, 128, 1] (None: all count).
    counts: bool [B or 1, H or 1, S], keys that some row sees. Samples are drawn from the first key to the
    last of these, so that padding at the end changes nothing.
    """
    if counts is None:
        return k[:, :, sample_tokens(k.shape[2], k.device)], None
    counts = counts.expand(k.shape[0], k.shape[1], -1)
    extent = (counts * torch.arange(1, k.shape[2] + 1, device=k.device)).amax(2, keepdim=True)
    tokens = sample_tokens(extent, k.device)[..., None]
    return k.gather(2, tokens.expand(-1, -1, -1, k.shape[3])), counts[..., None].gather(2, tokens)


def sampled_center(k: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Centre of a head without a plan, fp32 [B, H, 1, D]: the mean of a sample of k [B, H, S, D].

    Any vector shared by all keys of a head leaves softmax exact, so a sample serves as well as the full mean and costs
    no pass over K. Summed as integers (in units of the sample's largest element / 2^22): the bits are the same in
    whatever order the terms are added, so the kernel's codes are the reference's. counts: as in `sample_keys`.
    """
    return _integer_mean(*sample_keys(k, counts), (2, 3))


def _integer_mean(sample: torch.Tensor, counted: torch.Tensor | None, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the mean over the tokens of a sample [B, H, S, D], summed as integers.

    dims: over which the largest element is taken; a step of the integers is a share of it.
    """
    number: int | torch.Tensor = CENTER_SAMPLES
    if counted is not None:
        sample = torch.where(counted, sample, 0.0)
        number = counted.sum(2, keepdim=True).clamp_min(1).float()
    amax = sample.abs().amax(dims, keepdim=True).clamp_min(AMAX_FLOOR)
    total = torch.round(sample * divide(CENTER_STEPS, amax)).double().sum(2, keepdim=True).float()
    return total * (amax / (CENTER_STEPS * number))


def _row_sizes(sample: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    """|x| of a sample [B, H, S, D] as a share of its row's sum, so that every row weighs alike.

    Rows have scales of their own, and a loud row is a row like any other. No element counts more than 8 ordinary ones
    in the sum, where ordinary is the geometric mean. Elements that are not finite, or do not count, are 0.
    """
    size = torch.where(sample.isfinite(), sample.abs(), 0.0)
    size = (size if counted is None else torch.where(counted, size, 0.0)).contiguous()
    known = size > 0
    logarithm = torch.where(known, size.view(torch.int32) >> LOG_SHIFT, 0).sum(3, keepdim=True)
    mean = (logarithm // known.sum(3, keepdim=True).clamp_min(1)).int()
    factor = ((254 << LOG_BITS) - mean).clamp(1 << LOG_BITS, 254 << LOG_BITS) << LOG_SHIFT
    size = (size * factor.view(torch.float32)).clamp_max(CENTER_STEPS)
    total = torch.round(size.clamp_max(ROW_CLIP) * ROW_STEPS).sum(3, keepdim=True).clamp_min(1)
    return size / total


def sampled_balance(q: torch.Tensor, k: torch.Tensor, center: torch.Tensor, counts=None) -> torch.Tensor:
    """Channel balance b of a head without a plan, from a sample: sqrt(amax |q| / amax |k - c|).

    Every row weighs alike. Q / b and K·b leave Q·Kᵀ exact for any b > 0. Where there are as many queries as keys, a
    query at the place of a key that does not count is padding and does not count either. Sums are of integers: the
    same bits in any order.

    Args:
        q, k, center: fp32 [B, H, S_q, D], [B, H_kv, S_kv, D], [B, H_kv, 1, D].
        counts: as in `sample_keys`.
    Returns: fp32 [B, H_kv, 1, D].
    """
    sample, counted = sample_keys(k, counts)
    k_amax = _row_sizes(sample - center, counted).amax(2, keepdim=True)
    q = q.unflatten(1, (k.shape[1], -1))
    heads = torch.arange(CENTER_SAMPLES, device=q.device) * q.shape[2] // CENTER_SAMPLES
    if counts is None or q.shape[3] != k.shape[2]:
        counted, sample = None, q[:, :, heads, sample_tokens(q.shape[3], q.device)]
    else:
        samples = torch.stack([sample_keys(one, counts)[0] for one in q.unbind(2)], 3)  # [B, H_kv, 128, G, D]
        sample = samples[:, :, torch.arange(CENTER_SAMPLES, device=q.device), heads]
    q_amax = _row_sizes(sample, counted).amax(2, keepdim=True)
    q_amax = q_amax.maximum(q_amax.amax(-1, keepdim=True) * CHANNEL_FLOOR).clamp_min(AMAX_FLOOR)
    k_amax = k_amax.maximum(k_amax.amax(-1, keepdim=True) * CHANNEL_FLOOR).clamp_min(AMAX_FLOOR)
    balance = (q_amax / k_amax).double().sqrt().float()  # rounded once: torch's own fp32 sqrt on the CPU is an ulp off
    # rounded to a power of two if it is near one, else to one of four values between two of them: differences between
    # channels that are alike are noise of the sample, which rounding removes, and scaling a row changes nothing
    bits = balance.view(torch.int32)
    fraction, power = bits & 0x7FFFFF, bits & 0x7F800000
    between = bits + (BALANCE_STEP >> 1) & -BALANCE_STEP
    bits = torch.where(fraction > BALANCE_NEAR_ABOVE, power + 2**23, between)
    bits = torch.where(fraction < BALANCE_NEAR_BELOW, power, bits)
    return bits.view(torch.float32)


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to e4m3 as a GPU does: to nearest even, saturating. NaN stays."""
    # clamped first: torch's own cast overflows
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def quantize_values(v, seen=None, counts=None, planned=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise V, fp32 [B, H, S, D], to e4m3 with one scale a channel.

    Args:
        seen, counts: bool [B or 1, H or 1, S]: keys that some row sees at all, and keys that take part in scales;
            None: all.
        planned: scales fp32 [H, D], 0 in every channel of a head without a plan.
    Returns: codes [B, H, S, D] fp32 values of e4m3 (NaN for NaN and inf), scale [B, H, 1, D], and the elements
        [B, H, S, D] that were clipped by a planned scale.
    """
    if seen is not None:
        v = torch.where(seen[..., None], v, 0.0)
    size = torch.where(torch.isfinite(v), v.abs(), 0.0)
    amax = size.amax(2, keepdim=True)
    if counts is not None:
        counted = torch.where(counts[..., None], size, 0.0).amax(2, keepdim=True)
        amax = torch.where(counted > 0, counted, amax)
    scale = amax / V_CODE
    has_plan = torch.zeros_like(scale[:, :, :, :1], dtype=torch.bool)
    if planned is not None:
        has_plan = (planned > 0).any(-1)[None, :, None, None]
        scale = torch.where(has_plan, planned[None, :, None], scale)
    scale = scale.clamp_min(V_AMAX_FLOOR / V_CODE)
    inverse = divide(1.0, scale)
    return round_to_e4m3(v * inverse + v * 0.0), scale, (size * inverse > E4M3_MAX) & has_plan


def value_center(v, counts=None) -> torch.Tensor:
    """Centre of V in INT8: each channel's mean of a sample of its finite values.

    fp32 [B, H, S, D] -> [B, H, 1, D]. Softmax weights sum to 1, so any vector would do. Summed as integers, as in
    `sampled_center`; counts: as there.
    """
    sample, counted = sample_keys(v, counts)
    return _integer_mean(torch.where(torch.isfinite(sample), sample, 0.0), counted, (2,))


def quantize_centered_values(v, seen=None, counts=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise V less its centre to INT8 with one scale a channel. Arguments as of `quantize_values`.

    Returns: codes [B, H, S, D] fp32 integers, scale and centre [B, H, 1, D]. The centre is NaN in a channel that holds
        NaN or inf.
    """
    center = value_center(v, counts)
    centred, codes, scale, lost = _int8_values(v - center, v * 0.0, seen, counts, (2,))
    if counts is None and seen is None:  # see prepare_value_codes.py
        center = center + (centred - codes * scale).mean(2, keepdim=True)
    return codes, scale, center + lost


def _int8_values(v, lost, seen, counts, dims: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Quantise V to INT8 with one scale over `dims`, in every channel.

    Returns: V with 0 for keys that nobody sees, codes, scale [B, H, 1, D], and `lost` summed over the seen keys.
    """
    if seen is not None:
        v, lost = (torch.where(seen[..., None], x, 0.0) for x in (v, lost))
    size = torch.where(torch.isfinite(v), v.abs(), 0.0)
    amax = size.amax(dims, keepdim=True)
    if counts is not None:
        counted = torch.where(counts[..., None], size, 0.0).amax(dims, keepdim=True)
        amax = torch.where(counted > 0, counted, amax)
    amax = amax.clamp_min(V_AMAX_FLOOR).expand(-1, -1, -1, v.shape[3])
    codes = torch.round((v * divide(float(INT8_MAX), amax)).clamp(-INT8_MAX, INT8_MAX)).nan_to_num(0.0)
    return v, codes, amax / torch.full_like(amax, INT8_MAX), lost.sum(2, keepdim=True)


def quantize_tensor_values(v, seen=None, counts=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise V to INT8 with one scale a head, as INT-FlashAttention's code does.

    Arguments and results as of `quantize_centered_values`: the scale is the same in all channels, the centre 0 or NaN.
    """
    _, codes, scale, lost = _int8_values(v, v * 0.0, seen, counts, (2, 3))
    return codes, scale, lost
