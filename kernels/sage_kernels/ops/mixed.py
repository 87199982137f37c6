"""The op of the recipe "mixed": attention whose query-key blocks run in two precisions, or are left out in part."""

from __future__ import annotations

from typing import Any

import torch

from ..checks.mixed import check_mixed
from ..checks.tensors import check_called_below, without_tangents
from ..compat import differentiates_forward
from ..facts.block_budget import rows_of_block
from ..facts.recipe import BLOCK, Mixed
from ..reference.mixed import ref_mixed_attention
from .replay import made_before, remember


_library = torch.library.Library("sage_kernels", "FRAGMENT")
_library.define(
    "mixed_attention(Tensor q, Tensor k, Tensor v, float scale, str causal, str base, str selector, float budget, "
    "str action) -> (Tensor, Tensor, Tensor)"
)
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
    """Softmax attention with most query-key blocks in a cheap format and a budget of them in 16 bit, or left out.

    A selector ranks the blocks of 64 keys for each block of 64 query rows (192 on Hopper with INT8 and heads of up to
    128 channels, 128 on compute capability 10 with FP4). Promoted blocks have Q·Kᵀ in 16 bit; P·V is in 16 bit in all
    of them. One softmax runs over both.

    Args:
        q: [B, S_q, H, D] fp16, bf16 or fp32, any strides, 1 <= D <= 256. For fp32 promoted blocks, P and V are bf16.
        k, v: [B, S_kv, H_kv, D], same dtype and device; H_kv divides H.
        options: formats, selector, budget and action. K is smoothed and balanced as `sage_attention` has it.
        causal: as in `sage_attention`. Masks, windows, soft caps, sinks and plans there are none.
        scale: softmax scale, a Python number >= 0; D ** -0.5 if None.
        return_lse: also return the log-sum-exp of the scaled scores, of those blocks that were computed.
        return_blocks: also return the blocks that the action was taken on.
    Returns: out [B, S_q, H, D] contiguous, in q.dtype; then lse [B, S_q, H] fp32, natural log, and blocks int8 (1:
        chosen) [B, H, row blocks, key blocks], where they are asked for. Rows that see nothing are 0, their lse -inf.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/mixed.py.
    Source: ThriftAttention (arXiv:2605.23081). Maths: docs/recipes.md.
    """
    wanted = (True, return_lse, return_blocks)
    key, results = made_before("mixed", (q, k, v), (options, causal, scale, return_lse, return_blocks))
    if results is None:
        check_mixed(q, k, v, options, causal, scale)
        causal = ("top_left" if causal else "") if isinstance(causal, bool) else causal
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        arguments = (q, k, v, scale, causal)
        if key is not None:
            results = remember(key, lambda: _compute(*arguments, options, return_lse, return_blocks), (q, k, v))
        else:
            op = torch.ops.sage_kernels.mixed_attention
            flat = (*arguments, options.base, options.selector, float(options.budget), options.action)
            if differentiates_forward():
                with without_tangents():
                    every = op(*flat)
            else:
                every = op(*flat)
            results = tuple(x for x, is_wanted in zip(every, wanted, strict=True) if is_wanted)
    return results[0] if sum(wanted) == 1 else tuple(results)


def _compute(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: str, options: Mixed, return_lse: bool,
    return_blocks: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """A checked call: out, and lse and blocks where they are asked for."""
    offset = k.shape[1] - q.shape[1] if causal == "bottom_right" else 0
    out, lse, blocks = _attend(q, k, v, scale, bool(causal), offset, options, return_lse, return_blocks)
    return tuple(x for x, wanted in ((out, True), (lse, return_lse), (blocks, return_blocks)) if wanted)


def _attend(q: Any, k: Any, v: Any, scale: float, causal: bool, offset: int, options: Mixed, *returned: bool) -> Any:
    if 0 in q.shape or 0 in k.shape:
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        return q.new_zeros(q.shape), lse, _new_blocks(q, k, options.base).zero_()
    if q.is_cuda:
        from .._triton.launch import compiled_together
        from .._triton.mixed.launch import launch_mixed_attention

        given: dict[str, Any] = {"options": options, "causal": causal, "offset": offset, "scale": scale}
        given |= dict(zip(("return_lse", "return_blocks"), returned, strict=True))
        return compiled_together(lambda: launch_mixed_attention(q, k, v, **given))
    out, lse, blocks = ref_mixed_attention(q, k, v, options=options, causal=causal, offset=offset, scale=scale)
    return out, lse, blocks.to(torch.int8)


def _new_blocks(q: torch.Tensor, k: torch.Tensor, base: str) -> torch.Tensor:
    rows = rows_of_block(q.device, base)
    shape = (q.shape[0], q.shape[2], (q.shape[1] + rows - 1) // rows, (k.shape[1] + BLOCK - 1) // BLOCK)
    return q.new_empty(shape, dtype=torch.int8)


def _of_op(*arguments: Any) -> Any:
    """What the dispatcher hands the op's checked arguments to."""
    check_called_below("mixed_attention")
    q, k, v, scale, causal, *options = arguments
    with torch.autocast(q.device.type, enabled=False):
        return _compute(q, k, v, scale, causal, Mixed(*options), True, True)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: str, base: str, *_: Any) -> Any:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32), _new_blocks(q, k, base)


for _device in ("CPU", "CUDA"):
    _library.impl("mixed_attention", _of_op, _device)
torch.library.register_fake("sage_kernels::mixed_attention", _fake, lib=_library)
