"""What is kept of the calls of one step for those of the next, beside statistics, and never beyond a run."""

from __future__ import annotations

import torch

from .row_maxima import RowMaxima
from .skip_lists import SkipLists


class KeptOfCalls:
    """Row maxima, and the lists of key tiles to skip where somebody wants them.

    Attributes: row_maxima. skip_lists: None until it is set.
    """

    def __init__(self) -> None:
        self.row_maxima = RowMaxima()
        self.skip_lists: SkipLists | None = None

    def _all(self) -> list[RowMaxima | SkipLists]:
        return [self.row_maxima] if self.skip_lists is None else [self.row_maxima, self.skip_lists]

    def next_step(self) -> None:
        """A step is done."""
        for kept in self._all():
            kept.next_step()

    def stop(self) -> None:
        """Keep nothing until somebody says where a run begins."""
        for kept in self._all():
            kept.stop()

    def clear(self) -> None:
        """Another run begins: the last step of a run says nothing of the first of the next."""
        for kept in self._all():
            kept.clear()

    def reset(self) -> None:
        """As `clear`, and all counts go."""
        self.clear()
        if self.skip_lists is not None:
            self.skip_lists.reset()

    def to(self, device: torch.device | str) -> None:
        """The model runs on `device` from now on."""
        self.clear()
        if self.skip_lists is not None:
            self.skip_lists.to(device)
