"""Latents for training the transformer, encoded in advance and replaced gradually as training goes on."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LatentPool:
    """Chunks of latents and the rows of their captions; every `every` steps one chunk is drawn anew, in turn.

    What it holds at a step is a function of the step, also in a session that starts there.

    Args: make(chunk, renewal): latents [n, channels, t, h, w] and rows int64 [n]; renewal: which one it is, 0 for the
        first of each chunk, else counted over all chunks.
    """

    def __init__(self, make: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]], chunks: int, every: int):
        self.make, self.chunks, self.every = make, chunks, every
        self.renewals = -1  # made so far; -1: nothing is there
        self.latents = self.rows = torch.empty(0)

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and rows of all chunks, which the next renewal overwrites."""
        wanted = step // self.every
        if self.renewals < 0:
            made = [self.make(chunk, self._newest(chunk, wanted)) for chunk in range(self.chunks)]
            self.latents, self.rows = (torch.cat(parts) for parts in zip(*made, strict=True))
        else:
            for renewal in range(max(self.renewals, wanted - self.chunks) + 1, wanted + 1):
                chunk = (renewal - 1) % self.chunks
                latents, rows = self.make(chunk, renewal)
                place = slice(chunk * len(rows), (chunk + 1) * len(rows))
                self.latents[place], self.rows[place] = latents, rows
        self.renewals = wanted
        return self.latents, self.rows

    def _newest(self, chunk: int, wanted: int) -> int:
        """The last of `wanted` renewals that was this chunk's, 0: none."""
        return max(0, wanted - (wanted - 1 - chunk) % self.chunks)
