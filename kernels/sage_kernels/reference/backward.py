"""Reference of the gradients of attention, by their formula in fp32.

The oracle for PyTorch's own backward kernels, and the fallback where there is none.
With P = exp(scale · Q Kᵀ + mask - lse), δ = rowsum(dO ∘ O) and dS = P ∘ (dO Vᵀ - δ):
dV = Pᵀ dO, dQ = scale · dS K, dK = scale · dSᵀ Q. Source: FlashAttention-2 (arXiv:2307.08691), section 2.3.2.
"""

from __future__ import annotations

import torch


_SCORES = 2**24  # elements of one score matrix held at a time


def ref_attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    attn_mask: torch.Tensor | None = None,
    causal: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from a forward's output and log-sum-exp, a few rows at a time.

    Args:
        grad_out, q, out: [B, S_q, H, D]. k, v: [B, S_kv, H_kv, D]. lse: fp32 [B, S_q, H], natural log.
        attn_mask: bool or floating point, broadcastable to [B, H, S_q, S_kv]. causal: "", "top_left", "bottom_right".
    Returns: dq, dk, dv of the shapes and dtypes of q, k and v. A row that sees nothing has gradients of 0.
    """
    batch, seq_q, heads, _ = q.shape
    seq_kv, kv_heads = k.shape[1], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    qf, gf, of = (x.to(wide).transpose(1, 2) for x in (q, grad_out, out))
    kf, vf = (x.to(wide).transpose(1, 2).repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    delta = (gf * of).sum(-1, keepdim=True)
    # a row that sees nothing has scores of -inf: less +inf instead of its sum they stay -inf, and P is 0
    sums = lse.to(wide).transpose(1, 2).unsqueeze(-1)
    sums = torch.where(sums == -torch.inf, torch.inf, sums)
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, seq_q, seq_kv)
    dq, dk, dv = torch.empty_like(qf), torch.zeros_like(kf), torch.zeros_like(vf)
    rows = max(1, _SCORES // max(1, batch * heads * seq_kv))
    keys = torch.arange(seq_kv, device=q.device)
    for start in range(0, seq_q, rows):
        part = slice(start, start + rows)
        scores = qf[:, :, part] @ kf.mT * scale
        if mask is not None:
            seen = mask[:, :, part]
            scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen
        if causal:
            last = torch.arange(seq_q, device=q.device)[part] + (seq_kv - seq_q if causal == "bottom_right" else 0)
            scores = scores.masked_fill(keys > last[:, None], -torch.inf)
        p = torch.exp(scores - sums[:, :, part])
        ds = p * (gf[:, :, part] @ vf.mT - delta[:, :, part]) * scale
        dq[:, :, part] = ds @ kf
        dk += ds.mT @ qf[:, :, part]
        dv += p.mT @ gf[:, :, part]
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return tuple(x.transpose(1, 2).to(like.dtype).contiguous() for x, like in ((dq, q), (dk, k), (dv, v)))  # type: ignore[return-value]
