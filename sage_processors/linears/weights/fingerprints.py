"""Whether weights still are what was quantised, as a few of their numbers tell.

For writes that PyTorch does not count, through `.data` above all. To look at all numbers at every run of a pipeline
would take longer than some of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


_NUMBERS = 64  # of a weight


def checksum(weight: torch.Tensor) -> tuple[int, int]:
    """Two numbers that change with any of the weight's bits, and with their places. Syncs."""
    size = weight.element_size()
    bits = weight.detach().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])
    rows, columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    place = torch.arange(1, max(bits.shape) + 1, device=weight.device)
    found = torch.stack([(rows * place[: len(rows)]).sum(), (columns * place[: len(columns)]).sum()])
    return tuple(found.tolist())


def sample_of(x: torch.Tensor) -> torch.Tensor:
    """Numbers along the diagonal of a weight [N, K], each of another row and another column: a view."""
    (rows, columns), (down, right) = x.shape, x.stride()
    count = min(_NUMBERS, rows, columns)
    apart = max(count, 1)
    return x.as_strided((count,), (rows // apart * down + columns // apart * right,))


def are_changed(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Of each (sample as it is, sample as it was), both [count]: whether a bit differs. Syncs once for all alike."""
    groups: dict[tuple, list[int]] = {}
    found = [True] * len(pairs)
    for i, (now, before) in enumerate(pairs):
        if (now.dtype, now.shape) == (before.dtype, before.shape):
            groups.setdefault((now.device, before.device, now.dtype, now.shape), []).append(i)
    for members in groups.values():
        now, before = (torch.stack([pairs[i][side] for i in members]) for side in (0, 1))
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[now.element_size()]
        differ = (now.view(bits) != before.to(now.device).view(bits)).any(1).tolist()
        for i, is_changed in zip(members, differ, strict=True):
            found[i] = is_changed
    return found
