"""The op `sage_attention`: INT8 attention by Triton kernels on a GPU, by the reference on a CPU.

The way of a call: `sage_attention` checks it, `_compute` decides what to launch, and
`_triton/attention/launch.py` launches it. There are two shortcuts. A call like an earlier one is replayed (replay.py):
its recorded launches run again, without checks or decisions. And where PyTorch's dispatcher would only pass the call
on (`is_plain_call`), it is not asked. Whoever has to see an op (torch.compile, a profiler, a tracer) sees the ops that
are defined here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .. import reference
from ..checks.attention import check_attention_inputs, check_masking, check_options, check_state
from ..checks.skipping import check_skip
from ..checks.tensors import check_called_below
from ..facts.masking import make_masking
from ..facts.recipe import DEFAULT_RECIPE, RECIPES
from ..facts.skipping import SkipState
from ..facts.state import HeadState
from .dispatch import attention_of_nothing, call_op, fake_out, fake_out_lse, register
from .replay import TENSOR, is_plain_call, is_usual, layouts_of, remember, replay_by_key


if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import AttentionKeywords

# Arguments of an op, in order. Two schemas of fixed arity instead of an optional LSE: optional tensor returns are
# unreliable before torch 2.15.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? sinks, float scale, str scaling, bool smooth_k, "
    "str causal, int? window, float softcap, str recipe, str rotation"
)
_STATE = (
    "Tensor plan, Tensor plan_scale, Tensor(a!) stats, Tensor(b!) counts, Tensor row, "
    "Tensor(c!) row_max, Tensor(d!) row_max_next"
)
_INPUTS = _ARGUMENTS.count(",") + 1  # arguments before the state


@overload
def sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = ...,
    **keywords: Unpack[AttentionKeywords],
) -> torch.Tensor: ...


@overload
def sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def sage_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **keywords: Unpack[AttentionKeywords]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def sage_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    causal: bool | str = False,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    recipe: str = DEFAULT_RECIPE,
    scaling: str = "per_token",
    scale: float | None = None,
    smooth_k: bool | None = None,
    rotation: str = "none",
    return_lse: bool = False,
    state: HeadState | None = None,
    skip: SkipState | None = None,
    cu_seqlens: None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with an INT8 score matmul: O = softmax(scale · Q Kᵀ + mask) V.

    Args:
        q: [B, S_q, H, D] fp16, bf16 or fp32, any strides, 1 <= D <= 256. fp32 is quantised from fp32; P and V then
            run in bf16.
        k, v: [B, S_kv, H_kv, D], same dtype and device; H_kv divides H (head h reads key/value head h // (H / H_kv)).
        attn_mask: as in scaled_dot_product_attention: bool (True: visible) or floating point (added to the scaled
            scores), broadcastable to [B, H, S_q, S_kv]. A mask of keys [B, 1, 1, S_kv] is the fastest. A key that no
            row sees may hold anything in K and V, NaN included, and has no part in centre, balance or scales. A row
            that sees nothing gives 0.
        causal: "top_left" (row i sees keys up to i) or "bottom_right" (up to i + S_kv - S_q); True where S_q = S_kv.
            Not together with attn_mask.
        window: sliding window, the row's own position included. With causal a row sees the last `window` keys; without
            it, the keys with |key - row| < window (then S_q = S_kv). Beside attn_mask it costs a copy of the mask.
        softcap: scores become softcap · tanh(score / softcap) before masking; 0 is off.
        sinks: [H] logits of a virtual key without value, one per head. It is part of the softmax and of the LSE.
        recipe: a key of RECIPES. "qk_int8_pv_fp8" also rounds P and V to e4m3 (about 4 % relative L2 instead of 1.4 %
            on N(0, 1)) and runs P·V at twice the rate; on CUDA it needs compute capability 8.9 or newer.
            "qk_int8_pv_int8" rounds P and V to INT8 (about 2 %), with integer sums of any length, on every GPU.
            "qk_fp8_pv_fp8" rounds all four to e4m3 (about 6 %). "int_flash_half" and "int_flash_full" are the recipes
            of INT-FlashAttention as printed; they need scaling="per_token", no state, and smooth_k not True.
        scaling: tokens that share one INT8 scale of Q and of K: "per_token", "per_block" (the kernel's tile) or
            "per_head". Computed from the inputs. Not used with `state`: then Q has a scale per token, and K its
            planned scale per head, or a scale per tile where a head has no plan.
        scale: softmax scale, a Python number >= 0; D ** -0.5 if None.
        smooth_k: subtract from K a centre shared by all keys of a head, and balance its channels against Q's where
            some stand out. Softmax stays exact, and the LSE is corrected. Both come from a sample of all rows, later
            ones too. None: as the recipe has it (True except for those of INT-FlashAttention).
        rotation: "hadamard" first multiplies Q and K by one orthogonal matrix along the channels, in a launch of its
            own. Outliers in a few channels of some tokens then spread over all channels. Q·Kᵀ stays the same except
            for the rounding of the rotated Q and K to their dtype. In fp16, elements beyond 65504 / sqrt(D) may
            overflow and then give NaN. Without a state, K's centre and the balance come first, as the rotation would
            spread what they take away. Statistics and plans in `state` are of channels that were rotated only: a plan
            never serves a call of another rotation.
        return_lse: also return the log-sum-exp of the scaled and masked scores.
        state: planned scales of this call site, one per head; this call's statistics are recorded into it. Two calls
            that share a row of it must not run at the same time on different streams.
        skip: lists of key tiles from `new_skip_state`; needs `state`. Tiles that earlier steps, and in part this one,
            found to have next to no probability are not visited, and V is not read there. The call renews the lists.
            Not with masking of any kind, nor in code that torch.compile traces.
        cu_seqlens: anything but None raises: packed sequences are for `sage_attention_varlen`.
    Returns: out [B, S_q, H, D] contiguous, in q.dtype; with return_lse also lse [B, S_q, H] fp32, natural log.
        S_kv = 0 gives zeros and -inf.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/.
    Source: SageAttention (arXiv:2410.02367) for INT8 scores and smoothed K; INT-FlashAttention (arXiv:2409.16997);
        the planned scales are ours. Maths: kernels/README.md, docs/recipes.md.
    """
    key = None
    if attn_mask is None and sinks is None and cu_seqlens is None and not torch.compiler.is_compiling():
        options = (scale, scaling, smooth_k, causal, window, softcap, recipe, rotation, return_lse)
        key, result = _try_replay(q, k, v, state, options, skip)
        if result is not None:
            return result
    check_options(recipe, scaling, scale, state, softcap, cu_seqlens, rotation, smooth_k)
    smooth_k = not RECIPES[recipe].plain if smooth_k is None else smooth_k
    check_attention_inputs(q, k, v)
    check_masking(q, k, attn_mask, causal, window, sinks)
    causal = ("top_left" if causal else "") if isinstance(causal, bool) else causal
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    arguments: tuple[Any, ...] = (q, k, v, attn_mask, sinks, scale, scaling, smooth_k, causal, window, float(softcap))
    arguments += (recipe, rotation)
    if state is not None:
        check_state(state, q.shape, k.shape[2], q.device)
    if skip is not None:
        check_skip(skip, q, k, state, (attn_mask, causal, window, softcap, sinks), recipe)
    call = functools.partial(_compute, *arguments, state=state, return_lse=return_lse, skip=skip)
    if key is not None:
        return remember(key, call, (q, k, v, *(state or ()), *(() if skip is None else skip.tensors)))
    if skip is not None or is_plain_call(q, k, v, attn_mask, sinks, *(state or ())):
        return call()
    name = "attention" + "_planned" * (state is not None) + "_lse" * return_lse
    return call_op(name, (*arguments, *(state or ())))


def _try_replay(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: HeadState | None, options: tuple[Any, ...],
    skip: SkipState | None = None, *, dispatched: bool = False,
) -> Any:  # fmt: skip
    """Return the key of a call, and its results if an equal call was recorded.

    The key holds all that the checks read, so a known call need not be checked. Results are None if the call is new.
    Both are None without a GPU, where someone has to see the call, and where a gradient is wanted.

    Args:
        dispatched: see `is_usual`.
    """
    if type(q) not in TENSOR or type(k) not in TENSOR or type(v) not in TENSOR or not q.is_cuda:
        return None, None
    if state is not None and type(state) is not HeadState:
        return None, None
    tensors = (q, k, v) if state is None else (q, k, v, *state)
    if skip is not None:
        if type(skip) is not SkipState or state is None:
            return None, None
        tensors, options = (*tensors, *skip.tensors), (*options, *skip[len(skip.tensors) :])
    if not is_usual(tensors, dispatched):
        return None, None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None, None
    # the types too: 1, 1.0 and True are one key of a dictionary
    return replay_by_key((options, *map(type, options), *layouts_of(tensors)), tensors)


def _compute(*arguments: Any, state: HeadState | None, return_lse: bool, skip: SkipState | None = None) -> Any:
    """Launch the kernels of a checked call, or run the reference on a CPU.

    Nothing runs for empty tensors. Keys that no row sees are cut off first.
    """
    q, k, v, attn_mask, sinks, scale, scaling, smooth_k, causal, window, softcap, recipe, rotation = arguments
    masking, keys = make_masking(attn_mask, causal, window, softcap, sinks, q.shape[1], k.shape[1])
    if (keys.start, keys.stop) != (0, k.shape[1]):  # a view costs a microsecond
        k, v = k[:, keys], v[:, keys]
    if 0 in q.shape or 0 in k.shape:
        out, lse = attention_of_nothing(q, masking.sinks)
        return (out, lse) if return_lse else out
    options: dict[str, Any] = {"scale": scale, "scaling": scaling, "smooth_k": smooth_k, "state": state}
    options |= {"masking": masking, "recipe": recipe, "rotation": rotation}
    if skip is not None:
        options["skip"] = skip
    if q.is_cuda:
        from .._triton.attention.launch import launch_attention_fwd
        from .._triton.launch import compiled_together

        call = functools.partial(launch_attention_fwd, q, k, v, return_lse=return_lse, **options)
        with compiled_together(call):
            out, lse = call()
    else:
        with torch.autocast(q.device.type, enabled=False):  # it would cast the reference's own matmuls
            out, lse = reference.ref_attention(q, k, v, **options, return_lse=return_lse)
    return (out, lse) if return_lse else out


def _implementation(planned: bool, return_lse: bool) -> Any:
    """Return the function that the dispatcher calls with an op's checked arguments."""

    def run(*arguments: Any) -> Any:
        check_called_below("attention")
        state = HeadState(*arguments[_INPUTS:]) if planned else None
        q, k, v, attn_mask, sinks, *options = arguments[:_INPUTS]
        key = None
        if attn_mask is None and sinks is None:
            # not the keys of sage_attention, whose options are not yet checked when it looks them up
            key, result = _try_replay(q, k, v, state, ("op", *options, return_lse), dispatched=True)
            if result is not None:
                return result
        call = functools.partial(_compute, *arguments[:_INPUTS], state=state, return_lse=return_lse)
        return call() if key is None else remember(key, call, (q, k, v, *(state or ())))

    return run


for _planned in (False, True):
    for _return_lse in (False, True):
        _name = "attention" + "_planned" * _planned + "_lse" * _return_lse
        register(
            f"{_name}({_ARGUMENTS}{f', {_STATE}' * _planned}) -> {'(Tensor, Tensor)' if _return_lse else 'Tensor'}",
            _implementation(_planned, _return_lse),
            fake_out_lse if _return_lse else fake_out,
        )
