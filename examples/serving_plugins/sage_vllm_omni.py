"""INT8 attention with skipped key tiles for vLLM-Omni's SPARSE_ATTN slot. Not run inside of it.

The slot calls a function with Q, K and V and a dict that has the denoising step, but not the layer. So the n-th call
of a step reads the lists of the n-th call of the step before, as layers run in one order.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

import sage_kernels
from sage_kernels import new_head_state, new_skip_state


LIMIT_BYTES = 512 * 2**20  # of all lists; calls beyond it visit everything
LEAST_TILES = 8  # fewer key tiles are not worth a list


class Lists:
    """Skip lists of the calls of one model, by shape and by place among the calls of a step."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._calls: dict[tuple[Any, ...], int] = {}
        self._step, self._run, self._nbytes = -1, 0, 0

    def of(self, q: torch.Tensor, k: torch.Tensor, step: int, total: int | None, options: dict[str, Any]) -> Any:
        """Return the lists of a call, q [B, S_q, H, D] and k [B, S_kv, H_kv, D], or None if it visits everything.

        step: of `total`, from 0 on. A step before the one of the last call begins another run.
        """
        if step != self._step:
            self._run += step < self._step
            self._step, self._calls = step, {}
        every = int(options.get("every", 8))
        place = (q.shape, k.shape, q.device, every, bool(options.get("compensate", False)))
        number = self._calls[place] = self._calls.get(place, -1) + 1
        if (place, number) not in self._kept:
            batch, seq_q, heads, head_dim = q.shape
            lists = new_skip_state(
                batch, heads, seq_q, k.shape[1], head_dim, q.device, every=every, compensates=place[-1]
            )
            if self._nbytes + lists.nbytes > LIMIT_BYTES or k.shape[1] < LEAST_TILES * lists.block_k:
                lists = None  # kept, too, so that no later call makes them again
            self._kept[place, number] = lists
            self._nbytes += 0 if lists is None else lists.nbytes
        lists = self._kept[place, number]
        is_last = total is not None and total - step <= int(options.get("last_steps", 1))
        if lists is None or step < int(options.get("first_steps", 2)) or is_last:
            return None
        # a step of a later run is so much further on that all lists are void
        lists.now.fill_(self._run * (4096 + every) + step)
        lists.limit.fill_(float(options.get("limit", 0.01)))
        return lists


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.lists = Lists()


_of_thread = _OfThread()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: dict[str, Any],
    is_causal: bool,
    softmax_scale: float,
) -> torch.Tensor:
    """Run INT8 attention of query [B, S_q, H, D] over key and value [B, S_kv, H_kv, D]; returns [B, S_q, H, D].

    params: `denoise_step_idx` and `total_denoise_steps`, int tensors [B], from the server; and options of `sp.Skip`.
    What INT8 can't do runs PyTorch's attention.
    """
    if sage_kernels.unsupported(query, key, value, is_causal=is_causal) is not None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        ).transpose(1, 2)
    steps, totals = (_numbers(params.get(name)) for name in ("denoise_step_idx", "total_denoise_steps"))
    lists = None
    if len(steps) == 1 and not is_causal:  # a tile that is skipped is skipped for all samples' steps alike
        total = next(iter(totals)) if len(totals) == 1 else None
        lists = _of_thread.lists.of(query, key, next(iter(steps)), total, params)
    # lists want a state, for scales that a plan would keep; without one each call makes its own
    state = None if lists is None else new_head_state(key.shape[2], key.shape[3], key.device)
    return sage_kernels.sage_attention(
        query, key, value, causal=is_causal, scale=softmax_scale, skip=lists, state=state
    )


def _numbers(x: Any) -> set[int]:
    """Return the numbers in an int, a tensor, or None. Waits for the GPU."""
    if x is None:
        return set()
    return set(x.flatten().tolist()) if isinstance(x, torch.Tensor) else {int(x)}
