"""Input checks of the ops of the INT8 KV cache."""

from __future__ import annotations

import torch

from .numbers import INT64_MAX, check_scale, check_softcap, check_window, short
from .tensors import DTYPES, MAX_HEAD_DIM, check_inference, check_mask, check_sinks, check_tensor, check_writable


_WRITER = "append_kv writes such buffers"


def _is_number(x) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def check_buffers(k_codes, k_scale, v_codes, v_scale, k_mean, k_balance=None) -> None:
    """Raise unless the tensors are an INT8 KV cache: int8 codes [B, H_kv, S, D] with bf16 scales.

    Scales are [B, H_kv, S]; k_mean and k_balance fp32 [B, H_kv, D] or None.
    """
    check_tensor("k_codes", k_codes, (torch.int8,), rank=4, axes="[B, H_kv, S, D]", remedy=_WRITER)
    shape, device = k_codes.shape, k_codes.device
    if not 1 <= shape[3] <= MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head_dim: got {shape[3]}, expected 1 to {MAX_HEAD_DIM}; use a cache of 16-bit numbers for this model"
        )
    channels = (*shape[:2], shape[3])
    for name, x, dtype, expected, axes in (
        ("v_codes", v_codes, torch.int8, shape, "[B, H_kv, S, D]"),
        ("k_scale", k_scale, torch.bfloat16, shape[:3], "[B, H_kv, S]"),
        ("v_scale", v_scale, torch.bfloat16, shape[:3], "[B, H_kv, S]"),
        ("k_mean", k_mean, torch.float32, channels, "[B, H_kv, D] or None"),
        ("k_balance", k_balance, torch.float32, channels, "[B, H_kv, D] or None"),
    ):
        if x is None and dtype == torch.float32:
            continue
        check_tensor(name, x, (dtype,), device, axes=axes, remedy=_WRITER)
        if x.shape != expected:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {axes} = {list(expected)}")
    if k_codes.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"k_codes: got device {k_codes.device}, expected cpu or cuda")


def check_append(k, v, k_mean, k_codes, k_scale, v_codes, v_scale, position, ring, k_balance=None) -> None:
    """Raise unless k and v fit the cache and its capacity.

    The capacity is checked where the host knows the position.
    """
    check_buffers(k_codes, k_scale, v_codes, v_scale, k_mean, k_balance)
    for name, x in (("k_codes", k_codes), ("k_scale", k_scale), ("v_codes", v_codes), ("v_scale", v_scale)):
        check_writable(name, x)
    batch, heads, capacity, head_dim = k_codes.shape
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, DTYPES, k_codes.device, axes="[B, H_kv, N, D]")
        if x.dim() != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, head_dim):
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, expected [{batch}, {heads}, N, {head_dim}], the cache's batch, "
                "heads and head_dim; was the cache made for another batch or model?"
            )
        check_inference(name, x)
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(
            f"v: got {v.dtype} {tuple(v.shape)}, expected k's {k.dtype} {tuple(k.shape)}: one value for each key"
        )
    number = k.shape[2]
    if isinstance(position, torch.Tensor):
        if position.dim() != 0 or position.dtype not in (torch.int32, torch.int64) or position.device != k.device:
            raise ValueError(
                f"position: got {position.dtype} {tuple(position.shape)} on {position.device}, expected an int or an "
                f"int32 or int64 tensor [] on {k.device}"
            )
    elif not _is_number(position):
        raise TypeError(f"position: got {type(position).__name__}, expected an int or an integer tensor []")
    elif position < 0:
        raise ValueError(f"position: got {short(position)}, expected 0 or more")
    elif isinstance(position, int) and position > INT64_MAX - number:
        raise ValueError(f"position: got {short(position)}, expected an int64 even after the new tokens")
    elif not ring and position + number > capacity:
        raise ValueError(
            f"position: got {position} with {number} new tokens, expected at most {capacity} in all, the cache's "
            "capacity; make a larger cache"
        )
    if ring and number > capacity:
        raise ValueError(f"k: got {number} tokens, expected at most {capacity}, the ring's capacity; append the last")


def check_decode_inputs(q, k_codes, k_scale, v_codes, v_scale, k_mean, lengths, k_balance=None) -> None:
    """Raise unless q [B, S_q, H, D] can attend over the cache."""
    check_buffers(k_codes, k_scale, v_codes, v_scale, k_mean, k_balance)
    batch, kv_heads, _, head_dim = k_codes.shape
    check_tensor("q", q, DTYPES, k_codes.device, rank=4, axes="[B, S_q, H, D]")
    if q.shape[0] != batch:
        raise ValueError(f"q: got batch {q.shape[0]}, expected the cache's {batch}; reorder or repeat the cache first")
    if q.shape[3] != head_dim:
        raise ValueError(f"q: got head_dim {q.shape[3]}, expected the cache's {head_dim}")
    if kv_heads == 0 or q.shape[2] % kv_heads:
        raise ValueError(f"q: got {q.shape[2]} heads, expected a multiple of the cache's {kv_heads}")
    check_inference("q", q)
    if lengths is not None:
        if not isinstance(lengths, torch.Tensor):
            raise TypeError(f"lengths: got {type(lengths).__name__}, expected an integer tensor [] or [B], or None")
        if lengths.dtype not in (torch.int32, torch.int64) or tuple(lengths.shape) not in ((), (batch,)):
            raise ValueError(
                f"lengths: got {lengths.dtype} {tuple(lengths.shape)}, expected int32 or int64, shape [] or [{batch}]"
            )
        if lengths.device != q.device:
            raise ValueError(f"lengths: got device {lengths.device}, expected q's {q.device}")


def check_decode_options(q, k_codes, attn_mask, causal, window, softcap, sinks, scale) -> None:
    """Raise unless `sage_decode_attention` knows the mask and the options."""
    if causal not in (False, True, "bottom_right"):
        raise ValueError(
            f'causal: got {causal!r}, expected False or "bottom_right" (or True): the queries are the last tokens'
        )
    if window is not None:
        check_window(window)
    check_softcap(softcap)
    check_scale(scale)
    if sinks is not None:
        check_sinks(sinks, q.shape[2], q.device)
    if attn_mask is not None:
        check_mask(attn_mask, q.device, (q.shape[0], q.shape[2], q.shape[1], k_codes.shape[2]), "[B, H, S_q, S]")
