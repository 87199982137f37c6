"""Reference of `qk_norm_rope`, RMSNorm and rotary embedding of heads, in plain PyTorch."""

from __future__ import annotations

import torch


def ref_qk_norm_rope(q, k, q_weight, k_weight, norm, eps, cos, sin, pairs, across_heads):
    """Compute `sage_kernels.qk_norm_rope` in fp32, with one rounding at the end."""
    results = []
    for parts, weights in ((q, q_weight), (k, k_weight)):
        done, first = [], 0
        for i, (x, weight) in enumerate(zip(parts, weights, strict=True)):
            y = x.float()
            if norm:
                y = y * torch.rsqrt(y.square().mean((-2, -1) if across_heads else -1, keepdim=True) + eps)
            if weight is not None:
                y = y * (weight.reshape(x.shape[2:]) if across_heads else weight).float()
            if cos and cos[i if len(cos) > 1 else 0] is not None:
                tokens = slice(0, x.shape[1]) if len(cos) > 1 else slice(first, first + x.shape[1])
                c, s = (table[i if len(cos) > 1 else 0][tokens].float() for table in (cos, sin))
                y = _rotated(y, c, s, pairs)
            done.append(y.to(x.dtype))
            first += x.shape[1]
        results.append(torch.cat(done, 1))
    return tuple(results)


def _rotated(y, cos, sin, pairs):
    """Rotate y fp32 [B, S, H, D] by its tokens' angles [S, D], or [S, D / 2] for one angle a pair."""
    if cos.shape[-1] != y.shape[-1]:
        cos, sin = (x.repeat_interleave(2, -1) if pairs else torch.cat([x, x], -1) for x in (cos, sin))
    if pairs:
        a, b = y.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-b, a], -1).flatten(-2)
    else:
        a, b = y.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
    return y * cos[:, None] + turned * sin[:, None]
