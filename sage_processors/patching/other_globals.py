"""Copies of functions with the same code and other globals.

Names that the code looks up then mean something else, in the copy alone.
"""

from __future__ import annotations

import types
from typing import Any


def with_globals(
    fn: types.FunctionType, scope: dict[str, Any], closure: Any = None, code: types.CodeType | None = None
) -> types.FunctionType:
    """Return a copy of `fn` with these globals and, if given, this closure and this code."""
    # The copy needs a code object of its own. Dynamo stores compiled code with the code object, under names in the
    # globals of the original, and would run that compiled code for the copy too.
    code = (code or fn.__code__).replace()
    copy = types.FunctionType(code, scope, fn.__name__, fn.__defaults__, closure or fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def scope_of(own: dict[str, Any], replaced: dict[str, Any]) -> dict[str, Any]:
    """Return a function's globals with some of them replaced."""
    scope = own | replaced
    # Dynamo up to torch 2.13 looks up a function's globals in the module of this name instead of in this dict.
    scope.pop("__name__", None)
    return scope


def innermost(fn: Any) -> Any:
    """Return the function inside all of its decorators."""
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    return fn


def with_global(fn: Any, name: str, value: Any) -> types.FunctionType | None:
    """Return a copy of `fn` in which the global `name` means `value`, inside its decorators too.

    Returns None if a decorator is no Python function, or doesn't hold the decorated function in its closure.
    """
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
    except ValueError:  # an empty cell
        return None
