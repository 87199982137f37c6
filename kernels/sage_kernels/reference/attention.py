"""Reference of INT8 attention in plain PyTorch: rounds where the kernels round.

Integer products are formed in fp32, which is exact here: |Σ q·k| <= D·127² < 2^24 for D <= 1040.
Layouts: inputs [B, S, H, D]; intermediate codes [B, H, S, D]. Maths: kernels/README.md.
"""

from __future__ import annotations

import torch

from ..facts import recipe as formats
from ..facts import state as fields
from ..facts.masking import FAINT, NO_MASKING, Masking, key_reach, log2_bias, visible
from ..facts.numerics import (
    LOG2_E,
    divide,
    pv_dtype,
    quantize_centered_values,
    quantize_tensor_values,
    quantize_values,
    round_to_e4m3,
    sampled_balance,
    sampled_center,
)
from ..facts.recipe import DEFAULT_RECIPE, RECIPES
from ..facts.skipping import SkipState
from ..facts.state import HeadState, keeps_row_max, reads_row_max
from .plan import known_heads, plan_fits, planned_vectors, record_step, record_values
from .quantize import ref_pre_balance, ref_quantize, ref_rotate
from .skipping import ref_compensate, ref_pool, ref_skip_tiles


# fp32 scores held at a time: few enough for a CPU's cache, many enough for few launches on a GPU
_SCORES_HELD = {"cpu": 1 << 19, "cuda": 1 << 25}


def rows_at_a_time(device: torch.device, keys: int) -> int:
    """Return how many query rows of scores with this many keys are held at a time, at least 1."""
    return max(1, _SCORES_HELD.get(device.type, _SCORES_HELD["cuda"]) // max(1, keys))


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
    skip: SkipState | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 attention as the kernels compute it. Arguments as of `sage_attention`, unchecked.

    Args:
        block_q, block_k: tokens per scale where the granularity is a block (the kernels' own tile sizes on a GPU).
        round_p: False keeps P, and V as it is given (in 8 bit: V as it is rounded), in fp32: the difference is the
            rounding floor of the test tolerances.
        first_max: use the largest score of the first block_k keys as the softmax reference, as some kernels do. The
            largest P is then no power of two, and rounding moves it. With P in INT8, whose tiles have a reference
            each, it stands for the same kernel's other trait: the sum is of the rounded P.
        rotated_dtype: dtype that rotated Q and K are rounded to; None: q's. Scales and codes are made of the rounded
            values, so the reference with round_p=False, of fp32 inputs, has to round them too.
        skip: lists of key tiles that need not be visited, for tiles of skip.block_q and skip.block_k.
        return_lse: False lets a rotated call subtract a centre from K that the LSE would need.
    Returns: out [B, S_q, H, D] in q.dtype, lse [B, S_q, H] fp32, natural log.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    if skip is not None:
        block_q, block_k = skip.block_q, skip.block_k
    counts = seen = None
    reach = key_reach(masking, batch, heads, kv_heads, seq_q)
    if reach is not None:  # keys that no row sees may hold anything
        counts, seen = reach > FAINT, reach > -torch.inf
    q_in, k_in = q.detach(), k.detach()
    if rotation == "hadamard":
        if smooth_k and state is None:  # a plan is of channels that were rotated only
            centered = masking.may_be_centered and not return_lse
            q_in, k_in = ref_pre_balance(q_in, k_in, counts, centered, rotated_dtype)
        q_in, k_in = (ref_rotate(x, rotated_dtype or q.dtype) for x in (q_in, k_in))
    qf, kf = q_in.transpose(1, 2).float(), k_in.transpose(1, 2).float()
    own = RECIPES[recipe]
    is_fp8, is_int8, is_16_bit = own.pv == "fp8_e4m3", own.pv.startswith("int8"), own.pv == "16bit"
    vf = v.detach().transpose(1, 2).to(pv_dtype(q.dtype) if round_p and is_16_bit else torch.float32).float()
    if seen is not None:
        vf = torch.where(seen[..., None], vf, 0.0)
    group_q = {"per_block": block_q, "per_token": 1, "per_head": None}[scaling]
    group_k = {"per_block": block_k, "per_token": 1, "per_head": None}[scaling]
    planned = None
    center = sampled_center(kf, counts) if smooth_k else torch.zeros_like(kf[:, :, :1])
    if smooth_k or state is not None:
        balance = sampled_balance(qf, kf, center, counts)
    else:  # without a centre no later key changes a bit of a causal call
        balance = torch.ones_like(kf[:, :, :1])
    k_weight, q_weight = balance, divide(1.0, balance)
    if state is not None:
        group_q, group_k = 1, block_k
        known = known_heads(state, batch, seq_q, seq_kv, kv_heads, rotation)
        fits = plan_fits(qf, kf, counts, state)
        planned, center, k_weight, q_weight = planned_vectors(state, known & fits, center, k_weight, q_weight)
    x_q, x_k = qf * q_weight.repeat_interleave(heads // kv_heads, 1), (kf - center) * k_weight
    if counts is not None:
        x_k = torch.where(counts[..., None], x_k, 0.0)
    v_scale = v_center = None
    means_of = vf
    if is_int8:
        quantize = quantize_centered_values if own.pv == "int8" else quantize_tensor_values
        vf, v_scale, v_center = quantize(vf, seen, counts)
    if is_fp8:
        planned_v = None
        if state is not None:
            rows = slice(int(state.row), int(state.row) + kv_heads)
            planned_v = torch.where(known[:, None], state.plan[rows, fields.PLAN_V_SCALE, :head_dim], 0.0)
        values, v_scale, clipped = quantize_values(vf, seen, counts, planned_v)
        if state is not None:
            record_values(state, vf, counts, clipped)
        vf = values
    if state is not None:
        record_step(state, qf, kf, x_k, planned, known & ~fits, counts, rotation, block_k)
    q_int, q_scale = ref_quantize(x_q, group_q, qk=own.qk)
    k_int, k_scale = ref_quantize(x_k, group_k, planned, own.qk)
    row_scale = q_scale * (scale * LOG2_E)
    skipped = None if skip is None else ref_skip_tiles(q_int, row_scale, k_int, k_scale, skip)

    out = torch.empty(batch, seq_q, heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, seq_q, heads, dtype=torch.float32, device=q.device)
    repeat = heads // kv_heads
    in_16_bit = pv_dtype(q.dtype) if round_p else None
    step = rows_at_a_time(q.device, seq_kv)
    lagged, keeps_max = (own.keeps_rows and f(state, masking) for f in (reads_row_max, keeps_row_max))
    if lagged:  # decided for whole tiles of query rows
        step = max(1, step // block_q) * block_q
    for b in range(batch):
        for h in range(heads):
            kv = h // repeat
            pooled = None
            if skip is not None and skip.compensates:
                pooled = ref_pool(k_int[b, kv], k_scale[b, kv], means_of[b, kv], block_k, in_16_bit)
            for start in range(0, seq_q, step):
                places = torch.arange(start, min(start + step, seq_q), device=q.device)
                part = slice(start, start + step)
                s = (q_int[b, h, part] @ k_int[b, kv].T) * (row_scale[b, h, part] * k_scale[b, kv].T)
                # the centre lowered every score of the row by q·c: soft cap, sink and LSE need it added back
                shift = (qf[b, h, part] @ center[b, kv].T) * scale
                s = _masked_scores(s, shift, masking, b, h, places)
                if skipped is not None:
                    left_out = skipped[b, h, places // block_q].repeat_interleave(block_k, 1)[:, :seq_kv]
                    s = s.masked_fill(left_out, -torch.inf)
                round_ = None
                if round_p and not is_int8:
                    round_ = round_to_e4m3 if is_fp8 else lambda p: p.to(pv_dtype(q.dtype)).float()
                reference = _reference(s, formats.P_EXPONENT if is_fp8 else 0.0)
                if first_max:
                    reference = _first_max(s[:, :block_k], reference)
                if keeps_max and state is not None:
                    top = s.amax(-1)
                    kept = (state.row_max if lagged else state.row_max_next)[b, h, part]
                    kept_shift = (qf[b, h, part] @ _to_midrange(center[b, kv, 0], state, kv)) * (scale * LOG2_E)
                    if lagged:
                        counts_of_head = state.counts[int(state.row) + kv]
                        reference = _lagged(top, kept - kept_shift, reference, block_q, counts_of_head)
                    top = top + kept_shift
                    kept.copy_(torch.where(torch.isfinite(top), top, 0.0))
                if round_p and is_int8:
                    round_ = (_tile_rounding if own.pv == "int8" else _running_rounding)(s, reference, block_k)
                sums_codes = own.sums_codes or (first_max and own.pv == "int8")
                o, log_sum, share = _softmax_values(
                    s, vf[b, kv], shift, masking, h, reference, round_, sums_codes
                )  # fmt: skip
                if v_center is not None and v_scale is not None:
                    o = o * v_scale[b, kv] + share * v_center[b, kv]
                    o = torch.where(log_sum == -torch.inf, 0.0, o)
                    o = o.clamp(-torch.finfo(q.dtype).max, torch.finfo(q.dtype).max)
                elif v_scale is not None:
                    # the rounding of P may push a mean of finite values beyond the largest number
                    o = (o * v_scale[b, kv]).clamp(-torch.finfo(q.dtype).max, torch.finfo(q.dtype).max)
                if pooled is not None and skipped is not None:
                    o, log_sum = ref_compensate(
                        o.to(q.dtype).float(), (log_sum - shift) * LOG2_E, q_int[b, h, part], row_scale[b, h, part],
                        pooled, skipped[b, h, places // block_q], in_16_bit,
                    )  # fmt: skip
                    log_sum = log_sum / LOG2_E + shift
                out[b, part, h] = o.to(q.dtype)
                lse[b, part, h] = log_sum[:, 0]
    return out, lse


def _masked_scores(s, shift, masking: Masking, b: int, h: int, rows) -> torch.Tensor:
    """Apply soft cap, bias, mask and band to one head's rows. s [R, S_kv], base 2; shift [R, 1], natural."""
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
    """Softmax reference (log2) [R, 1] that makes the largest P of a row 2^exponent."""
    top = s.amax(-1, keepdim=True)
    return torch.where(top.abs() < formats.P_EXPONENT_LIMIT, top - exponent, top)


def _to_midrange(center, state: HeadState, kv_head: int) -> torch.Tensor:
    """Centre of a head [D] less the midrange of each channel of its keys in this call.

    Row maxima are kept as max scores (log2) with K centred on the midrange: the centre itself is the midrange of an
    earlier call, and outliers move it from step to step, which would move every score of a row.
    """
    high, low = state.stats[int(state.row) + kv_head, (fields.STAT_K_MAX, fields.STAT_K_MIN), : len(center)]
    return center - (high * 0.5 + low * 0.5)


def _lagged(top, row_max, running, block_q: int, counts) -> torch.Tensor:
    """Softmax reference (log2) [R, 1]: the previous call's max scores, in query tiles that they fit.

    Args:
        top, row_max: [R], max score per row of this call and of the previous one. 0 takes the place of a row_max that
            is not finite.
        running: [R, 1], the reference of the other tiles.
        counts: of the head, incremented.
    """
    reference = torch.where(row_max.abs() < formats.P_EXPONENT_LIMIT, row_max - formats.LAGGED_EXPONENT, 0.0)
    rise = top - reference
    # a row that saw nothing, or a NaN, fits any
    fits = (rise >= formats.LAGGED_LOWEST) & (rise <= formats.LAGGED_HIGHEST) | ~(top > -torch.inf)
    fits = torch.nn.functional.pad(fits, (0, -len(fits) % block_q), value=True).unflatten(0, (-1, block_q)).all(1)
    counts[fields.COUNT_TRIED] += len(fits)
    counts[fields.COUNT_REDONE] += (~fits).sum().int()
    fits = fits.repeat_interleave(block_q)[: len(top), None] & (top > -torch.inf)[:, None]
    return torch.where(fits, reference[:, None], running)


def _first_max(s, reference):
    """Lower the reference [R, 1] until it is a whole number from the largest of s [R, K], in log2.

    By less than 1. P is then rounded as with the largest of s as the reference, since rounding does not see powers of
    two, and P's range can't run out.
    """
    above = reference - s.amax(-1, keepdim=True)
    return torch.where(above.isfinite(), reference - above.frac(), reference)


def _tile_rounding(s, reference, block_k: int):
    """Return a function that rounds P to 8 bits, tile by tile of block_k keys. s [R, K], base 2.

    The largest P of a row in a tile is 254.5 before rounding. reference [R, 1]: subtracted from the exponents of P.
    """
    tiles = torch.nn.functional.pad(s, (0, -s.shape[1] % block_k), value=-torch.inf).unflatten(1, (-1, block_k))
    top = tiles.amax(-1)
    own = torch.where(top.abs() < formats.P_CODE_LIMIT, top - formats.P_CODE_EXPONENT, top)
    own = own.maximum(own.cummax(1).values - formats.P_CODE_FALL)
    own = torch.where(own == -torch.inf, 0.0, own)
    j = torch.arange(block_k, device=s.device)
    halves, quarters, eighths = (bit.float() for bit in ((j ^ j // 8) % 2, j // 2 % 2, j // 4 % 2))
    step = formats.P_CODE_MAGIC + 1 / 16 + halves / 2 + quarters / 4 + eighths / 8
    codes = torch.floor(torch.exp2(tiles - own[..., None]) + step) - formats.P_CODE_MAGIC
    rounded = codes * torch.exp2(own - torch.where(reference == -torch.inf, 0.0, reference))[..., None]
    return lambda _: rounded.flatten(1)[:, : s.shape[1]]


def _running_rounding(s, reference, block_k: int):
    """Return a function that rounds P as INT-FlashAttention does, to 127 for the row's largest so far.

    So far: up to the tile of block_k keys. Arguments as of `_tile_rounding`.
    """
    tiles = torch.nn.functional.pad(s, (0, -s.shape[1] % block_k), value=-torch.inf).unflatten(1, (-1, block_k))
    own = tiles.amax(-1).cummax(1).values
    own = torch.where(own.abs() < formats.P_CODE_LIMIT, own - formats.P_SIGNED_EXPONENT, own)
    own = torch.where(own == -torch.inf, 0.0, own)
    codes = torch.round(torch.exp2(tiles - own[..., None]))
    rounded = codes * torch.exp2(own - torch.where(reference == -torch.inf, 0.0, reference))[..., None]
    return lambda _: rounded.flatten(1)[:, : s.shape[1]]


def _softmax_values(s, v, shift, masking: Masking, h: int, reference, round_p, sums_codes: bool = False):
    """Return softmax(s) · v of one head's rows, the log of the sum (natural), and the keys' share.

    All fp32. The share is that of all weights: below 1 where there is a sink.

    Args:
        reference: [R, 1], subtracted from the exponents; -inf in a row that sees nothing.
        round_p: rounds P, or None.
        sums_codes: the sum is of the rounded P.
    """
    shift = torch.zeros_like(shift) if masking.softcap else shift  # the capped scores are the true ones
    sink = None if masking.sinks is None else (masking.sinks[h] - shift) * LOG2_E
    safe = torch.where(reference == -torch.inf, 0.0, reference)  # a row that sees nothing
    p = torch.exp2(s - safe)
    rounded = p if round_p is None else round_p(p)
    total = (rounded if sums_codes else p).sum(-1, keepdim=True)
    # before the sink joins, which may lie far above: as in the kernels, the sink only rescales the sums
    o = rounded @ v
    keys = total
    if sink is not None:
        new = reference.maximum(sink)
        safe = torch.where(new == -torch.inf, 0.0, new)
        rescale = torch.exp2(reference - safe)
        keys = total * rescale
        o, total, reference = o * rescale, keys + torch.exp2(sink - safe), new
    log_sum = (reference + torch.log2(total)) / LOG2_E + shift
    return torch.where(total == 0, 0.0, o / total), log_sum, torch.where(total == 0, 0.0, keys / total)
