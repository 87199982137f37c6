"""Captures that failed: equal calls are not tried again, and the user is told once."""

from __future__ import annotations

import logging
from typing import Any

from .capture import CaptureError


logger = logging.getLogger("sage_processors")


class Failures:
    """Failed captures of a model's forwards, and of its blocks by their class and kind of call.

    Args: model: the class of the model.
    Attributes: lines: {name of a class: the line that made its capture fail}.
    """

    def __init__(self, model: type):
        self._model = model
        self._reasons: dict[Any, str] = {}
        self.lines: dict[str, str] = {}

    def forget(self) -> None:
        """Let all be tried again."""
        self._reasons.clear()

    def reason(self, kind_of_module: type, kind: tuple[Any, ...]) -> str:
        """Return the reason for which an equal call of a module of this class can't be captured, or ""."""
        return self._reasons.get(self._model if kind_of_module is self._model else (kind_of_module, kind), "")

    def note(self, kind_of_module: type, kind: tuple[Any, ...], error: CaptureError) -> None:
        """Remember a failed capture, and log the first of a class."""
        name = getattr(kind_of_module, "_sage_base", kind_of_module).__name__
        is_whole = kind_of_module is self._model
        if not (is_whole and error.reason == "memory"):  # a smaller picture may fit
            self._reasons[self._model if is_whole else (kind_of_module, kind)] = error.reason
        if name not in self.lines:
            logger.warning(
                "graphs: %s %s run eagerly from now on, as capturing one failed: %s%s",
                "forwards of" if is_whole else "blocks of class", name, error, f" ({error.line})" * bool(error.line),
            )  # fmt: skip
        self.lines[name] = error.line or str(error)
