"""What tools do to functions of a library: another one in its place, which is known by what it returns."""

from __future__ import annotations

import functools


def mixed_up(function):
    """A function without a trace of the one that it stands in for."""

    def patched(*args, **kwargs):
        first, *others = function(*args, **kwargs)
        return (first + first.roll(1, -1) / 2, *others)  # a factor alone would not survive Gemma's norms

    return patched


def as_profilers_do(function):
    """The same, which says what it stands in for."""
    return functools.wraps(function)(mixed_up(function))
