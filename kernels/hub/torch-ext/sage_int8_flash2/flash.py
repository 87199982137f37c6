"""INT8 attention with FlashAttention's interface: the functions that libraries look for in a kernel."""

from __future__ import annotations

from typing import Any

import torch

from .sage_kernels.facts.recipe import DEFAULT_RECIPE
from .sage_kernels.ops.attention import sage_attention
from .sage_kernels.ops.varlen import sage_attention_varlen


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = True,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    recipe: str = DEFAULT_RECIPE,
    scaling: str = "per_token",
) -> Any:
    """Run softmax attention of packed sequences with scores in INT8. For inference only.

    Args:
        q: [total_q, H, D].
        k, v: [total_k, H_kv, D].
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], 0 and the ends of the sequences, on q's device.
        max_seqlen_q, max_seqlen_k: ignored.
        dropout_p: must be 0.
        softmax_scale: None is D ** -0.5.
        causal: the last row of a sequence sees all keys of the sequence, and each row before it one key less.
        window_size: number of keys before and after a row's own position that it sees; -1 is all. Without causal and
            with a right side other than 0, both sides must be equal.
        softcap: bound of the scores; 0 is none.
        alibi_slopes: must be None.
        deterministic: ignored, as every call is deterministic.
        return_attn_probs: return the log-sum-exp too.
        s_aux: [H], logits of attention sinks.
        recipe, scaling: as in `sage_attention_varlen`.
    Returns: [total_q, H, D]. With return_attn_probs also the log-sum-exp, fp32 [H, total_q], and None in place of the
        probabilities, which are never computed.
    Raises: NotImplementedError for dropout, ALiBi, a gradient, or a window with unequal sides. Others as
        `sage_attention_varlen`.
    """
    _refuse(dropout_p, alibi_slopes)
    causal, window = _band(causal, window_size)
    result = sage_attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, softcap=softcap, sinks=s_aux,
        recipe=recipe, scaling=scaling, scale=softmax_scale, return_lse=return_attn_probs,
    )  # fmt: skip
    return (result[0], result[1].transpose(0, 1).contiguous(), None) if return_attn_probs else result


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = True,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
    recipe: str = DEFAULT_RECIPE,
    scaling: str = "per_token",
) -> Any:
    """Run softmax attention of a batch with scores in INT8. For inference only.

    Args: q [B, S_q, H, D]; k and v [B, S_kv, H_kv, D]; all others as in `flash_attn_varlen_func`.
    Returns: [B, S_q, H, D]. With return_attn_probs also the log-sum-exp, fp32 [B, H, S_q], and None.
    """
    _refuse(dropout_p, alibi_slopes)
    causal, window = _band(causal, window_size)
    options = {"causal": "bottom_right" if causal else False, "window": window, "softcap": softcap, "sinks": s_aux}
    options |= {"recipe": recipe, "scaling": scaling, "scale": softmax_scale, "return_lse": return_attn_probs}
    result = sage_attention(q, k, v, **options)
    return (result[0], result[1].transpose(1, 2).contiguous(), None) if return_attn_probs else result


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write one new token of each sequence into a paged 16-bit cache, and attend from it to its sequence.

    Copies the pages of all sequences at every call. Reads no value on the host, so CUDA graphs can hold it.

    Args:
        q: [B, 1, H, D].
        k_cache, v_cache: [pages, page size, H_kv, D], written.
        k, v: [B, 1, H_kv, D], the new tokens.
        cache_seqlens: int32 [B], tokens before the new one. Negative for padding behind the others; its rows are 0.
        block_table: int32 [B, M], the pages of each sequence in order.
        softmax_scale, causal, window_size, softcap, s_aux: as in `flash_attn_varlen_func`.
    Returns: [B, 1, H, D].
    """
    if k.shape[1] != 1 or q.shape[1] != 1:
        raise NotImplementedError(f"q, k: got {q.shape[1]} and {k.shape[1]} tokens a sequence, expected 1")
    size, table, last = k_cache.shape[1], block_table.long().clamp_min(0), cache_seqlens.long()
    # a padding sequence does again what the first one does, so that no two write different values in one place
    row = torch.where(last >= 0, torch.arange(len(last), device=q.device), 0)
    written = last[row].clamp_min(0)
    page, place = table[row].gather(1, written[:, None] // size)[:, 0], written % size
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[page, place] = torch.where((last[row] >= 0)[:, None, None], new[row, 0], cache[page, place])
    keys = torch.arange(table.shape[1] * size, device=q.device)
    seen = keys <= last[:, None]
    seen = seen if window_size[0] < 0 else seen & (keys >= last[:, None] - window_size[0])
    keys_of, values_of = (cache[table].flatten(1, 2) for cache in (k_cache, v_cache))
    return sage_attention(
        q, keys_of, values_of, attn_mask=seen[:, None, None], scale=softmax_scale, softcap=softcap, sinks=s_aux,
        scaling="per_token",
    )  # fmt: skip


def _refuse(dropout_p: float, alibi_slopes: Any) -> None:
    if dropout_p:
        raise NotImplementedError(f"dropout_p: got {dropout_p}, expected 0, as there is no dropout; call model.eval()")
    if alibi_slopes is not None:
        raise NotImplementedError("alibi_slopes: got a tensor, expected None, as there is no position bias")


def _band(causal: bool, window_size: tuple[int, int]) -> tuple[bool, int | None]:
    """Return causal and window for `sage_attention`. Its window includes a row's own key."""
    left, right = window_size
    if causal or right == 0:
        return True, None if left < 0 else left + 1
    if left < 0 and right < 0:
        return False, None
    if left != right:
        raise NotImplementedError(
            f"window_size: got {tuple(window_size)} without causal, expected equal sides or a right side of 0"
        )
    return False, left + 1
