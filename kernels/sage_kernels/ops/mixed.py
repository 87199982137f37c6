"""The op `mixed_attention`: query-key blocks in two precisions, or with some left out.

Recipe "mixed".
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..checks.attention import check_mixed
from ..checks.tensors import check_called_below
from ..facts.block_budget import rows_of_block
from ..facts.recipe import BLOCK, Mixed
from ..reference.mixed import ref_mixed_attention
from .dispatch import attention_of_nothing, call_op, fake_out_lse, register
from .replay import remember, try_replay


_DEFAULT = Mixed()


def mixed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    options: Mixed = _DEFAULT,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    return_blocks: bool = False,
) -> Any:
    """Softmax attention in a cheap format, with a budget of query-key blocks in 16 bit or left out.

    A selector ranks the blocks of 64 keys for each block of 64 query rows (192 on Hopper with INT8 and a head_dim of
    up to 128; 128 on compute capability 10 with FP4). Promoted blocks have Q·Kᵀ in 16 bit; P·V is in 16 bit in all
    blocks. One softmax runs over all of them.

    Args:
        q: [B, S_q, H, D] fp16, bf16 or fp32, any strides, 1 <= D <= 256. For fp32 promoted blocks, P and V are bf16.
        k, v: [B, S_kv, H_kv, D], same dtype and device; H_kv divides H.
        options: formats, selector, budget and action. K is centred and balanced as in `sage_attention`.
        causal: as in `sage_attention`. There are no masks, windows, soft caps, sinks or plans.
        scale: softmax scale, a Python number >= 0; D ** -0.5 if None.
        return_lse: also return the log-sum-exp of the scaled scores, of those blocks that were computed.
        return_blocks: also return the blocks that were promoted or left out.
    Returns: out [B, S_q, H, D] contiguous, in q.dtype. Then, if asked for, lse [B, S_q, H] fp32, natural log, and
        blocks int8 [B, H, row blocks, key blocks] (1: chosen). Rows that see nothing are 0, their lse -inf.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/attention.py.
    Source: ThriftAttention (arXiv:2605.23081). Maths: docs/recipes.md.
    """
    wanted = (True, return_lse, return_blocks)
    key, results = try_replay("mixed", (q, k, v), (options, causal, scale, return_lse, return_blocks))
    if results is None:
        check_mixed(q, k, v, options, causal, scale)
        causal = ("top_left" if causal else "") if isinstance(causal, bool) else causal
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        arguments = (q, k, v, scale, causal)
        if key is not None:
            results = remember(key, lambda: _compute(*arguments, options, return_lse, return_blocks), (q, k, v))
        else:
            flat = (*arguments, options.base, options.selector, float(options.budget), options.action)
            every = call_op("mixed_attention", flat)
            results = tuple(x for x, is_wanted in zip(every, wanted, strict=True) if is_wanted)
    return results[0] if sum(wanted) == 1 else tuple(results)


def _compute(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: str, options: Mixed, return_lse: bool,
    return_blocks: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Run a checked call: out, then lse and blocks if they are asked for."""
    offset = k.shape[1] - q.shape[1] if causal == "bottom_right" else 0
    out, lse, blocks = _attend(q, k, v, scale, bool(causal), offset, options, return_lse, return_blocks)
    return tuple(x for x, wanted in ((out, True), (lse, return_lse), (blocks, return_blocks)) if wanted)


def _attend(q: Any, k: Any, v: Any, scale: float, causal: bool, offset: int, options: Mixed, *returned: bool) -> Any:
    if 0 in q.shape or 0 in k.shape:
        return *attention_of_nothing(q, None), _new_blocks(q, k, options.base).zero_()
    if q.is_cuda:
        from .._triton.launch import compiled_together
        from .._triton.mixed.launch import launch_mixed_attention

        given: dict[str, Any] = {"options": options, "causal": causal, "offset": offset, "scale": scale}
        given |= dict(zip(("return_lse", "return_blocks"), returned, strict=True))
        call = functools.partial(launch_mixed_attention, q, k, v, **given)
        with compiled_together(call):
            return call()
    out, lse, blocks = ref_mixed_attention(q, k, v, options=options, causal=causal, offset=offset, scale=scale)
    return out, lse, blocks.to(torch.int8)


def _new_blocks(q: torch.Tensor, k: torch.Tensor, base: str) -> torch.Tensor:
    rows = rows_of_block(q.device, base)
    shape = (q.shape[0], q.shape[2], (q.shape[1] + rows - 1) // rows, (k.shape[1] + BLOCK - 1) // BLOCK)
    return q.new_empty(shape, dtype=torch.int8)


def _of_op(*arguments: Any) -> Any:
    """Run the op's checked arguments as the dispatcher passes them."""
    check_called_below("mixed_attention")
    q, k, v, scale, causal, *options = arguments
    with torch.autocast(q.device.type, enabled=False):
        return _compute(q, k, v, scale, causal, Mixed(*options), True, True)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: str, base: str, *_: Any) -> Any:
    return *fake_out_lse(q), _new_blocks(q, k, base)


register(
    "mixed_attention(Tensor q, Tensor k, Tensor v, float scale, str causal, str base, str selector, float budget, "
    "str action) -> (Tensor, Tensor, Tensor)",
    _of_op, _fake,
)  # fmt: skip
