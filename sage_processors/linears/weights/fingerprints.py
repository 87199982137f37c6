"""Notices that a weight has changed, by a checksum of all its numbers or by a sample of them.

This is for writes that PyTorch does not count, such as those through `.data`. Reading all numbers at every run of a
pipeline would take longer than some of its steps, so a run reads a few.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


_NUMBERS = 64  # of a weight, in its sample


def checksum(weight: torch.Tensor) -> tuple[int, int]:
    """Return two integers that depend on all bits of a weight and their positions. Syncs."""
    size = weight.element_size()
    bits = weight.detach().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])
    rows, columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    place = torch.arange(1, max(bits.shape) + 1, device=weight.device)
    found = torch.stack([(rows * place[: len(rows)]).sum(), (columns * place[: len(columns)]).sum()])
    return tuple(found.tolist())


def sample_of(x: torch.Tensor) -> torch.Tensor:
    """Return up to 64 numbers along the diagonal of a weight [N, K], as a view."""
    (rows, columns), (down, right) = x.shape, x.stride()
    count = min(_NUMBERS, rows, columns)
    apart = max(count, 1)
    return x.as_strided((count,), (rows // apart * down + columns // apart * right,))


def are_changed(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return for each pair (sample now, sample before) if any bit differs.

    Samples are of shape [count]. Syncs once for all pairs of equal devices, dtypes and shapes.
    """
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
