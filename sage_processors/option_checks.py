"""Checks of single option values, with messages of the same form."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Collection, Iterable
from typing import Any, TypeVar


Class = TypeVar("Class", bound=type)


def number(name: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {type(value).__name__}, expected {expected}")
    if not abs(value) <= sys.float_info.max:  # an int may be beyond it
        raise ValueError(f"{name}: got {short(value)}, expected {expected}, finite")
    return value


def short(number: int | float) -> str:
    """A number for a message: not all the digits of an int that has thousands."""
    if isinstance(number, int) and number.bit_length() > 100:
        return f"an int of {number.bit_length()} bits"
    return str(number)


def whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int >= {least}")
    if not least <= value < 2**63:
        raise ValueError(f"{name}: got {short(value)}, expected at least {least}, and an int64")


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a bool")


def one_of(name: str, value: object, allowed: Collection[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {type(value).__name__}, expected one of {sorted(allowed)}")
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, expected one of {sorted(allowed)}{close_to(value, allowed)}")


def close_to(name: object, known: Collection[str]) -> str:
    """The end of a message that names the known name closest to a mistyped one, or ""."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; the closest is {close[0]!r}" if close else ""


def known_options(name: str, given: Iterable[object], known: Collection[str]) -> None:
    """Raise TypeError for an option that is not known, naming the closest one."""
    for key in given:
        if key not in known:
            raise TypeError(f"{name}: got the unknown option {key!r}, expected some of {known}{close_to(key, known)}")


def with_known_options(kind: Class) -> Class:
    """Let a class refuse keywords as `known_options` does, in place of Python's own message."""
    init: Any = kind.__init__  # type: ignore[misc]
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        known_options(kind.__name__, options, known)
        init(self, *args, **options)

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def span(name: str, value: Any) -> tuple[float, ...]:
    """() or (low, high), floats with 0 <= low < high <= 1."""
    expected = "() or (low, high), noise levels from 0 to 1"
    if not isinstance(value, (tuple, list)) or len(value) not in (0, 2):
        raise TypeError(f"{name}: got {value!r}, expected {expected}")
    if any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in value):
        raise TypeError(f"{name}: got {value!r}, expected {expected}")
    if value and not 0 <= value[0] < value[1] <= 1:  # not so for NaN either
        got = ", ".join(short(x) for x in value)
        raise ValueError(f"{name}: got ({got}), expected {expected}, low < high")
    return tuple(float(x) for x in value)


def limits(name: str, value: Any, ranges: int) -> float | tuple[float, ...]:
    """A share of probability, 0 <= limit < 1, or a tuple with one for each range of noise levels."""
    expected = f"a share of probability, 0 <= limit < 1, or a tuple of {ranges}"
    many = isinstance(value, (tuple, list))
    for limit in value if many else (value,):
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise TypeError(f"{name}: got {str(limit)[:200]!r}, expected {expected}")
        if not 0 <= limit < 1:  # NaN fails this, too
            raise ValueError(f"{name}: got {short(limit)}, expected {expected}")
    if many and len(value) != ranges:
        raise ValueError(
            f"{name}: got {len(value)} limits, expected one, or one for each of the {ranges} ranges between the "
            "borders of Skip.noise"
        )
    return tuple(float(limit) for limit in value) if many else float(value)


def borders(name: str, value: Any, most: int) -> tuple[float, ...]:
    """Noise levels, ascending, 0 < level < 1, at most so many."""
    expected = f"up to {most} noise levels between 0 and 1, ascending"
    if not isinstance(value, (tuple, list)) or not all(type(x) in (int, float) for x in value):
        raise TypeError(f"{name}: got {str(value)[:200]}, expected a tuple of {expected}")
    found = tuple(value)
    ascends = all(a < b for a, b in zip((0.0, *found), (*found, 1.0), strict=True))
    if len(found) > most or not ascends:  # not so for NaN either
        raise ValueError(f"{name}: got ({', '.join(short(x) for x in found[:5])}), expected {expected}")
    return tuple(float(x) for x in found)
