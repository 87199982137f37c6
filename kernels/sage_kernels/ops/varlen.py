"""The op `sage_attention_varlen`: attention of packed sequences, without padding.

A call goes the way of attention.py to the same kernels; they read from the lengths what is different.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .. import reference
from ..checks.tensors import check_called_below
from ..checks.varlen import check_lengths, check_varlen
from ..facts.masking import packed_masking
from ..facts.recipe import DEFAULT_RECIPE
from .dispatch import attention_of_nothing, call_op, fake_out, fake_out_lse, register
from .replay import is_plain_call, remember, try_replay


if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import PackedKeywords

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sinks, float scale, str scaling, "
    "bool smooth_k, bool causal, int? window, float softcap, str recipe, str rotation"
)


@overload
def sage_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, return_lse: Literal[False] = ...,
    **keywords: Unpack[PackedKeywords]
) -> torch.Tensor: ...  # fmt: skip


@overload
def sage_attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = ..., max_seqlen_k: int | None = ..., *, return_lse: bool,
    **keywords: Unpack[PackedKeywords]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def sage_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    recipe: str = DEFAULT_RECIPE,
    scaling: str = "per_token",
    scale: float | None = None,
    smooth_k: bool = True,
    rotation: str = "none",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Run `sage_attention` on each of several packed sequences of any lengths, in one call.

    Sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q and cu_seqlens_k[b] to cu_seqlens_k[b + 1] of k and
    v. Scales, centre and balance are of one sequence each: no bit of its result depends on another sequence.

    Args:
        q: [total_q, H, D] fp16, bf16 or fp32, any strides, 1 <= D <= 256.
        k, v: [total_k, H_kv, D], same dtype and device; H_kv divides H.
        cu_seqlens_q, cu_seqlens_k: [sequences + 1] int32, contiguous, on q's device: 0 and the ends of the sequences,
            ascending. A GPU's values are not checked, since the host would have to wait for them. Wrong ones give
            wrong rows but touch nothing outside of the tensors. Lengths of 0 are allowed.
        max_seqlen_q, max_seqlen_k: longest sequences, as callers of such functions have them. On a GPU they decide
            nothing, neither grid nor memory nor result; on a CPU a longer sequence is an error.
        causal: row i of a sequence sees keys up to i + S_kv - S_q of it: the last row sees all of them.
        window: sliding window, the row's own position included. With causal a row sees the last `window` keys; without
            it, the keys with |key - (row + S_kv - S_q)| < window.
        scaling: "per_token" or "per_block". Scales per head and planned scales are not available: they are of one
            shape of inputs.
        softcap, sinks, recipe, scale, smooth_k, rotation, return_lse: as in `sage_attention`.
    Returns: out [total_q, H, D] contiguous, in q.dtype; with return_lse also lse [total_q, H] fp32, natural log. Rows
        behind the last sequence, and of a sequence without keys, are 0 (their lse -inf, or the sink).
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/varlen.py.
    Source: the interface is that of FlashAttention's flash_attn_varlen_func; maths in kernels/README.md.
    """
    key = result = None
    options = (scale, scaling, smooth_k, causal, window, softcap, recipe, rotation, return_lse)
    given = _distinct(q, k, v, cu_seqlens_q, cu_seqlens_k)
    if sinks is None:
        bounds = (max_seqlen_q is None or type(max_seqlen_q) is int, max_seqlen_k is None or type(max_seqlen_k) is int)
        key, result = try_replay("varlen", given, (*options, *bounds))
        if result is not None:
            return _unpacked(result)
    check_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window=window, softcap=softcap,
        sinks=sinks, recipe=recipe, scaling=scaling, scale=scale, rotation=rotation,
    )  # fmt: skip
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    longest = max_seqlen_q is not None or max_seqlen_k is not None
    if longest and not q.is_cuda and not torch.compiler.is_compiling() and is_plain_call(cu_seqlens_q, cu_seqlens_k):
        check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    arguments: tuple[Any, ...] = (q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, scale, scaling, smooth_k, causal, window)
    arguments += (float(softcap), recipe, rotation)
    if key is not None:
        return _unpacked(remember(key, lambda: _compute(*arguments, return_lse=return_lse), given))
    return call_op("attention_varlen" + "_lse" * return_lse, arguments)


def _distinct(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> tuple[Any, ...]:
    """Return the tensors of a launch: one tensor of lengths if queries and keys share it."""
    return (q, k, v, cu_q) if cu_q is cu_k else (q, k, v, cu_q, cu_k)


def _unpacked(result: Any) -> Any:
    """Drop the batch dimension of results [1, total, ...]."""
    return result[0] if isinstance(result, torch.Tensor) else tuple(x[0] for x in result)


def _compute(*arguments: Any, return_lse: bool) -> Any:
    """Launch the kernels of a checked call as a batch of 1, or run the reference on a CPU.

    Nothing runs for empty tensors.
    """
    q, k, v, *lengths, sinks, scale, scaling, smooth_k, causal, window, softcap, recipe, rotation = arguments
    masking = packed_masking(causal, window, softcap, sinks, q.shape[0], k.shape[0])
    if 0 in q.shape or 0 in k.shape:
        out, lse = attention_of_nothing(q[None], masking.sinks)
        return (out, lse) if return_lse else out
    options: dict[str, Any] = {"scale": scale, "scaling": scaling, "smooth_k": smooth_k, "masking": masking}
    options |= {"recipe": recipe, "rotation": rotation}
    if q.is_cuda:
        from .._triton.attention.launch import launch_attention_fwd
        from .._triton.launch import compiled_together

        options |= {"packed": tuple(lengths), "state": None, "return_lse": return_lse}
        call = functools.partial(launch_attention_fwd, q[None], k[None], v[None], **options)
        with compiled_together(call):
            out, lse = call()
    else:
        check_lengths(q, k, *lengths)
        out, lse = reference.ref_attention_varlen(q, k, v, *lengths, **options, return_lse=return_lse)
        out, lse = out[None], lse[None]
    return (out, lse) if return_lse else out


def _implementation(return_lse: bool) -> Any:
    def run(*arguments: Any) -> Any:
        check_called_below("attention_varlen")
        # under autocast the reference's own matmuls would be cast too
        with torch.autocast(arguments[0].device.type, enabled=False):
            return _unpacked(_compute(*arguments, return_lse=return_lse))

    return run


register(f"attention_varlen({_ARGUMENTS}) -> Tensor", _implementation(False), fake_out)
register(f"attention_varlen_lse({_ARGUMENTS}) -> (Tensor, Tensor)", _implementation(True), fake_out_lse)
