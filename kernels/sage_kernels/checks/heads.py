"""Input checks of `qk_norm_rope`."""

from __future__ import annotations

import math

import torch

from .tensors import DTYPES, MAX_HEAD_DIM, check_tensor


def check_heads(q, k, q_weight, k_weight, norm, eps, cos, sin, across_heads=False) -> None:
    """Raise unless `qk_norm_rope` can do this call: TypeError, ValueError or NotImplementedError."""
    for name, x in (("q", q), ("k", k), ("q_weight", q_weight), ("k_weight", k_weight), ("cos", cos), ("sin", sin)):
        if not isinstance(x, (list, tuple)):
            raise TypeError(f"{name}: got {type(x).__name__}, expected a list with one tensor for each part")
    if not q or not len(q) == len(k) == len(q_weight) == len(k_weight):
        got = ", ".join(str(len(x)) for x in (q, k, q_weight, k_weight))
        raise ValueError(f"q, k, q_weight, k_weight: got lists of {got}, expected lists of one length, at least 1")
    if len(cos) != len(sin) or len(cos) not in (0, 1, len(q)):
        raise ValueError(f"cos, sin: got {len(cos)} and {len(sin)} tables, expected none, one, or one for each part")
    if not (isinstance(eps, (int, float)) and math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps: got {eps!r}, expected a finite number >= 0")
    first = q[0]
    for i, (x, y) in enumerate(zip(q, k, strict=True)):
        for name, z, other in ((f"q[{i}]", x, q[0]), (f"k[{i}]", y, k[0])):
            _check(name, z, (first.dtype,) if isinstance(first, torch.Tensor) and i else DTYPES)
            if z.dim() != 4 or z.shape[3] % 2 or not 0 < z.shape[3] <= MAX_HEAD_DIM or z.stride(3) != 1:
                raise ValueError(
                    f"{name}: got shape {tuple(z.shape)}, strides {z.stride()}, expected [B, S, H, D] with an even D "
                    f"<= {MAX_HEAD_DIM} of stride 1"
                )
            if (z.shape[0], z.shape[2]) != (first.shape[0], other.shape[2]) or z.shape[3] != first.shape[3]:
                raise ValueError(f"{name}: got shape {tuple(z.shape)}, expected the samples, heads and D of part 0")
            if z.dtype != first.dtype or z.device != first.device:
                raise ValueError(f"{name}: got {z.dtype} on {z.device}, expected {first.dtype} on {first.device}")
        if x.shape[1] != y.shape[1]:
            raise ValueError(f"k[{i}]: got {y.shape[1]} tokens, expected {x.shape[1]} as q[{i}]")
        if (q_weight[i] is None) != (k_weight[i] is None) or (q_weight[i] is None) != (q_weight[0] is None):
            raise ValueError("q_weight, k_weight: got some that are None, expected all of them or none")
        for name, weight, z in ((f"q_weight[{i}]", q_weight[i], x), (f"k_weight[{i}]", k_weight[i], y)):
            if weight is not None:
                _check(name, weight, DTYPES)
                width = z.shape[3] * (z.shape[2] if across_heads else 1)
                if weight.shape != (width,) or weight.stride(0) != 1 or weight.device != first.device:
                    raise ValueError(
                        f"{name}: got shape {tuple(weight.shape)} on {weight.device}, expected [{width}], contiguous, "
                        f"on {first.device}"
                    )
    if across_heads and not norm:
        raise ValueError("across_heads: got True with norm=False, expected False; it says what the norm is over")
    if not norm and q_weight[0] is not None:
        raise ValueError("q_weight, k_weight: got them with norm=False, expected None; they are the norm's own")
    _check_tables(first, q, cos, sin)


def _check_tables(first, q, cos, sin) -> None:
    tokens = [x.shape[1] for x in q] if len(cos) > 1 else [sum(x.shape[1] for x in q)]
    for name, tables, others in (("cos", cos, sin), ("sin", sin, cos)):
        for i, table in enumerate(tables):
            if table is None and others[i] is None and len(tables) > 1:
                continue  # a part that is not rotated
            _check(f"{name}[{i}]", table, DTYPES)
            shapes = [(tokens[i], first.shape[3]), (tokens[i], first.shape[3] // 2)]
            if tuple(table.shape) not in shapes or (cos[i] is not None and table.shape != cos[i].shape):
                raise ValueError(f"{name}[{i}]: got shape {tuple(table.shape)}, expected one of {shapes}, as cos")
            if table.device != first.device:
                raise ValueError(f"{name}[{i}]: got device {table.device}, expected {first.device}")


def _check(name: str, x, dtypes) -> None:
    check_tensor(name, x, dtypes)
    if torch.is_grad_enabled() and x.requires_grad and not isinstance(x, torch.nn.Parameter):
        raise NotImplementedError(
            f"{name}: got a tensor that requires a gradient, expected none: there is no backward"
        )
