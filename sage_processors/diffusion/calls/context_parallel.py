"""Context parallelism: attention calls with tokens spread over several devices.

diffusers exchanges the tokens, and our attention runs on the gathered tensors. Ulysses: every device gets all tokens
of some of the heads. Ring: every device keeps its queries and gets the keys of one device after the other; the partial
results are merged by their log-sum-exp. That is the log-sum-exp of the original keys, not of the centred ones, so the
keys of each device may have their own centre.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..host import dispatcher
from .fallback import fallback_attention


# ((query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), return_lse) -> out, or (out, lse)
Attend = Callable[[tuple[Any, ...], bool], Any]


def degrees(parallel: Any) -> tuple[int, int]:
    """Return (ulysses_degree, ring_degree) of diffusers' ParallelConfig.

    ulysses_degree devices share the heads, ring_degree devices share the keys.
    """
    config = parallel.context_parallel_config
    return config.ulysses_degree, config.ring_degree


def first_head(parallel: Any, heads: int) -> int:
    """Return the index in the model of this device's first head, if each device computes `heads` of them."""
    rank = parallel.context_parallel_config._ulysses_local_rank
    return 0 if rank is None else int(rank) * heads


def run_in_parallel(call: tuple[Any, ...], return_lse: bool, parallel: Any, attend: Attend) -> Any:
    """Run attention of this device's tokens to those of all devices.

    Args: call: arguments up to `enable_gqa`, with this device's tokens; query [B, S, H, D]. attend: runs such a call
        on the tensors that diffusers gathered. parallel: diffusers' ParallelConfig.
    Returns: out [B, S, H, D] of this device's tokens, with return_lse also lse [B, S, H].
    Raises: NotImplementedError for a mask under ring attention; diffusers' errors for causal or grouped heads.
    """
    if call[3] is not None and degrees(parallel)[1] > 1:
        # diffusers would apply this device's part of the mask to the keys of every other device
        raise NotImplementedError(
            "attn_mask: got a mask together with ring attention, expected none: each device has only its own part of "
            "it; use Ulysses, ContextParallelConfig(ulysses_degree=...)"
        )

    def forward(ctx: Any, *arguments: Any, **options: Any) -> Any:
        *given, with_lse = arguments
        return attend(tuple(given), with_lse)

    return dispatcher.module()._templated_context_parallel_attention(
        *call, return_lse, forward_op=forward, backward_op=_no_backward, _parallel_config=parallel
    )


def sent_bytes(call: tuple[Any, ...], parallel: Any) -> int:
    """Return the bytes that this device sends for a call.

    Ulysses sends Q, K, V and the output; a ring sends K and V.
    """
    query, key, value = call[:3]
    ulysses, ring = degrees(parallel)
    by_head = (2 * query.numel() + key.numel() + value.numel()) * (ulysses - 1) // ulysses
    return int(query.element_size() * (by_head + (key.numel() + value.numel()) * (ring - 1)))


def run_fallback_in_parallel(call: tuple[Any, ...], parallel: Any) -> Any:
    """Run a call without quantisation, under ring attention too.

    diffusers' native back end can't do that: it returns no log-sum-exp.
    """
    return run_in_parallel(call, False, parallel, fallback_attention)


def _no_backward(ctx: Any, *arguments: Any, **options: Any) -> Any:
    raise NotImplementedError("INT8 attention has no backward across devices: call the model under torch.no_grad()")


def lengths_in_parallel(query: torch.Tensor, key: torch.Tensor, parallel: Any) -> tuple[int, int, int]:
    """Return (S_q, S_kv, heads): tokens of all devices, and the heads that one device computes.

    In a ring, too: so its parts are all long or all short, on each device.
    Args: query, key: [B, S, H, D], with this device's tokens.
    """
    ulysses, ring = degrees(parallel)
    devices = ulysses * ring
    return query.shape[1] * devices, key.shape[1] * devices, -(-query.shape[2] // ulysses)
