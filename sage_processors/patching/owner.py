"""Marks on what we put into a model, so that what came along with a copy of it is known to be nobody's."""

from __future__ import annotations

import weakref
from typing import Any


class Owner:
    """Marks what one swap has put into a model and will take out again; a copy of the mark is nobody's.

    Attributes: is_there: the swap is live.
    """

    def __init__(self, swap: Any = None) -> None:
        self._swap = None if swap is None else weakref.ref(swap)
        self.is_there = True

    @property
    def swap(self) -> Any:
        """The live swap; None if there is none."""
        return self._swap() if self.is_there and self._swap is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()


def _nobody() -> Owner:
    owner = Owner()
    owner.is_there = False
    return owner


def is_left(mark: Any) -> bool:
    """True for an owner who will not take out what bears the mark."""
    return mark is None or not mark.is_there
