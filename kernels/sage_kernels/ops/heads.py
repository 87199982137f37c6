"""The op `qk_norm_rope`: RMSNorm of heads and rotary embedding of Q and K in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..checks.heads import check_heads
from ..checks.tensors import check_called_below
from ..compat import differentiates_forward
from ..reference.heads import ref_qk_norm_rope
from .dispatch import call_op, register
from .replay import remember, try_replay


def qk_norm_rope(
    q: Sequence[torch.Tensor],
    k: Sequence[torch.Tensor],
    q_weight: Sequence[torch.Tensor | None] | None = None,
    k_weight: Sequence[torch.Tensor | None] | None = None,
    *,
    norm: bool = True,
    eps: float = 1e-6,
    cos: Sequence[torch.Tensor | None] = (),
    sin: Sequence[torch.Tensor | None] = (),
    pairs: bool = True,
    across_heads: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply RMSNorm and the rotary embedding to Q and K, and concatenate the parts of the sequence.

    Args:
        q: parts of the sequence, such as text and image: [B, S_i, H, D] each, fp16, bf16 or fp32, an even D up to 256.
        k: the same parts, [B, S_i, H_kv, D].
        q_weight, k_weight: the norms' weights, one [D] for each part; None for none. With `across_heads` [H·D] and
            [H_kv·D].
        norm: True for an RMSNorm over D, with `eps`.
        cos, sin: angles: one table [S, D] of the whole sequence, or one [S_i, D] for each part, and None for a part
            that is not rotated; [.., D / 2] for one angle a pair; empty for no rotary embedding.
        pairs: channels 2i and 2i + 1 are rotated together; False: channels i and i + D / 2.
        across_heads: the norm is over all heads of a token, H·D numbers, not over each head.
    Returns: q [B, S, H, D] and k [B, S, H_kv, D] of q's dtype, contiguous. Computed in fp32 and rounded once.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/heads.py.
    Source: RMSNorm (arXiv:1910.07467), rotary embedding (arXiv:2104.09864).
    """
    none = [None] * len(q) if isinstance(q, (list, tuple)) else []
    q_weight, k_weight = (none if x is None else x for x in (q_weight, k_weight))
    lists = (q, k, q_weight, k_weight, cos, sin)
    given: list[Any] = []
    if {list, tuple}.issuperset(map(type, lists)):
        given = [x for values in lists for x in values]
    options = (norm, eps, pairs, across_heads, *(map(len, lists) if given else ()))
    key, result = try_replay("heads", tuple(given), options)
    if result is None:
        check_heads(q, k, q_weight, k_weight, norm, eps, cos, sin, across_heads)
        weights = list(q_weight), list(k_weight)
        arguments = (list(q), list(k), *weights, norm, float(eps), list(cos), list(sin), pairs, across_heads)
        if key is not None:
            result = remember(key, lambda: _qk_norm_rope(*arguments), [x for x in given if x is not None])
        else:
            plain = arguments if differentiates_forward() else _without_gradients(arguments)
            result = call_op("qk_norm_rope", plain)
    found: tuple[torch.Tensor, torch.Tensor] = result
    return found


def _without_gradients(arguments: Sequence[Any]) -> list[Any]:
    """Detach parameters of modules, since results would otherwise require a gradient."""

    def detached(x: Any) -> Any:
        return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x

    return [[detached(x) for x in value] if isinstance(value, list) else value for value in arguments]


def _qk_norm_rope(
    q: Any, k: Any, q_weight: Any, k_weight: Any, norm: bool, eps: float, cos: Any, sin: Any, pairs: bool,
    across_heads: bool,
) -> Any:  # fmt: skip
    if q[0].is_cuda and q[0].numel():
        from .._triton.heads.qk_norm_rope import launch_qk_norm_rope

        return launch_qk_norm_rope(q, k, q_weight, k_weight, norm, eps, cos, sin, pairs, across_heads)
    return ref_qk_norm_rope(q, k, q_weight, k_weight, norm, eps, cos, sin, pairs, across_heads)


def _fake(q: Any, k: Any, *_: Any) -> Any:
    tokens = sum(x.shape[1] for x in q)
    return tuple(x[0].new_empty((x[0].shape[0], tokens, *x[0].shape[2:])) for x in (q, k))


def _of_op(*arguments: Any) -> Any:
    """Run the op's arguments as the dispatcher passes them; a call like an earlier one is replayed.

    Compiled code calls the op this way.
    """
    check_called_below("qk_norm_rope")
    q, k, q_weight, k_weight, norm, eps, cos, sin, pairs, across_heads = arguments
    lists = (q, k, q_weight, k_weight, cos, sin)
    given = tuple(x for values in lists for x in values)
    key, result = try_replay("op heads", given, (norm, eps, pairs, across_heads, *map(len, lists)), dispatched=True)
    if result is not None:
        return result
    if key is None:
        return _qk_norm_rope(*arguments)
    return remember(key, lambda: _qk_norm_rope(*arguments), [x for x in given if x is not None])


register(
    "qk_norm_rope(Tensor[] q, Tensor[] k, Tensor?[] q_weight, Tensor?[] k_weight, bool norm, float eps, "
    "Tensor?[] cos, Tensor?[] sin, bool pairs, bool across_heads) -> (Tensor, Tensor)",
    _of_op, _fake,
)  # fmt: skip
