"""The specification, in plain PyTorch: rounds where the kernels round. Oracle of the tests and the CPU path.

Integer products are formed in fp32, which is exact here: |Σ q·k| <= D·127² < 2^24 for D <= 1040.
Layouts: inputs [B, S, H, D]; intermediate codes [B, H, S, D]. Maths: kernels/README.md.
"""

from __future__ import annotations

import torch

from .masking import FAINT, NO_MASKING, Masking, key_reach, log2_bias, visible
from .numerics import (
    LOG2_E,
    divide,
    fit_tokens,
    padded_head_dim,
    pv_dtype,
    quantize_values,
    rotation_block,
    round_to_e4m3,
    sampled_balance,
    sampled_center,
)
from .recipe import (
    AMAX_FLOOR,
    DEFAULT_RECIPE,
    FIT_LIMIT,
    FIT_SAMPLES,
    INT8_MAX,
    LAGGED_EXPONENT,
    LAGGED_HIGHEST,
    LAGGED_LOWEST,
    P_EXPONENT,
    P_EXPONENT_LIMIT,
    RECIPES,
    SHRINK_LIMIT,
)
from .state import (
    COUNT_BELOW,
    COUNT_CALLS,
    COUNT_CLIPPED,
    COUNT_DYNAMIC,
    COUNT_KEY_MAX,
    COUNT_KEY_MIN,
    COUNT_KEYS,
    COUNT_MISFIT,
    COUNT_OUTSIDE,
    COUNT_PLAN_KEY_A,
    COUNT_PLAN_KEY_B,
    COUNT_REDONE,
    COUNT_TRIED,
    PLAN_CENTER,
    PLAN_K_WEIGHT,
    PLAN_Q_WEIGHT,
    PLAN_V_SCALE,
    STAT_K_MAX,
    STAT_K_MIN,
    STAT_Q_AMAX,
    STAT_V_AMAX,
    HeadState,
    keeps_row_max,
    reads_row_max,
    shape_key,
)


_SCORES_LIMIT = 1 << 25  # fp32 elements of one score matrix held at a time


def ref_rotate(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [B, S, H, D] times the block-diagonal Hadamard matrix, [B, S, H, padded_head_dim(D)] in x's dtype.

    Blocks of n = rotation_block(D) channels with entries (-1)^popcount(i & j) / sqrt(n): symmetric and orthogonal.
    Summed and scaled in fp32, rounded once, to `dtype` (x's if None).
    """
    block, channels = rotation_block(x.shape[3]), padded_head_dim(x.shape[3])
    y = torch.nn.functional.pad(x.detach().float(), (0, channels - x.shape[3])).unflatten(3, (-1, block))
    width = 1
    while width < block:  # one bit of the channel's number at a time
        low, high = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        width *= 2
    return (y * block**-0.5).flatten(3).to(dtype or x.dtype)


def ref_quantize(x: torch.Tensor, group: int | None, planned: torch.Tensor | None = None):
    """Symmetric INT8 codes of x [B, H, S, D] (fp32) with one scale per `group` tokens (None: per head).

    planned [B or 1, H, 1, 1]: dequantisation scale folded into x already, 0 for a head without a plan. A group of a
    planned head keeps that scale while its largest code is between SHRINK_LIMIT · 127 and 127. Any other group takes
    its own: nothing is clipped, and nothing loses its resolution.

    Returns: codes [B, H, S, D] fp32 integers in [-127, 127], scale [B, H, S, 1] fp32.
    """
    batch, heads, seq, _ = x.shape
    amax = x.abs().amax(-1)
    if group is None:
        amax = amax.amax(-1, keepdim=True).expand(-1, -1, seq)
    elif group > 1:
        padded = torch.nn.functional.pad(amax, (0, -seq % group)).unflatten(-1, (-1, group))
        amax = padded.amax(-1).repeat_interleave(group, -1)[..., :seq]
    amax = amax.clamp_min(AMAX_FLOOR)[..., None]
    scale, inverse = amax / INT8_MAX, divide(INT8_MAX, amax)
    if planned is not None:
        as_planned = (planned > 0) & (amax <= INT8_MAX) & (amax >= SHRINK_LIMIT * INT8_MAX)
        scale = torch.where(planned > 0, planned * torch.where(as_planned, 1.0, scale), scale)
        inverse = torch.where(as_planned, 1.0, inverse)
    return torch.round(x * inverse), scale


def ref_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    recipe: str = DEFAULT_RECIPE,
    scaling: str = "per_token",
    scale: float | None = None,
    smooth_k: bool = True,
    rotation: str = "none",
    state: HeadState | None = None,
    masking: Masking = NO_MASKING,
    block_q: int = 128,
    block_k: int = 128,
    round_p: bool = True,
    first_max: bool = False,
    rotated_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8-QK attention as the kernels compute it. Arguments as `sage_attention`, unchecked.

    Args:
        block_q, block_k: tokens per scale where the granularity is a block (the kernels' own tile sizes on a GPU).
        round_p: False keeps P, and V as it is given (in FP8: V as it is rounded), in fp32: the difference is the
            rounding floor of the test tolerances.
        first_max: P is rounded as with the largest score of the first block_k keys as the softmax's reference, which
            some kernels keep: the largest P is then no power of two, and rounding moves it.
        rotated_dtype: what rotated Q and K are rounded to; None: the dtype of q. They are what the scales and codes
            are made of, so the reference with round_p=False, of fp32 inputs, has to round them too.
    Returns: out [B, S_q, H, D] in q.dtype, lse [B, S_q, H] fp32, natural log.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    if rotation == "hadamard":
        q_in, k_in = (ref_rotate(x, rotated_dtype) for x in (q, k))
    else:
        q_in, k_in = q.detach(), k.detach()
    qf, kf = q_in.transpose(1, 2).float(), k_in.transpose(1, 2).float()
    is_fp8 = RECIPES[recipe].pv == "fp8_e4m3"
    vf = v.detach().transpose(1, 2).to(pv_dtype(q.dtype) if round_p and not is_fp8 else torch.float32).float()
    counts = seen = None
    reach = key_reach(masking, batch, heads, kv_heads, seq_q)
    if reach is not None:  # what no row sees may hold anything
        counts, seen = reach > FAINT, reach > -torch.inf
        vf = torch.where(seen[..., None], vf, 0.0)
    group_q = {"per_block": block_q, "per_token": 1, "per_head": None}[scaling]
    group_k = {"per_block": block_k, "per_token": 1, "per_head": None}[scaling]
    planned = None
    center = sampled_center(kf, counts) if smooth_k else torch.zeros_like(kf[:, :, :1])
    if smooth_k or state is not None:
        balance = sampled_balance(qf, kf, center, counts)
    else:  # without smoothing no later key changes a bit of a causal call
        balance = torch.ones_like(kf[:, :, :1])
    k_weight, q_weight = balance, divide(1.0, balance)
    if state is not None:
        group_q, group_k = 1, block_k
        known = _known(state, batch, seq_q, seq_kv, kv_heads, rotation)
        fits = _plan_fits(qf, kf, counts, state)
        planned, center, k_weight, q_weight = _planned(state, known & fits, center, k_weight, q_weight)
    x_q, x_k = qf * q_weight.repeat_interleave(heads // kv_heads, 1), (kf - center) * k_weight
    if counts is not None:
        x_k = torch.where(counts[..., None], x_k, 0.0)
    v_scale = None
    if is_fp8:
        planned_v = None
        if state is not None:
            rows = slice(int(state.row), int(state.row) + kv_heads)
            planned_v = torch.where(known[:, None], state.plan[rows, PLAN_V_SCALE, :head_dim], 0.0)
        values, v_scale, clipped = quantize_values(vf, seen, counts, planned_v)
        if state is not None:
            _record_values(state, vf, counts, clipped)
        vf = values
    if state is not None:
        _record(state, qf, kf, x_k, planned, known & ~fits, counts, rotation, block_k)
    q_int, q_scale = ref_quantize(x_q, group_q)
    k_int, k_scale = ref_quantize(x_k, group_k, planned)
    row_scale = q_scale * (scale * LOG2_E)

    out = torch.empty(batch, seq_q, heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, seq_q, heads, dtype=torch.float32, device=q.device)
    repeat = heads // kv_heads
    step = max(1, _SCORES_LIMIT // seq_kv)
    lagged, keeps_max = (is_fp8 and f(state, masking) for f in (reads_row_max, keeps_row_max))
    if lagged:  # decided for whole tiles of query rows
        step = max(1, step // block_q) * block_q
    for b in range(batch):
        for h in range(heads):
            kv = h // repeat
            for start in range(0, seq_q, step):
                rows = torch.arange(start, min(start + step, seq_q), device=q.device)
                part = slice(start, start + step)
                s = (q_int[b, h, part] @ k_int[b, kv].T) * (row_scale[b, h, part] * k_scale[b, kv].T)
                # smoothing lowered every score of the row by q·c: what is not invariant to that gets it back
                shift = (qf[b, h, part] @ center[b, kv].T) * scale
                s = _masked_scores(s, shift, masking, b, h, rows)
                round_ = None
                if round_p:
                    round_ = round_to_e4m3 if is_fp8 else lambda p: p.to(pv_dtype(q.dtype)).float()
                reference = _reference(s, P_EXPONENT if is_fp8 else 0.0)
                if first_max:
                    reference = _first_max(s[:, :block_k], reference)
                if keeps_max:
                    top = s.amax(-1)
                    kept = (state.row_max if lagged else state.row_max_next)[b, h, part]
                    to_kept = (qf[b, h, part] @ _to_middle(center[b, kv, 0], state, kv)) * (scale * LOG2_E)
                    if lagged:
                        counts_of_head = state.counts[int(state.row) + kv]
                        reference = _lagged(top, kept - to_kept, reference, block_q, counts_of_head)
                    top = top + to_kept
                    kept.copy_(torch.where(torch.isfinite(top), top, 0.0))
                o, log_sum = _softmax_values(s, vf[b, kv], shift, masking, h, reference, round_)
                if is_fp8:  # the rounding of P may push a mean of finite values beyond the largest number
                    o = (o * v_scale[b, kv]).clamp(-torch.finfo(q.dtype).max, torch.finfo(q.dtype).max)
                out[b, part, h] = o.to(q.dtype)
                lse[b, part, h] = log_sum[:, 0]
    return out, lse


def _masked_scores(s, shift, masking: Masking, b: int, h: int, rows) -> torch.Tensor:
    """Soft cap, bias, mask and band of one head's rows. s [R, S_kv], base 2; shift [R, 1], natural."""
    if masking.softcap:
        cap = masking.softcap * LOG2_E
        s = cap * torch.tanh((s + shift * LOG2_E) / cap)
    if masking.mask is not None:
        mask = masking.mask[min(b, masking.mask.shape[0] - 1), min(h, masking.mask.shape[1] - 1)]
        bias = log2_bias(mask if mask.shape[0] == 1 else mask[rows])
        s = torch.where(bias == -torch.inf, -torch.inf, s + bias)
    seen = visible(masking, rows, s.shape[1])
    return s if seen is None else torch.where(seen, s, -torch.inf)


def _reference(s, exponent: float) -> torch.Tensor:
    """What the exponents of each row are taken against [R, 1]: its largest P is 2^exponent."""
    top = s.amax(-1, keepdim=True)
    return torch.where(top.abs() < P_EXPONENT_LIMIT, top - exponent, top)


def _to_middle(center, state: HeadState, kv_head: int) -> torch.Tensor:
    """From a head's center [D] to the middle of the range of each channel of its keys in this call.

    Row maxima are kept on the terms of that: the center is the middle of an earlier call, and its moves from step to
    step, which outliers decide, would move every score of a row.
    """
    high, low = state.stats[int(state.row) + kv_head, (STAT_K_MAX, STAT_K_MIN), : len(center)]
    return center - (high * 0.5 + low * 0.5)


def _lagged(top, row_max, running, block_q: int, counts) -> torch.Tensor:
    """The reference [R, 1] from the rows' largest scores of the call before, where it fits whole tiles of rows.

    top [R]: those of this call; row_max [R]; where it is no number, 0 is as good a guess as any. running [R, 1]: for
    the other tiles. counts: of the head.
    """
    reference = torch.where(row_max.abs() < P_EXPONENT_LIMIT, row_max - LAGGED_EXPONENT, 0.0)
    rise = top - reference
    # a row that saw nothing, or a NaN, fits any
    fits = (rise >= LAGGED_LOWEST) & (rise <= LAGGED_HIGHEST) | ~(top > -torch.inf)
    fits = torch.nn.functional.pad(fits, (0, -len(fits) % block_q), value=True).unflatten(0, (-1, block_q)).all(1)
    counts[COUNT_TRIED] += len(fits)
    counts[COUNT_REDONE] += (~fits).sum().int()
    fits = fits.repeat_interleave(block_q)[: len(top), None] & (top > -torch.inf)[:, None]
    return torch.where(fits, reference[:, None], running)


def _first_max(s, reference):
    """A reference [R, 1] off by a power of two from the largest of s [R, K], and less than a factor of 2 below the
    largest score: P is rounded alike, since rounding does not see powers of two, and its range can't end."""
    above = reference - s.amax(-1, keepdim=True)
    return torch.where(above.isfinite(), reference - above.frac(), reference)


def _softmax_values(s, v, shift, masking: Masking, h: int, reference, round_p):
    """softmax(s) · v of one head's rows, and the natural log of the sum, fp32.

    reference [R, 1]: what the exponents are taken against, -inf in a row that sees nothing. round_p: of P, or None.
    """
    shift = torch.zeros_like(shift) if masking.softcap else shift  # the capped scores are the true ones
    sink = None if masking.sinks is None else (masking.sinks[h] - shift) * LOG2_E
    safe = torch.where(reference == -torch.inf, 0.0, reference)  # a row that sees nothing
    p = torch.exp2(s - safe)
    total = p.sum(-1, keepdim=True)
    # before the sink joins, which may lie far above: as in the kernels, it only rescales the sums
    o = (p if round_p is None else round_p(p)) @ v
    if sink is not None:
        new = reference.maximum(sink)
        safe = torch.where(new == -torch.inf, 0.0, new)
        rescale = torch.exp2(reference - safe)
        o, total, reference = o * rescale, total * rescale + torch.exp2(sink - safe), new
    return torch.where(total == 0, 0.0, o / total), (reference + torch.log2(total)) / LOG2_E + shift


def _known(state: HeadState, batch: int, seq_q: int, seq_kv: int, kv_heads: int, rotation: str) -> torch.Tensor:
    """Heads bool [H_kv] whose plan is for this shape."""
    rows = slice(int(state.row), int(state.row) + kv_heads)
    key, counts = shape_key(batch, seq_q, seq_kv, rotation), state.counts[rows]
    fits = (counts[:, COUNT_PLAN_KEY_A] == key) | (counts[:, COUNT_PLAN_KEY_B] == key)
    return fits & (state.plan_scale[rows] > 0)


def _plan_fits(qf, kf, counts, state: HeadState) -> torch.Tensor:
    """Heads bool [B, H_kv] that the plan's center and balance serve, as far as a sample of this call tells.

    Of Q and K in codes of range A_q, A_k with channel ranges x_d, y_d, the scores' error is about
    A_k²·Σx² + A_q²·Σy². The best center and balance leave 2·max(xy)·Σxy of that, y from the middle of K's range.
    What is not finite in the sample takes no part.
    """
    head_dim, kv_heads = kf.shape[3], kf.shape[1]
    rows = slice(int(state.row), int(state.row) + kv_heads)
    plan = state.plan[None, rows, :, :head_dim]
    center, k_weight, q_weight = (plan[:, :, i] for i in (PLAN_CENTER, PLAN_K_WEIGHT, PLAN_Q_WEIGHT))
    extent = torch.tensor([kf.shape[2]], device=kf.device)
    counted = torch.ones_like(kf[:1, :1, :, 0], dtype=torch.bool) if counts is None else counts
    counted = counted.expand(kf.shape[0], kv_heads, -1)
    if counts is not None:
        extent = (counted * torch.arange(1, kf.shape[2] + 1, device=kf.device)).amax(2, keepdim=True)
    tokens = fit_tokens(extent).expand(kf.shape[0], kv_heads, -1)
    k = kf.gather(2, tokens[..., None].expand(-1, -1, -1, head_dim))
    counted = counted.gather(2, tokens)[..., None]
    seen = counted & k.isfinite()
    heads = torch.arange(FIT_SAMPLES, device=qf.device) * (qf.shape[1] // kv_heads) // FIT_SAMPLES
    q = qf.unflatten(1, (kv_heads, -1))[:, :, heads, fit_tokens(torch.tensor([qf.shape[2]], device=qf.device))]
    q = torch.where(q.isfinite(), q.abs(), 0.0) * q_weight[:, :, None]
    q = q / q.sum(-1, keepdim=True).clamp_min(AMAX_FLOOR)  # rows have scales of their own
    q_size = (q * q).sum(2)
    high, low = (k.masked_fill(~seen, -torch.inf).amax(2), k.masked_fill(~seen, torch.inf).amin(2))
    off = torch.where(high >= low, (high * 0.5 + low * 0.5 - center) * k_weight, 0.0)
    k = torch.where(seen, (k - center[:, :, None]) * k_weight[:, :, None], 0.0)
    k_size = k.square().sum(2)
    best = (k_size + off * (off * counted.sum(2) - k.sum(2) * 2)).clamp_min(0.0)  # squares about the middle
    best = (best * q_size).sqrt()
    k_top, q_top, best_top = (x.amax(-1, keepdim=True) for x in (k_size, q_size, best))
    excess = q_size * k_top + k_size * q_top - best * (best_top * (2 * FIT_LIMIT))
    return ~(excess.sum(-1) > 0)


def _planned(state: HeadState, served, center, k_weight, q_weight):
    """Scale, center and weights [B, H_kv, 1, D or 1] of a call: planned where `served` bool [B, H_kv], else as given.

    The scale is 0 for the others.
    """
    rows = slice(int(state.row), int(state.row) + served.shape[1])
    on = served[..., None, None]
    plan = state.plan[None, rows, :, None, : center.shape[3]]
    fields = ((PLAN_CENTER, center), (PLAN_K_WEIGHT, k_weight), (PLAN_Q_WEIGHT, q_weight))
    scale = torch.where(on, state.plan_scale[None, rows, None, None], 0.0)
    return scale, *(torch.where(on, plan[:, :, field], given) for field, given in fields)


def _record_values(state: HeadState, vf, counts, clipped) -> None:
    """This step's statistics of V [B, H, S, D], in place."""
    rows = slice(int(state.row), int(state.row) + vf.shape[1])
    stats = state.stats[rows, STAT_V_AMAX, : vf.shape[3]]
    size = torch.where(torch.isfinite(vf), vf.abs(), 0.0)
    if counts is not None:
        size = torch.where(counts[..., None], size, 0.0)
    stats.copy_(torch.maximum(stats, size.amax((0, 2))))
    state.counts[rows, COUNT_CLIPPED] += clipped.sum((0, 2, 3)).int()


def _record(state: HeadState, qf, kf, x_k, planned, misfits, kept, rotation: str, block_k: int) -> None:
    """This step's true statistics, in place: what the plan of the next step is made of.

    misfits: heads bool [B, H_kv] that had a plan which did not fit.
    """
    batch, _, seq_q, head_dim = qf.shape
    kv_heads, seq_kv = kf.shape[1], kf.shape[2]
    rows = slice(int(state.row), int(state.row) + kv_heads)
    stats, counts = state.stats[rows, :, :head_dim], state.counts[rows]
    q_amax = qf.unflatten(1, (kv_heads, -1)).abs().amax((0, 2, 3))
    kept = torch.ones_like(kf[..., 0], dtype=torch.bool) if kept is None else kept.expand(batch, kv_heads, -1)
    stats[:, STAT_Q_AMAX] = torch.maximum(stats[:, STAT_Q_AMAX], q_amax)
    stats[:, STAT_K_MAX] = torch.maximum(
        stats[:, STAT_K_MAX], kf.masked_fill(~kept[..., None], -torch.inf).amax((0, 2))
    )
    stats[:, STAT_K_MIN] = torch.minimum(
        stats[:, STAT_K_MIN], kf.masked_fill(~kept[..., None], torch.inf).amin((0, 2))
    )
    counts[:, COUNT_CALLS] += 1
    counts[:, COUNT_DYNAMIC] += (planned[0, :, 0, 0] == 0).int()
    counts[:, COUNT_OUTSIDE] += ((x_k.abs() > INT8_MAX) & (planned > 0)).sum((0, 2, 3)).int()
    keys = torch.nn.functional.pad(kept, (0, -seq_kv % block_k)).unflatten(2, (-1, block_k)).sum(3)  # of each tile
    reach = torch.nn.functional.pad(x_k.abs().amax(3), (0, -seq_kv % block_k)).unflatten(2, (-1, block_k)).amax(3)
    below = (planned[..., 0] > 0) & (reach < SHRINK_LIMIT * INT8_MAX)
    for field, number in (
        (COUNT_KEYS, keys.sum((0, 2))),
        (COUNT_BELOW, (keys * below).sum((0, 2))),
        (COUNT_MISFIT, (keys.sum(2) * misfits).sum(0)),
    ):
        counts[:, field] += number.int() * padded_head_dim(head_dim)
    key = shape_key(batch, seq_q, seq_kv, rotation)
    counts[:, COUNT_KEY_MAX].clamp_(min=key)
    counts[:, COUNT_KEY_MIN].clamp_(max=key)
