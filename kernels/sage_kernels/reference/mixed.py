"""Reference of mixed attention in plain PyTorch: choice of blocks, two precisions, one softmax.

Inputs [B, S, H, D]; blocks of BLOCK query rows by BLOCK keys. Maths: docs/recipes.md.
"""

from __future__ import annotations

import torch

from ..facts.base_formats import base_codes, round_to_e2m1
from ..facts.block_budget import chosen_a_row, own_blocks, visible_blocks
from ..facts.numerics import LOG2_E, divide, pv_dtype, sampled_balance, sampled_center
from ..facts.recipe import BLOCK, Mixed
from .attention import rows_at_a_time


_DEFAULT = Mixed()


def ref_mixed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    options: Mixed = _DEFAULT,
    causal: bool = False,
    offset: int = 0,
    scale: float | None = None,
    round_p: bool = True,
    chosen: torch.Tensor | None = None,
    pv: str = "16bit",
    smooth_k: bool = True,
    block_q: int = BLOCK,
    half: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention whose chosen blocks run in 16 bit or are left out.

    Arguments as of `mixed_attention`, unchecked.

    Args:
        causal, offset: row i sees keys up to i + offset.
        round_p: False keeps P, and V as it is given, in fp32: the rounding floor of the test tolerances.
        chosen: bool [B, H, row blocks, key blocks] in place of the selector's choice.
        pv: "fp4": P·V of blocks that are not promoted runs in NVFP4 or MXFP4 as in ThriftAttention: groups of V along
            the keys, P times 6 in e2m1 against the row's largest score, a sum of unrounded P. No kernel has it.
        smooth_k: False: neither centre nor balance, as in ThriftAttention.
        block_q: query rows of a block.
        half: dtype of promoted Q and K, of P and V; None: pv_dtype of q's.
    Returns: out [B, S_q, H, D] in q.dtype, lse [B, S_q, H] fp32, and `chosen`.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // kv_heads
    qf, kf = (x.detach().transpose(1, 2).float() for x in (q, k))
    half = half or pv_dtype(q.dtype)
    vf = v.detach().transpose(1, 2).to(half if round_p else torch.float32).float()
    center = sampled_center(kf) if smooth_k else torch.zeros_like(kf[:, :, :1])
    balance = sampled_balance(qf, kf, center) if smooth_k else torch.ones_like(kf[:, :, :1])
    q_codes, q_scale = base_codes(qf * divide(1.0, balance).repeat_interleave(group, 1), options.base)
    k_codes, k_scale = base_codes((kf - center) * balance, options.base)
    if chosen is None:
        scores = ref_block_scores(qf, kf - center, options.selector, causal, offset, block_q)
        chosen = ref_select(scores, options, seq_q, seq_kv, causal, offset, block_q)
    v_codes = _values_in_fp4(vf, options.base) if pv == "fp4" else vf
    row_scale = q_scale * (scale * LOG2_E)
    out = torch.empty(batch, seq_q, heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, seq_q, heads, dtype=torch.float32, device=q.device)
    step = max(1, rows_at_a_time(q.device, seq_kv) // block_q) * block_q  # of whole blocks
    keys = torch.arange(seq_kv, device=q.device)
    for b in range(batch):
        for h in range(heads):
            kv = h // group
            for start in range(0, seq_q, step):
                part = slice(start, min(start + step, seq_q))
                rows = torch.arange(part.start, part.stop, device=q.device)
                acted_on = chosen[b, h, rows // block_q][:, keys // BLOCK]
                shift = qf[b, h, part] @ center[b, kv].T * (scale * LOG2_E)
                s = (q_codes[b, h, part] @ k_codes[b, kv].T) * (row_scale[b, h, part] * k_scale[b, kv].T)
                if options.action == "promote":
                    exact = qf[b, h, part].to(half).float() @ kf[b, kv].to(half).float().T
                    s = torch.where(acted_on, exact * (scale * LOG2_E) - shift, s)
                else:
                    s = s.masked_fill(acted_on, -torch.inf)
                if causal:
                    s = s.masked_fill(keys[None] > rows[:, None] + offset, -torch.inf)
                top = s.amax(-1, keepdim=True)
                p = torch.exp2(s - torch.where(top == -torch.inf, 0.0, top))
                total = p.sum(-1, keepdim=True)
                if pv == "fp4":
                    few = round_to_e2m1(p * 6) / 6
                    o = torch.where(acted_on, p, 0.0) @ vf[b, kv] + torch.where(acted_on, 0.0, few) @ v_codes[b, kv]
                else:
                    o = (p.to(half).float() if round_p else p) @ vf[b, kv]
                out[b, part, h] = torch.where(total == 0, 0.0, o / total).to(q.dtype)
                lse[b, part, h] = ((top + torch.log2(total) + shift) / LOG2_E)[:, 0]
    return out, lse, chosen


def _values_in_fp4(v: torch.Tensor, base: str) -> torch.Tensor:
    """Round V [B, H, S, D] to FP4 in groups along the keys."""
    if base not in ("mxfp4", "nvfp4"):
        raise ValueError(f'pv: got "fp4" with base {base!r}, expected "mxfp4" or "nvfp4"')
    codes, scale = base_codes(v.mT, base)
    return (codes * scale).mT


def _by_block(x: torch.Tensor, fill: float, size: int = BLOCK) -> torch.Tensor:
    """Split [B, H, S, D] into blocks, [B, H, blocks, size, D], with `fill` beyond the end."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % size), value=fill).unflatten(2, (-1, size))


def _block_means(x: torch.Tensor, size: int = BLOCK) -> torch.Tensor:
    """Mean of each block of tokens, [B, H, blocks, D]."""
    blocks = _by_block(x, 0.0, size)
    number = torch.full((blocks.shape[2], 1), float(size), dtype=torch.float32, device=x.device)
    number[-1] = x.shape[2] - (blocks.shape[2] - 1) * size
    return blocks.sum(3) / number


def ref_block_scores(
    q: torch.Tensor, k: torch.Tensor, selector: str, causal: bool, offset: int, block_q: int = BLOCK
) -> torch.Tensor:
    """Score the importance of each key block to each block of query rows.

    q [B, H, S_q, D], k [B, H_kv, S_kv, D], fp32. Subtracting one vector from all keys changes no rank.
    Returns: fp32 [B, H, row blocks, key blocks].
    """
    group = q.shape[1] // k.shape[1]
    means = _block_means(q, block_q)
    if selector == "block_mean":
        return means @ _block_means(k).repeat_interleave(group, 1).mT
    if selector == "quest":
        high = _by_block(k, -torch.inf).amax(3).repeat_interleave(group, 1)
        low = _by_block(k, torch.inf).amin(3).repeat_interleave(group, 1)
        return means.clamp_min(0) @ high.mT + means.clamp_max(0) @ low.mT
    row_blocks, key_blocks = -(-q.shape[2] // block_q), -(-k.shape[2] // BLOCK)
    rows, keys = torch.arange(row_blocks, device=q.device), torch.arange(key_blocks, device=q.device)
    near = rows * key_blocks // row_blocks
    if causal:
        near = torch.tensor(
            [visible_blocks(i, q.shape[2], k.shape[2], True, offset, block_q) - 1 for i in range(row_blocks)],
            dtype=torch.int64,
            device=q.device,
        )
    scores = -(keys[None] - near[:, None]).abs().float()
    return scores.expand(q.shape[0], q.shape[1], -1, -1)


def ref_select(
    scores: torch.Tensor, options: Mixed, seq_q: int, seq_kv: int, causal: bool, offset: int, block_q: int = BLOCK
) -> torch.Tensor:
    """Choose the blocks to promote or leave out: bool like scores [B, H, row blocks, key blocks].

    Of equal scores, the first.
    """
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    ranked = scores if options.action == "promote" else -scores
    for row in range(scores.shape[2]):
        seen = visible_blocks(row, seq_q, seq_kv, causal, offset, block_q)
        number = chosen_a_row(row, seq_q, seq_kv, causal, offset, options, block_q)
        if options.action == "skip" and causal:
            seen -= own_blocks(row, seq_q, seq_kv, causal, offset, block_q)
        if number:
            best = ranked[:, :, row, :seen].sort(dim=-1, descending=True, stable=True).indices[..., :number]
            chosen[:, :, row].scatter_(-1, best, True)
    return chosen
