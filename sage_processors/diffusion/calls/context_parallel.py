"""Attention calls whose tokens are spread over devices: diffusers moves them about, our attention runs on the result.

Ulysses: every device gets all tokens of a part of the heads. Ring: every device keeps its queries, and gets the keys
of one device after the other; parts are merged by their log-sum-exp. The log-sum-exp is that of the keys as they are,
not of the smoothed ones, so each part may be smoothed by a vector of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..host import dispatcher
from .exact_with_lse import exact_part
from .int8_exchange import run_ulysses


# (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), whether with the log-sum-exp -> as wanted
Attend = Callable[[tuple[Any, ...], bool], Any]


def degrees(parallel: Any) -> tuple[int, int]:
    """(how many devices share the heads, how many share the keys) of a ParallelConfig of diffusers."""
    config = parallel.context_parallel_config
    return config.ulysses_degree, config.ring_degree


def first_head(parallel: Any, heads: int) -> int:
    """The first of the heads that this device computes, of those of the model, where each computes `heads`."""
    rank = parallel.context_parallel_config._ulysses_local_rank
    return 0 if rank is None else int(rank) * heads


def run_in_parallel(call: tuple[Any, ...], return_lse: bool, parallel: Any, attend: Attend) -> Any:
    """A call on this device's tokens, with those of all devices.

    Args: call: of this device's tokens, up to `enable_gqa`; query [B, S, H, D]. attend: runs such a call on tensors
        that diffusers gathered. parallel: diffusers' ParallelConfig.
    Returns: out [B, S, H, D] of this device's tokens, with return_lse also lse [B, S, H].
    Raises: NotImplementedError for a mask under ring attention; diffusers' errors for causal or grouped heads.
    """
    if call[3] is not None and degrees(parallel)[1] > 1:
        # it would lay this device's part of the mask over the keys of every other
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


def sends_codes(call: tuple[Any, ...], parallel: Any) -> bool:
    """Whether a call can be exchanged as INT8 codes: plain Ulysses, whole heads for each device, without a mask."""
    config = parallel.context_parallel_config
    ulysses, ring = degrees(parallel)
    is_plain = ring == 1 and ulysses > 1 and not getattr(config, "ulysses_anything", False)
    heads = [x.shape[2] for x in call[:3]]
    return is_plain and call[3] is None and not call[5] and heads == heads[:1] * 3 and heads[0] % ulysses == 0


def bytes_as_they_are(call: tuple[Any, ...], parallel: Any) -> int:
    """Bytes that this device sends for a call as diffusers exchanges it: Q, K, V and output, or K and V in a ring."""
    query, key, value = call[:3]
    ulysses, ring = degrees(parallel)
    by_head = (2 * query.numel() + key.numel() + value.numel()) * (ulysses - 1) // ulysses
    return int(query.element_size() * (by_head + (key.numel() + value.numel()) * (ring - 1)))


def run_with_codes(call: tuple[Any, ...], parallel: Any, attend: Attend) -> tuple[torch.Tensor, int]:
    """As `run_in_parallel` for calls that `sends_codes` allows, exchanged as INT8 codes; and the bytes sent."""
    group = parallel.context_parallel_config._ulysses_mesh.get_group()
    query, key, value, *others = call
    return run_ulysses(query, key, value, group, lambda q, k, v: attend((q, k, v, *others), False))


def run_exact_in_parallel(call: tuple[Any, ...], parallel: Any) -> Any:
    """As `run_in_parallel`, in exact attention: for ring attention where diffusers' own can't return a log-sum-exp."""
    return run_in_parallel(call, False, parallel, exact_part)


def _no_backward(ctx: Any, *arguments: Any, **options: Any) -> Any:
    raise NotImplementedError("INT8 attention has no backward across devices: call the model under torch.no_grad()")


def lengths_in_parallel(query: torch.Tensor, key: torch.Tensor, parallel: Any) -> tuple[int, int, int]:
    """(S_q, S_kv, heads) of the calls on one device, where query and key [B, S, H, D] are this device's tokens."""
    ulysses, _ = degrees(parallel)
    return query.shape[1] * ulysses, key.shape[1] * ulysses, -(-query.shape[2] // ulysses)
