"""Input checks of `sage_attention` and `mixed_attention`, and reasons why a call is unsupported.

A message says which argument, what it got, what is expected and what to do about it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat import differentiates_forward, has_tangent
from ..facts.numerics import padded_head_dim
from ..facts.recipe import BLOCK, DEFAULT_RECIPE, MIXED_RECIPE, RECIPES, ROTATIONS, SCALINGS, Mixed
from ..facts.state import COUNT_FIELDS, PLAN_FIELDS, STAT_FIELDS, HeadState
from .numbers import check_scale, check_softcap, check_window
from .tensors import (
    DTYPES,
    MAX_HEAD_DIM,
    broadcasts,
    check_fields,
    check_inference,
    check_mask,
    check_sinks,
    check_tensor,
    check_writable,
    is_strided,
)


CAUSAL = ("top_left", "bottom_right")
_MOST_BLOCKS = 2**15 - 1  # mixed attention lists blocks as int16
# The results of `unsupported`
REASONS = (
    "dropout",
    "not_a_tensor",
    "layout",
    "rank",
    "dtype",
    "mixed_dtype",
    "device",
    "requires_grad",
    "head_dim",
    "value_head_dim",
    "heads",
    "shape",
    "empty",
    "mask_type",
    "mask_shape",
    "mask_and_causal",
)


def unsupported(
    q: object,
    k: object,
    v: object,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> str | None:
    """Return the reason why `sage_attention` can't do this call, as a short stable name, or None.

    Looks at shapes, dtypes and flags only: no device sync, traceable by Dynamo. Layout of q, k, v: [B, S, H, D].

    Returns: None or one of REASONS.
    """
    if dropout_p:
        return "dropout"
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return "not_a_tensor"
    if not (is_strided(q) and is_strided(k) and is_strided(v)):
        return "layout"
    if not (q.dim() == k.dim() == v.dim() == 4):
        return "rank"
    if q.dtype not in DTYPES:
        return "dtype"
    if not (q.dtype == k.dtype == v.dtype):
        return "mixed_dtype"
    if not (q.device == k.device == v.device) or q.device.type not in ("cpu", "cuda"):
        return "device"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "requires_grad"
    if differentiates_forward() and (has_tangent(q) or has_tangent(k) or has_tangent(v)):
        return "requires_grad"
    # read once: every read of a shape builds a new tuple
    batch, seq_q, heads, head_dim = q.shape
    k_batch, seq_kv, kv_heads, k_head_dim = k.shape
    v_batch, v_seq_kv, v_heads, v_head_dim = v.shape
    if head_dim != k_head_dim or not 1 <= head_dim <= MAX_HEAD_DIM:
        return "head_dim"
    if v_head_dim != k_head_dim:
        return "value_head_dim"
    if kv_heads != v_heads or kv_heads == 0 or heads % kv_heads:
        return "heads"
    if heads != kv_heads and not enable_gqa:
        return "heads"
    if not (batch == k_batch == v_batch) or seq_kv != v_seq_kv:
        return "shape"
    if batch == 0 or seq_q == 0 or heads == 0 or seq_kv == 0:
        return "empty"
    if attn_mask is None:
        return None
    if is_causal:
        return "mask_and_causal"
    if not isinstance(attn_mask, torch.Tensor) or attn_mask.device != q.device or not is_strided(attn_mask):
        return "mask_type"
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        return "mask_type"
    if not broadcasts(attn_mask, (batch, heads, seq_q, seq_kv)):
        return "mask_shape"
    if (torch.is_grad_enabled() and attn_mask.requires_grad) or has_tangent(attn_mask):
        return "requires_grad"
    return None


def check_masking(
    q: torch.Tensor, k: torch.Tensor, attn_mask: torch.Tensor | None, causal: Any, window: Any, sinks: Any
) -> None:
    """Raise unless mask, causality, window and sinks fit q and k [B, S, H, D]."""
    if not isinstance(causal, bool) and causal not in CAUSAL:
        raise ValueError(f"causal: got {causal!r}, expected False, True or one of {list(CAUSAL)}")
    if causal is True and q.shape[1] != k.shape[1]:
        raise ValueError(
            f'causal: got True with S_q {q.shape[1]} and S_kv {k.shape[1]}, expected "top_left" (row i sees keys '
            'up to i) or "bottom_right" (up to i + S_kv - S_q): the lengths differ, so say which'
        )
    if window is not None:
        check_window(window)
        if not causal and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"window: got S_q {q.shape[1]} and S_kv {k.shape[1]}, expected equal lengths without causal; "
                "pass causal or a mask"
            )
    if sinks is not None:
        check_sinks(sinks, q.shape[2], q.device)
    if attn_mask is not None:
        if causal:
            raise ValueError(
                f"attn_mask: got a mask and causal={causal!r}, expected one of them; fold causality into the mask"
            )
        check_mask(attn_mask, q.device, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), "[B, H, S_q, S_kv]")


def check_attention_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise unless `sage_attention` can take q, k and v: TypeError, ValueError or NotImplementedError."""
    if unsupported(q, k, v, enable_gqa=True) in (None, "empty"):
        return  # half the time of what follows, which finds the message for the first fault
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        check_tensor(name, x, DTYPES, rank=4, axes="[B, S, H, D]", remedy="cast it, or pass x.transpose(1, 2)")
    for name, x in named[1:]:
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}, expected q's {q.dtype}; cast q, k and v to one dtype")
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, expected q's {q.device}; move q, k and v to one device")
    if q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"q: got device {q.device}, expected cpu or cuda; use scaled_dot_product_attention there"
        )
    batch, seq_kv, kv_heads, head_dim = k.shape
    if not (q.shape[0] == batch == v.shape[0]):
        raise ValueError(
            f"batch: got q {q.shape[0]}, k {batch}, v {v.shape[0]}, expected equal; expand k and v to q's batch"
        )
    if v.shape[1] != seq_kv:
        raise ValueError(f"v: got {v.shape[1]} tokens, expected k's {seq_kv}")
    if v.shape[2] != kv_heads:
        raise ValueError(f"v: got {v.shape[2]} heads, expected k's {kv_heads}")
    if kv_heads == 0 or q.shape[2] % kv_heads:
        raise ValueError(f"heads: got q {q.shape[2]}, k {kv_heads}, expected k's heads to divide q's")
    if q.shape[3] != head_dim:
        raise ValueError(f"head_dim: got q {q.shape[3]}, k {head_dim}, expected equal")
    if v.shape[3] != head_dim:
        raise NotImplementedError(
            f"v: got head_dim {v.shape[3]}, expected k's {head_dim}; use scaled_dot_product_attention"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head_dim: got {head_dim}, expected 1 to {MAX_HEAD_DIM}; use scaled_dot_product_attention for this layer"
        )
    for name, x in named:
        remedy = "wrap the call in torch.no_grad() or use scaled_dot_product_attention for training"
        check_inference(name, x, remedy)


def check_options(
    recipe: Any,
    scaling: Any,
    scale: Any,
    state: Any,
    softcap: float = 0.0,
    cu_seqlens: Any = None,
    rotation: str = "none",
    smooth_k: bool | None = None,
) -> None:
    """Raise unless `sage_attention` knows the options and its recipe has them."""
    if recipe == MIXED_RECIPE:
        raise ValueError(
            f"recipe: got {recipe!r}, expected one of {sorted(RECIPES)}; mixed precision has options of its own: call "
            "sage_kernels.mixed_attention"
        )
    if recipe not in RECIPES:
        raise ValueError(f"recipe: got {recipe!r}, expected one of {sorted(RECIPES)}")
    if scaling not in SCALINGS:
        raise ValueError(
            f"scaling: got {scaling!r}, expected one of {list(SCALINGS)} (state= chooses timestep scaling)"
        )
    if rotation not in ROTATIONS:
        raise ValueError(f"rotation: got {rotation!r}, expected one of {list(ROTATIONS)}")
    check_scale(scale)
    check_softcap(softcap)
    if cu_seqlens is not None:
        raise NotImplementedError(
            "cu_seqlens: got packed sequences, expected None: call sage_attention_varlen, or pad them to [B, S, H, D] "
            "and pass attn_mask [B, 1, 1, S]"
        )
    if state is not None and not isinstance(state, HeadState):
        raise TypeError(f"state: got {type(state).__name__}, expected sage_kernels.HeadState or None")
    if RECIPES[recipe].plain:
        _check_plain(recipe, scaling, state, smooth_k)


def _check_plain(recipe: str, scaling: str, state: Any, smooth_k: bool | None) -> None:
    """Raise unless the options fit a recipe without centre, balance and plans."""
    has = f"one scale per token of Q and K, and nothing else; {DEFAULT_RECIPE!r} has all of it"
    if scaling not in RECIPES[recipe].scalings:
        raise ValueError(f"scaling: got {scaling!r} with recipe {recipe!r}, expected 'per_token': it has {has}")
    if state is not None:
        raise NotImplementedError(f"state: got one with recipe {recipe!r}, expected None: it has {has}")
    if smooth_k:
        raise ValueError(f"smooth_k: got True with recipe {recipe!r}, expected None or False: it has {has}")


def check_state(state: HeadState, q_shape: torch.Size, kv_heads: int, device: torch.device) -> None:
    """Raise unless `state` has the layout of `new_head_state`, wide enough for q [B, S_q, H, D].

    It also has to be on the device. That row + kv_heads stays inside is up to the owner: row lives on the device, and
    reading it would sync.
    """
    batch, seq_q, heads, head_dim = q_shape

    def wanted() -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        rows, width = (state.plan.shape[0], state.plan.shape[2]) if state.plan.dim() == 3 else (-1, -1)
        maxima = (batch, heads, seq_q)
        return {
            "plan": (torch.float32, (rows, PLAN_FIELDS, width)),
            "plan_scale": (torch.float32, (rows,)),
            "stats": (torch.float32, (rows, STAT_FIELDS, width)),
            "counts": (torch.int32, (rows, COUNT_FIELDS)),
            "row": (torch.int32, ()),
            "row_max": (torch.float32, maxima if state.row_max.numel() else (0,)),
            "row_max_next": (torch.float32, maxima if state.row_max_next.numel() else (0,)),
        }

    check_fields(
        "state", state, state._fields, wanted, device,
        "empty where there is nothing; make states with sage_kernels.new_head_state",
    )  # fmt: skip
    if state.row_max.numel() and state.row_max_next.numel():
        raise ValueError("state.row_max_next: got elements beside those of state.row_max, expected an empty tensor")
    rows, _, width = state.plan.shape
    channels = padded_head_dim(head_dim)
    if rows < kv_heads or width < channels:
        raise ValueError(
            f"state: got {rows} rows of {width} channels, expected at least {kv_heads} rows of {channels} channels"
        )
    for name in ("stats", "counts", "row_max", "row_max_next"):
        check_writable(f"state.{name}", getattr(state, name))


def check_mixed(q: Any, k: Any, v: Any, options: Any, causal: Any, scale: Any) -> None:
    """Raise unless `mixed_attention` can do this call: TypeError, ValueError or NotImplementedError."""
    if not isinstance(options, Mixed):
        raise TypeError(f"options: got {type(options).__name__}, expected sage_kernels.Mixed")
    check_options(DEFAULT_RECIPE, "per_token", scale, None)
    check_attention_inputs(q, k, v)
    check_masking(q, k, None, causal, None, None)
    if k.shape[1] > BLOCK * _MOST_BLOCKS:
        raise NotImplementedError(
            f"k: got {k.shape[1]} tokens, expected at most {BLOCK * _MOST_BLOCKS} with recipe 'mixed'; use "
            f"sage_attention with recipe={DEFAULT_RECIPE!r}"
        )
