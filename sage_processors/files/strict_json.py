"""JSON from outside, read strictly: what is not exactly as expected is a ValueError that names what to do.

`plain_data` is the way out. In all others: `what` names the thing for the message, `remedy` says what the user can do.
"""

from __future__ import annotations

import json
import math
from typing import Any


def strict_json(text: bytes | str, what: str, remedy: str) -> dict:
    """A JSON object, strictly: no repeated keys, no NaN, no number beyond what a float or an int64 holds."""

    def unique(pairs):
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise ValueError("a key that is there twice")
        return dict(pairs)

    def refuse(constant):
        raise ValueError(f"the constant {constant}")

    def finite(digits):
        number = float(digits)
        if math.isinf(number):
            raise ValueError(f"the number {digits[:20]}, beyond a float's range,")
        return number

    def whole(digits):
        number = int(digits)
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"the number {digits[:20]}… of {len(digits)} digits, beyond an int64's range,")
        return number

    hooks: dict[str, Any] = {
        "object_pairs_hook": unique,
        "parse_constant": refuse,
        "parse_float": finite,
        "parse_int": whole,
    }
    try:
        value = json.loads(str(text, "utf-8") if isinstance(text, bytes) else text, **hooks)
    except (ValueError, RecursionError) as error:  # includes bytes that are no UTF-8
        raise ValueError(f"path: got {error} in {what}, expected JSON; {remedy}") from error
    return strict_object(value, None, what, remedy)


def strict_object(value, fields: dict | None, what: str, remedy: str) -> dict:
    """`value` as a dict with exactly these fields of exactly these types."""
    if not isinstance(value, dict):
        raise ValueError(f"path: got {type(value).__name__} for {what}, expected an object; {remedy}")
    if fields is None:
        return value
    unknown, missing = sorted(set(value) - set(fields)), sorted(set(fields) - set(value))
    if unknown or missing:
        raise ValueError(
            f"path: got {what} with unknown keys {some(unknown)} and missing keys {some(missing)}, expected exactly "
            f"{sorted(fields)}; {remedy} and this version"
        )
    for name, kind in fields.items():
        if type(value[name]) is not kind:  # a bool is no int here
            raise ValueError(
                f"path: got {type(value[name]).__name__} for {name} of {what}, expected {kind.__name__}; {remedy}"
            )
    return value


def plain_data(value: Any) -> Any:
    """`value` with lists for tuples and None for NaN and infinities, which JSON has no words for."""
    if isinstance(value, dict):
        return {str(name): plain_data(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def some(names) -> str:
    """The first five names, quoted and cut, for a message."""
    names = [repr(str(name)[:200]) for name in names]
    return "[" + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") + "]"
