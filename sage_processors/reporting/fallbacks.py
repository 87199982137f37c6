"""Calls that fall back to 16 bit: slots of their counters, and one log line for each layer and reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping


logger = logging.getLogger("sage_processors")


class Fallbacks:
    """Events that counters of one kind count, and the log of the reasons among them.

    Args:
        events: names of a counter's events, with "other" for those of another name.
        message: of the log, with three %s: layer, reason, and "; remedy" or nothing.
        remedies: {reason: what a user can do}.
    Attributes: slots: {event: its place in a counter}. logged: pairs (layer, reason) that were logged.
    """

    def __init__(self, events: tuple[str, ...], message: str, remedies: Mapping[str, str]):
        self.slots = {name: i for i, name in enumerate(events)}
        self.message, self.remedies = message, remedies
        self.logged: set[tuple[object, str]] = set()

    def slot(self, event: str) -> int:
        """Return the place of an event in a counter."""
        return self.slots.get(event, self.slots["other"])

    def log(
        self, layer: str, reason: str, *, key: object = None, remedy: str = "", more: str = "", level: int = 0
    ) -> None:
        """Log a reason once for each layer: the first layer as a warning, others at debug level.

        Args: key: tells layers of equal names apart. remedy: instead of the usual one. more: said behind the reason.
            level: of the line, if not as above.
        """
        known = (key or layer, reason)
        if known not in self.logged:
            is_first = all(seen != reason for _, seen in self.logged)
            self.logged.add(known)
            remedy = remedy or self.remedies.get(reason, "")
            level = level or (logging.WARNING if is_first else logging.DEBUG)
            logger.log(level, self.message, layer, reason + more, f"; {remedy}" if remedy else "")
