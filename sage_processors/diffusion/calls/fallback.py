"""Attention without quantisation, for calls that INT8 attention can't run."""

from __future__ import annotations

from typing import Any

import torch

from ...torch_modes import autocast
from ..host import dispatcher


_SCORES = 2**26  # scores computed at a time: 256 MiB in fp32


def attention_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, is_causal: bool,
    scale: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute softmax attention and its log-sum-exp in fp32, in fp64 for fp64 inputs. Slow.

    Neither PyTorch's attention nor diffusers' native back end returns the log-sum-exp. Rows are computed in chunks, to
    bound memory.
    Args: those of scaled_dot_product_attention, with another layout: query [B, S_q, H, D], key [B, S_kv, H_kv, D],
        value [B, S_kv, H_kv, D_v].
    Returns: out [B, S_q, H, D_v] in query's dtype, lse [B, S_q, H], natural log. A fully masked row has 0 and -inf.
    """
    batch, seq_q, heads, head_dim = query.shape
    seq_kv, groups = key.shape[1], heads // key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    k, v = (x.to(wide).transpose(1, 2).repeat_interleave(groups, 1) for x in (key, value))
    q = query.to(wide).transpose(1, 2) * (head_dim**-0.5 if scale is None else scale)
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, seq_q, seq_kv)
    if is_causal:
        mask = torch.ones(seq_q, seq_kv, dtype=torch.bool, device=q.device).tril().expand(batch, heads, -1, -1)
    rows = max(1, _SCORES // max(1, batch * heads * seq_kv))
    outs, lses = [], []
    for start in range(0, seq_q, rows):
        scores = q[:, :, start : start + rows] @ k.transpose(2, 3)
        if mask is not None:
            part = mask[:, :, start : start + rows]
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(lse.unsqueeze(-1) == -torch.inf, 0.0)
        outs.append(weights @ v)
        lses.append(lse)
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    return out.transpose(1, 2).to(query.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def fallback_attention(call: tuple[Any, ...], return_lse: bool) -> Any:
    """Run a call by diffusers' native back end, or with return_lse by `attention_with_lse`.

    Args: call: (query, key, value [B, S, H, D], attn_mask, dropout_p, is_causal, scale, enable_gqa).
    Returns: out, or (out, lse).
    Raises: NotImplementedError for return_lse with dropout, with a mask that is no tensor, or with mask and causality.
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    if return_lse:
        if dropout_p or (attn_mask is not None and (is_causal or not isinstance(attn_mask, torch.Tensor))):
            raise NotImplementedError(
                f"return_lse: got it with dropout_p={dropout_p}, is_causal={is_causal} and a mask of type "
                f"{type(attn_mask).__name__}, expected no dropout, and a tensor as mask or causality, not both"
            )
        q, k, v = autocast(query, key, value)
        return attention_with_lse(q, k, v, attn_mask, is_causal, scale)
    return dispatcher.native()(
        query=query, key=key, value=value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip
