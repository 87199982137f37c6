"""A function's own code with other globals: what it calls by name is then something else, for this copy alone."""

from __future__ import annotations

import types
from typing import Any


def with_globals(fn: types.FunctionType, scope: dict[str, Any], closure: Any = None) -> types.FunctionType:
    """`fn` with these globals and, if given, this closure."""
    # an equal code object of its own: Dynamo keeps what it compiled with the code object, under names in the globals
    # of the function that it compiled, and would call it here, too
    code = fn.__code__.replace()
    copy = types.FunctionType(code, scope, fn.__name__, fn.__defaults__, closure or fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def scope_of(own: dict[str, Any], replaced: dict[str, Any]) -> dict[str, Any]:
    """The globals of a function, some of them replaced."""
    scope = own | replaced
    # Dynamo up to 2.13 resolves the globals of a function through the module of this name, not through its own dict
    scope.pop("__name__", None)
    return scope


def innermost(fn: Any) -> Any:
    """The function below its decorators."""
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    return fn


def with_global(fn: Any, name: str, value: Any) -> types.FunctionType | None:
    """`fn` where `name` means `value`, below its decorators, too. None where one of them is no function in Python, or
    does not hold what it decorates as functions do."""
    if not isinstance(fn, types.FunctionType):
        return None
    if not hasattr(fn, "__wrapped__"):
        return with_globals(fn, scope_of(fn.__globals__, {name: value}))
    inner = with_global(fn.__wrapped__, name, value)
    cells = fn.__closure__ or ()
    held = [_content(cell) is fn.__wrapped__ for cell in cells]
    if inner is None or not any(held):
        return None
    closure = tuple(types.CellType(inner) if is_inner else cell for cell, is_inner in zip(cells, held, strict=True))
    copy = with_globals(fn, fn.__globals__, closure)
    copy.__dict__.update(fn.__dict__, __wrapped__=inner)
    return copy


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None
