"""Runs a processor as in stock after a call of the same kind had only short attention.

A short call saves nothing in INT8, and a host that can't keep up loses more time in our Python around it than the GPU
has to spare. The first call of a kind tells; later ones run the original `__call__`, and are counted as before.
"""

from __future__ import annotations

from typing import Any

from ...patching.nested import UnknownValueError, kind_of
from ...postponed.region import current
from ..host.dispatcher import exact


MOST_KINDS = 64  # of calls of one processor; arguments that differ in every step must not add up


class ShortCalls:
    """The kinds of calls of one processor in which every attention call is short."""

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}  # kind → attention calls in it

    def kind(self, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the lengths of attention follow from: shapes of tensors, and plain values.

        None if a call must not be recognised: it has unknown arguments, layers around it may have postponed what it
        reads, its tokens are spread over devices, or the original would run our own back end.
        """
        backend = getattr(processor, "_attention_backend", None)
        if current() is not None or getattr(processor, "_parallel_config", None) is not None:
            return None
        if exact(backend) is not backend or "attn" in kwargs:
            return None
        try:
            return backend, kind_of((args[1:], kwargs))
        except UnknownValueError:
            return None

    def known(self, kind: Any) -> int:
        """Return the number of attention calls in calls of a kind known to be short; else 0."""
        return 0 if kind is None else self._calls.get(kind, 0)

    def note(self, kind: Any, calls: int, short: int) -> None:
        """Learn from a call of a kind, which made so many attention calls, and so many short ones."""
        if kind is not None and calls == short > 0 and len(self._calls) < MOST_KINDS:
            self._calls[kind] = short
