"""Read JSON from outside strictly, write plain data, and hash the configuration of a model.

Anything unexpected in a file raises ValueError. Arguments of the reading functions: `what` names the thing in the
message, `remedy` tells the user what to do.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any


# keys that transformers adds to a config and that are no property of the model
_NOT_OF_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "architectures")


def strict_json(text: bytes | str, what: str, remedy: str) -> dict:
    """Parse a JSON object. Repeated keys, NaN, and numbers beyond a float or an int64 raise ValueError."""

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
    except (ValueError, RecursionError) as error:  # ValueError covers bytes that are not UTF-8
        raise ValueError(f"path: got {error} in {what}, expected JSON; {remedy}") from error
    return strict_object(value, None, what, remedy)


def strict_object(value, fields: dict | None, what: str, remedy: str) -> dict:
    """Return `value` if it is a dict with exactly these fields of exactly these types.

    Args: fields: {name: type}; None allows any. Raises: ValueError.
    """
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
    """Return `value` as data for JSON: lists for tuples, and None for NaN and infinities."""
    if isinstance(value, dict):
        return {str(name): plain_data(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def some(names) -> str:
    """Return the first five names for a message, quoted and cut to 200 characters."""
    names = [repr(str(name)[:200]) for name in names]
    return "[" + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") + "]"


def config_hash(model) -> str:
    """Return the sha256, in hex, of a model's class name and public config.

    Files hold it to say for which model they were written, regardless of its weights.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        config = {k: v for k, v in config.to_dict().items() if k not in _NOT_OF_THE_MODEL}
    public = {k: v for k, v in dict(config).items() if not k.startswith("_")} if config is not None else {}
    text = json.dumps([model.__class__.__name__, public], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
