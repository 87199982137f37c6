"""The ops of the INT8 KV cache: append tokens, and attend over them.

A call goes the way of attention.py: the op checks it, `_attend` or `_append` decides what to launch (the reference on
a CPU), and a call like an earlier one is replayed (replay.py).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .. import reference
from ..checks.decode import check_append, check_decode_inputs, check_decode_options
from ..checks.tensors import check_called_below
from ..facts.masking import Masking, canonical_mask, decode_band
from .dispatch import attention_of_nothing, call_op, fake_out, fake_out_lse, register
from .replay import TENSOR, is_plain_call, layouts_of, remember, replay_by_key


if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import DecodeKeywords

_CACHE = "Tensor k_codes, Tensor k_scale, Tensor v_codes, Tensor v_scale, Tensor? k_mean"
_ARGUMENTS = (
    f"Tensor q, {_CACHE}, Tensor? lengths, Tensor? attn_mask, Tensor? sinks, bool ring, bool causal, int? window, "
    "float softcap, float scale, Tensor? k_balance"
)


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_mean: torch.Tensor | None,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    *,
    position: int | torch.Tensor,
    ring: bool = False,
    k_balance: torch.Tensor | None = None,
) -> None:
    """Quantise new tokens into an INT8 KV cache, in one launch that touches no other tokens.

    A token's scale is its largest element / 127, rounded to bf16 before it divides. K is stored as
    (K - k_mean) · k_balance.

    Args:
        k, v: [B, H_kv, N, D] fp16, bf16 or fp32, any strides, the new tokens.
        k_mean: fp32 [B, H_kv, D], the centre subtracted from every key of its head, or None. The same in all calls.
        k_codes, v_codes: int8 [B, H_kv, S, D], written; any strides, the last one 1.
        k_scale, v_scale: bf16 [B, H_kv, S], written.
        position: how many tokens came before, an int, or an integer tensor [] that stays on its device.
        ring: token number t goes to slot t modulo S. Otherwise it goes to slot t. A token beyond S is then an error
            where the position is an int; where it is a tensor the token is not written, and attention returns NaN.
        k_balance: fp32 [B, H_kv, D], positive, or None for ones. Smaller for a channel that is larger than the others,
            which share its scale. The same in all calls, and for attention too.
    Raises: TypeError, ValueError, NotImplementedError before anything is written; see checks/.
    """
    tensors = (k, v, k_mean, k_codes, k_scale, v_codes, v_scale)
    key = None
    if not torch.compiler.is_compiling():
        key, given, numbers, result = _replay_append((*tensors, k_balance), position, ring)
        if result is not None:
            return
    check_append(*tensors, position, ring, k_balance)
    on_device, start = (position, 0) if isinstance(position, torch.Tensor) else (None, position)
    if key is None:
        call_op("append_kv", (*tensors, on_device, start, ring, k_balance))
        return
    from .._triton.decode.append_kv import launch_append_kv

    options: dict[str, Any] = {"position": on_device, "start": start, "ring": ring, "k_balance": k_balance}
    remember(key, functools.partial(launch_append_kv, *tensors, **options), given, numbers)


@overload
def sage_decode_attention(
    q: torch.Tensor, k_codes: torch.Tensor, k_scale: torch.Tensor, v_codes: torch.Tensor, v_scale: torch.Tensor,
    k_mean: torch.Tensor | None = ..., *, return_lse: Literal[False] = ..., **keywords: Unpack[DecodeKeywords]
) -> torch.Tensor: ...  # fmt: skip


@overload
def sage_decode_attention(
    q: torch.Tensor, k_codes: torch.Tensor, k_scale: torch.Tensor, v_codes: torch.Tensor, v_scale: torch.Tensor,
    k_mean: torch.Tensor | None = ..., *, return_lse: Literal[True], **keywords: Unpack[DecodeKeywords]
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def sage_decode_attention(
    q: torch.Tensor, k_codes: torch.Tensor, k_scale: torch.Tensor, v_codes: torch.Tensor, v_scale: torch.Tensor,
    k_mean: torch.Tensor | None = ..., *, return_lse: bool, **keywords: Unpack[DecodeKeywords]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def sage_decode_attention(
    q: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    k_mean: torch.Tensor | None = None,
    *,
    lengths: torch.Tensor | None = None,
    ring: bool = False,
    attn_mask: torch.Tensor | None = None,
    causal: bool | str = False,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    k_balance: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last S_q tokens over an INT8 KV cache, without a dequantised copy of it.

    Q is quantised in the kernel, to two INT8 codes a channel (15 bits), so that the cache's own rounding is all the
    error there is in the scores. Made for few queries (S_q · H / H_kv <= 16 is one tile); any number works.

    Args:
        q: [B, S_q, H, D] fp16, bf16 or fp32, any strides, 1 <= D <= 256. Row i is token n - S_q + i of n.
        k_codes, k_scale, v_codes, v_scale, k_mean: the cache, as `append_kv` writes it; H_kv divides H.
        lengths: how many tokens were appended, an integer tensor [] or [B] on q's device; None: the buffers are full.
            Slots beyond are never used, whatever they hold. More than S (and no ring): that sample's output is NaN.
        ring: the cache is a ring and holds the last min(lengths, S) tokens.
        attn_mask: as in scaled_dot_product_attention: bool (True: visible) or floating point, broadcastable to
            [B, H, S_q, S]; column j is the j-th oldest token that the cache holds. A hidden key may hold anything.
        causal: False, or "bottom_right" (or True): a row sees keys up to its own. May come with a mask.
        window: a row sees no key older than the last `window`, its own included. May come with a mask.
        softcap, sinks: as in `sage_attention`.
        scale: softmax scale, a Python number >= 0; D ** -0.5 if None.
        return_lse: also return the log-sum-exp of the scaled and masked scores.
        k_balance: the same as for `append_kv`.
    Returns: out [B, S_q, H, D] contiguous, in q.dtype; with return_lse also lse [B, S_q, H] fp32, natural log. A row
        that sees nothing gives 0 and -inf. A token appended with NaN or inf gives NaN in all channels of the rows
        that see it.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/.
    """
    cache = (k_codes, k_scale, v_codes, v_scale, k_mean)
    key = None
    if attn_mask is None and not torch.compiler.is_compiling():
        options = (ring, causal, window, softcap, scale, return_lse)
        key, given, numbers, result = _replay_attend(q, (*cache, k_balance), lengths, sinks, options)
        if result is not None:
            return result
    check_decode_inputs(q, *cache, lengths, k_balance)
    check_decode_options(q, k_codes, attn_mask, causal, window, softcap, sinks, scale)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    arguments = (q, *cache, lengths, attn_mask, sinks, ring, bool(causal), window, float(softcap), scale, k_balance)
    if key is not None:
        return remember(key, functools.partial(_implementation(return_lse), *arguments), given, numbers)
    return call_op("decode_attention" + "_lse" * return_lse, arguments)


_NOT_REPLAYED = (None, None, None, None)
_NONE = type(None)


def _replay_attend(q: torch.Tensor, cache: tuple[Any, ...], lengths: Any, sinks: Any, options: tuple[Any, ...]) -> Any:
    """Return (key, tensors, numbers, results) of a call of `sage_decode_attention` without a mask.

    Results are None if no equal call was recorded. All are None without a GPU, where someone has to see the call,
    where a gradient is wanted, and for arguments that the checks will refuse.
    """
    if type(q) not in TENSOR or not q.is_cuda or not is_plain_call(q, *cache, lengths, sinks):
        return _NOT_REPLAYED
    if torch.is_grad_enabled() and (q.requires_grad or (sinks is not None and sinks.requires_grad)):
        return _NOT_REPLAYED
    key, given, numbers = _attend_key(q, cache, lengths, sinks, options)
    key, results = replay_by_key(key, given, numbers)
    return key, given, numbers, results


def _attend_key(q: torch.Tensor, cache: tuple[Any, ...], lengths: Any, sinks: Any, options: tuple[Any, ...]) -> Any:
    """Return a call's key, its tensors, and its numbers, which may differ between calls of one key.

    cache: codes and scales, then k_mean and k_balance. A growing cache holds one more token in every call, so the
    key has what follows from that number (tile, splits) but not the number itself.
    """
    k_codes, window = cache[0], options[2]
    if any(x is None for x in cache[:4]) or q.dim() != 4 or k_codes.dim() != 4 or 0 in q.shape or 0 in k_codes.shape:
        return _NOT_REPLAYED[:3]
    if type(window) not in (int, _NONE):
        return _NOT_REPLAYED[:3]
    from .._triton.decode.launch import cut_decode

    tokens = k_codes.shape[2]
    left, _ = decode_band(True, window)
    cut = cut_decode(q.shape, k_codes.shape[1], tokens, left, q.device)
    key = ["decode", options, *map(type, options), cut, *layouts_of((q, *cache[4:], lengths, sinks))]
    for x in cache[:4]:
        shape = x.shape
        key.append((x.dtype, x.device, shape[:2], shape[2:3] == (tokens,), shape[3:], x.stride()))
    return tuple(key), [x for x in (q, *cache, lengths, sinks) if x is not None], {"capacity": tokens}


def _replay_append(tensors: Any, position: Any, ring: bool) -> Any:
    """Return (key, tensors, numbers, results) of a call of `append_kv`, as `_replay_attend` does.

    tensors: k, v, k_mean, k_codes, k_scale, v_codes, v_scale, k_balance.
    """
    k, v = tensors[:2]
    if isinstance(position, torch.Tensor):
        tensors += (position,)
    if type(k) not in TENSOR or not k.is_cuda or not is_plain_call(*tensors):
        return _NOT_REPLAYED
    if torch.is_grad_enabled() and (k.requires_grad or (v is not None and v.requires_grad)):
        return _NOT_REPLAYED
    key, given, numbers = _append_key(tensors, position, ring)
    key, results = replay_by_key(key, given, numbers)
    return key, given, numbers, results


def _append_key(tensors: Any, position: Any, ring: bool) -> Any:
    """Return key, tensors and numbers of a call of `append_kv`, as `_attend_key` does.

    A position that the host knows is a number and not part of the key; that it fits the cache is checked here.
    """
    k, v, _, k_codes, *scales = tensors[:7]
    if any(x is None for x in (v, k_codes, *scales)) or k.dim() != 4 or k_codes.dim() != 4 or 0 in k.shape:
        return _NOT_REPLAYED[:3]
    start = 0
    if not isinstance(position, torch.Tensor):
        start = position
        if type(start) is not int or start < 0 or not (ring is True or start + k.shape[2] <= k_codes.shape[2]):
            return _NOT_REPLAYED[:3]
    key = ("append", ring, type(ring), len(tensors), *layouts_of(tensors))
    return key, [x for x in tensors if x is not None], {"start": start}


def _attend(*arguments: Any, return_lse: bool) -> Any:
    """Attend by the kernels of a GPU or the reference; nothing runs for empty tensors."""
    inputs, (attn_mask, sinks, ring, causal, window, softcap, scale, k_balance) = arguments[:7], arguments[7:]
    q, k_codes = inputs[:2]
    left, right = decode_band(causal, window)
    masking = Masking(
        canonical_mask(attn_mask, k_codes.shape[2]), left, right, softcap=softcap,
        sinks=None if sinks is None else sinks.float().contiguous(),
    )  # fmt: skip
    options = {"ring": ring, "masking": masking, "scale": scale, "k_balance": k_balance}
    if q.numel() == 0 or k_codes.shape[2] == 0:
        out, lse = attention_of_nothing(q, masking.sinks)
    elif q.is_cuda:
        from .._triton.decode.launch import launch_decode_attention

        out, lse = launch_decode_attention(*inputs, return_lse=return_lse, **options)
    else:
        out, lse = reference.ref_decode_attention(*inputs, **options)
    return (out, lse) if return_lse else out


def _implementation(return_lse: bool) -> Any:
    def run(*arguments: Any) -> Any:
        check_called_below("decode_attention")
        # under autocast the reference's own matmuls would be cast too
        with torch.autocast(arguments[0].device.type, enabled=False):
            return _attend(*arguments, return_lse=return_lse)

    return run


def _append(*arguments: Any) -> None:
    """Write the tokens of a checked call into the cache, by the kernel of a GPU or the reference."""
    check_called_below("append_kv")
    *tensors, position, start, ring, k_balance = arguments
    if tensors[0].numel() == 0:
        return
    if tensors[0].is_cuda:
        from .._triton.decode.append_kv import launch_append_kv

        launch_append_kv(*tensors, position=position, start=start, ring=ring, k_balance=k_balance)
        return
    start = start if position is None else int(position)
    reference.ref_append_kv(*tensors, position=start, ring=ring, k_balance=k_balance)


register(f"decode_attention({_ARGUMENTS}) -> Tensor", _implementation(False), fake_out)
register(f"decode_attention_lse({_ARGUMENTS}) -> (Tensor, Tensor)", _implementation(True), fake_out_lse)
register(
    "append_kv(Tensor k, Tensor v, Tensor? k_mean, Tensor(a!) k_codes, Tensor(b!) k_scale, Tensor(c!) v_codes, "
    "Tensor(d!) v_scale, Tensor? position, int start, bool ring, Tensor? k_balance) -> ()",
    _append, lambda *_: None,
)  # fmt: skip
