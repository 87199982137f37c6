"""Input tensors of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...postponed.tensor import version_of


class Places:
    """Inputs of all blocks' graphs, which share them as they run one after another."""

    def __init__(self) -> None:
        self._places: dict[tuple[Any, ...], torch.Tensor] = {}
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # place, what it was filled from, version

    @property
    def memory(self) -> int:
        """Bytes of GPU memory that they take."""
        return sum(x.numel() * x.element_size() for x in self._places.values())

    def of_a_call(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that gives each tensor of a block's call, in order, a place to be copied to."""
        taken = 0

        def place(x: torch.Tensor) -> torch.Tensor:
            nonlocal taken
            key = taken, x.shape, x.dtype, x.stride()
            taken += 1
            if key not in self._places:
                with torch.inference_mode(False):
                    self._places[key] = torch.empty_like(x)
            return self._places[key]

        return place

    def fill(self, places: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        """Copy tensors to a graph's inputs, except where they are since an earlier block of this forward."""
        for place, tensor in zip(places, tensors, strict=True):
            version, held = version_of(tensor), self._held.get(id(place))
            if held is not None and held[0] is place and held[1] is tensor and held[2] == version:
                continue
            place.copy_(tensor)
            if version is not None:
                self._held[id(place)] = place, tensor, version

    def end_forward(self) -> None:
        """Forget what they hold: the next forward copies anew."""
        self._held.clear()
