"""Input checks of the ops of the INT8 KV cache."""

from __future__ import annotations

import torch

from .numbers import INT64_MAX, check_size, check_softcap, check_window, short
from .tensors import DTYPES, MAX_HEAD_DIM, check_inference, check_mask, check_strided, check_writable


def _is_number(x) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def check_buffers(k_codes, k_scale, v_codes, v_scale, k_mean, k_balance=None) -> None:
    """Raise unless the tensors are an INT8 KV cache: int8 codes [B, H_kv, S, D] with bf16 scales.

    Scales are [B, H_kv, S]; k_mean and k_balance fp32 [B, H_kv, D] or None.
    """
    for name, x in (("k_codes", k_codes), ("k_scale", k_scale), ("v_codes", v_codes), ("v_scale", v_scale)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
        check_strided(name, x)
    shape = k_codes.shape
    if k_codes.dim() != 4:
        raise ValueError(f"k_codes: got rank {k_codes.dim()}, expected rank 4 [B, H_kv, S, D]")
    if v_codes.shape != shape:
        raise ValueError(f"v_codes: got shape {tuple(v_codes.shape)}, expected k_codes' {tuple(shape)}")
    if not 1 <= shape[3] <= MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head_dim: got {shape[3]}, expected 1 to {MAX_HEAD_DIM}; use a cache of 16-bit numbers for this model"
        )
    for name, x in (("k_codes", k_codes), ("v_codes", v_codes)):
        if x.dtype != torch.int8:
            raise TypeError(f"{name}: got dtype {x.dtype}, expected int8; append_kv writes such buffers")
    for name, x in (("k_scale", k_scale), ("v_scale", v_scale)):
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name}: got dtype {x.dtype}, expected bfloat16; append_kv writes such buffers")
        if x.shape != shape[:3]:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected [B, H_kv, S] = {list(shape[:3])}")
    channels = (("k_mean", k_mean), ("k_balance", k_balance))
    for name, x in channels:
        if x is None:
            continue
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"{name}: got {got}, expected a float32 tensor [B, H_kv, D] or None")
        check_strided(name, x)
        if tuple(x.shape) != (shape[0], shape[1], shape[3]):
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, expected [B, H_kv, D] = {[shape[0], shape[1], shape[3]]}"
            )
    for name, x in (("k_scale", k_scale), ("v_codes", v_codes), ("v_scale", v_scale), *channels):
        if x is not None and x.device != k_codes.device:
            raise ValueError(
                f"{name}: got device {x.device}, expected k_codes' {k_codes.device}; move all of the cache there"
            )
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
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor [B, H_kv, N, D]")
        check_strided(name, x)
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: got dtype {x.dtype}, expected float16, bfloat16 or float32")
        if x.dim() != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, head_dim):
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, expected [{batch}, {heads}, N, {head_dim}], the cache's batch, "
                "heads and head_dim; was the cache made for another batch or model?"
            )
        if x.device != k_codes.device:
            raise ValueError(f"{name}: got device {x.device}, expected the cache's {k_codes.device}")
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
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q: got {type(q).__name__}, expected a torch.Tensor of shape [B, S_q, H, D]")
    check_strided("q", q)
    if q.dim() != 4:
        raise ValueError(f"q: got rank {q.dim()} (shape {tuple(q.shape)}), expected rank 4 [B, S_q, H, D]")
    if q.dtype not in DTYPES:
        raise TypeError(f"q: got dtype {q.dtype}, expected float16, bfloat16 or float32; cast it first")
    if q.device != k_codes.device:
        raise ValueError(f"q: got device {q.device}, expected the cache's {k_codes.device}; move q or the cache")
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
    if scale is not None:
        if isinstance(scale, torch.Tensor) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
            raise TypeError(f"scale: got {type(scale).__name__}, expected a Python float or None")
        check_size("scale", scale)
    for name, x in (("sinks", sinks), ("attn_mask", attn_mask)):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor or None")
        check_strided(name, x)
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, expected q's {q.device}")
        check_inference(name, x)
    if sinks is not None and (not sinks.is_floating_point() or tuple(sinks.shape) != (q.shape[2],)):
        raise ValueError(
            f"sinks: got {sinks.dtype} {tuple(sinks.shape)}, expected a floating point tensor [{q.shape[2]}], one "
            "logit a head"
        )
    if attn_mask is not None:
        check_mask(attn_mask, (q.shape[0], q.shape[2], q.shape[1], k_codes.shape[2]), "[B, H, S_q, S]")
