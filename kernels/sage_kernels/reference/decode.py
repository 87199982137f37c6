"""Reference of the INT8 KV cache and attention over it: rounds where the kernels round.

Layouts: q [B, S_q, H, D]; keys, values and their codes [B, H_kv, S, D]; scales [B, H_kv, S]. Integer products are
formed in fp32, which is exact here: |Σ q·k| <= D·127² < 2^24.
"""

from __future__ import annotations

import torch

from ..facts.masking import NO_MASKING, Masking, log2_bias, visible
from ..facts.numerics import LOG2_E, divide
from ..facts.recipe import AMAX_FLOOR, INT8_MAX
from .attention import rows_at_a_time


# A query is the sum of two codes, the second in steps 254 times finer: a remainder of at most 1/2 becomes 127
LOW_STEPS = 254


def ref_quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise tokens, fp32 [..., D], to codes int8 [..., D] with a scale bf16 [...] each.

    The scale is rounded to bf16 before it divides, so its rounding causes no error. Rounded down by at most 2^-8, it
    makes no code larger than round(127.5 - 0.004) = 127. A token that is not finite has a NaN scale and codes of 0.
    """
    amax = x.abs().amax(-1).clamp_min(AMAX_FLOOR)
    scale = (divide_by(amax, INT8_MAX) + (x * 0.0).sum(-1)).to(torch.bfloat16)
    codes = torch.round(x * divide(1.0, scale.float())[..., None])
    return torch.where(scale.isnan()[..., None], 0.0, codes).to(torch.int8), scale


def divide_by(x: torch.Tensor, number: float) -> torch.Tensor:
    """x / number, rounded once on every device: CUDA multiplies by the reciprocal of a Python number."""
    return x / torch.full_like(x, number)


def ref_append_kv(
    k, v, k_mean, k_codes, k_scale, v_codes, v_scale, *, position: int, ring: bool, k_balance=None
) -> None:
    """Quantise k and v [B, H_kv, N, D] into the cache, from token number `position` on, in place.

    A token's slot is its position, in a ring modulo the capacity. Slots beyond the capacity are not written.
    """
    capacity = k_codes.shape[2]
    tokens = torch.arange(k.shape[2], device=k.device) + position
    slots = tokens % capacity if ring else tokens
    kept = slots < capacity
    slots = slots[kept]
    k = k.detach()[:, :, kept].float()
    if k_mean is not None:
        k = k - k_mean[:, :, None]
    if k_balance is not None:
        k = k * k_balance[:, :, None]
    # K and V are both quantised before anything is written: an error must leave the tokens in a ring as they were
    new = (*ref_quantize_tokens(k), *ref_quantize_tokens(v.detach()[:, :, kept].float()))
    for buffer, x in zip((k_codes, k_scale, v_codes, v_scale), new, strict=True):
        buffer.index_copy_(2, slots, x)


def ref_quantize_queries(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write q (fp32, [..., D]) as scale · (high + low / 254): two codes, and a scale [..., 1] fp32 a row.

    The codes are integers in fp32.
    """
    amax = q.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR)
    ratio = q * divide(INT8_MAX, amax)
    high = torch.round(ratio)
    low = torch.round((ratio - high) * LOW_STEPS)
    return high, low, divide_by(amax, INT8_MAX) + (q * 0.0).sum(-1, keepdim=True)


def ref_decode_attention(
    q, k_codes, k_scale, v_codes, v_scale, k_mean, lengths, *,
    ring: bool = False, masking: Masking = NO_MASKING, scale: float, round_p: bool = True, k_balance=None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over an INT8 KV cache as the kernel computes it.

    Arguments as of `sage_decode_attention`, unchecked.

    Args:
        lengths: None, or an integer tensor [] or [B].
        masking: mask [B or 1, H or 1, S_q or 1, S]; left and right count from the row's own position, row 0 being
            key number (valid keys - S_q); offset is not used.
        round_p: False keeps P and the queries unrounded: the difference is the rounding floor of the tolerances.
    Returns: out [B, S_q, H, D] in q.dtype, lse [B, S_q, H] fp32, natural log.
    """
    batch, seq_q, heads, head_dim = q.shape
    kv_heads, capacity = k_codes.shape[1], k_codes.shape[2]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    seen = [capacity] * batch if lengths is None else lengths.expand(batch).tolist()
    step = rows_at_a_time(q.device, capacity * group)
    for b in range(batch):
        if seen[b] > capacity and not ring:  # some tokens had no room, so no result is right
            out[b], lse[b] = torch.nan, torch.nan
            continue
        number = max(min(seen[b], capacity), 0)
        if number == 0:
            out[b], lse[b] = 0.0, -torch.inf if masking.sinks is None else masking.sinks
            continue
        slots = torch.arange(seen[b] - number, seen[b], device=q.device) % capacity if ring else slice(0, number)
        for h in range(kv_heads):
            k, v = (x[b, h, slots].float() for x in (k_codes, v_codes))
            k_s, v_s = (x[b, h, slots].float() for x in (k_scale, v_scale))
            own = slice(h * group, (h + 1) * group)
            for start in range(0, seq_q, step):
                rows = torch.arange(start, min(start + step, seq_q), device=q.device)
                part = slice(start, start + step)
                qf = q[b, part, own].detach().float()  # [R, group, D]
                shift = torch.zeros_like(qf[..., :1])
                if k_mean is not None:
                    shift = (qf * k_mean[b, h]).sum(-1, keepdim=True) * scale
                if k_balance is not None:
                    qf = qf * divide(1.0, k_balance[b, h])
                x = _scores(qf, k, k_s, scale, exact_queries=not round_p)
                x = _masked(x, shift, masking, b, own, rows, number - seq_q)
                o, log_sum = _softmax_values(x, v, v_s, shift, masking, own, round_p)
                out[b, part, own] = o.to(q.dtype)
                lse[b, part, own] = log_sum
    return out, lse


def _scores(q, k, k_scale, scale, *, exact_queries):
    """Base-2 scores [R, group, S] of rows q [R, group, D] against codes k [S, D]."""
    if exact_queries:
        return (q * (scale * LOG2_E)) @ k.T * k_scale
    high, low, q_scale = ref_quantize_queries(q)
    total = ((high @ k.T).double() * LOW_STEPS + (low @ k.T).double()).float()  # int32 in the kernel
    return total * k_scale * (q_scale * (scale * LOG2_E / LOW_STEPS))


def _masked(x, shift, masking: Masking, b: int, own: slice, rows, offset: int):
    """Apply soft cap, bias, mask and band to rows [R] at positions offset + row. x [R, group, S], base 2."""
    if masking.softcap:
        cap = masking.softcap * LOG2_E
        x = cap * torch.tanh((x + shift * LOG2_E) / cap)
    if masking.mask is not None:
        mask = masking.mask[min(b, masking.mask.shape[0] - 1)]
        mask = mask if mask.shape[0] == 1 else mask[own]
        mask = mask if mask.shape[1] == 1 else mask[:, rows]
        bias = log2_bias(mask[..., : x.shape[-1]]).transpose(0, 1)
        x = torch.where(bias == -torch.inf, -torch.inf, x + bias)
    seen = visible(masking._replace(offset=offset), rows, x.shape[-1])
    return x if seen is None else torch.where(seen[:, None], x, -torch.inf)


def _softmax_values(x, v, v_scale, shift, masking: Masking, own: slice, round_p: bool):
    """Return softmax(x) · (v · v_scale) of rows x [R, group, S], and the natural log of the sum.

    The scale of a value is part of the exponent. So the largest product of probability and value decides the range
    that is rounded to fp16, not the probabilities or the values alone.
    """
    shift = torch.zeros_like(shift) if masking.softcap else shift  # the capped scores are the true ones
    hidden = x == -torch.inf
    top = torch.where(hidden, -torch.inf, x + torch.log2(v_scale)).amax(-1, keepdim=True)
    safe = torch.where(top == -torch.inf, 0.0, top)
    e = torch.where(hidden, 0.0, torch.exp2(x + torch.log2(v_scale) - safe))
    total = torch.where(hidden, 0.0, e * divide(1.0, v_scale)).sum(-1, keepdim=True)
    o = (e.half().float() if round_p else e) @ v
    if masking.sinks is not None:
        sink = (masking.sinks[own, None] - shift) * LOG2_E
        below, top = top, top.maximum(sink)
        o = o * torch.exp2(below - top)
        total = total * torch.exp2(below - top) + torch.exp2(sink - top)
    log_sum = (top + torch.log2(total)) / LOG2_E + shift
    return torch.where(total == 0, 0.0, o / total), log_sum[..., 0]
