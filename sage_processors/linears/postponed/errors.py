"""What 8-bit linear layers raise in a forward."""

from __future__ import annotations


class ChangedInputError(RuntimeError):
    """A tensor was changed in place between an operation and the use of its postponed result."""
