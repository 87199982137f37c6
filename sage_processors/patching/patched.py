"""Notices functions that somebody replaced: module globals, methods of classes, a function's code.

Profilers, adapters and other accelerators replace functions of libraries while a program runs. Code of a library that
we run in our own way stands for that code only as long as everything it looks up by name is what it was.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any


class Watch:
    """Names that code looks up while it runs, each with the object that it meant at first.

    Compared by identity, in C: about 60 ns a name.
    """

    def __init__(self, functions: Iterable[types.FunctionType] = (), methods: Iterable[tuple[Any, str]] = ()) -> None:
        """functions: as of `function`. methods: (class or module, name of an attribute), as of `attribute`."""
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._attributes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._lay_out()
        for fn in functions:
            self.function(fn)
        for cls, name in methods:
            self.attribute(cls, name)

    def function(self, fn: types.FunctionType, seen: dict[str, Any] | None = None) -> None:
        """Watch a function's code, the globals that it uses, and what it uses of modules (`F.linear`).

        Functions that it calls are not followed: add those whose code matters, too (`with_helpers`).
        seen: a copy of its globals, which holds what is compared with; None: they are looked up now.
        """
        self.attribute(fn, "__code__")
        for scope, name in _lookups(fn.__code__, fn.__globals__):
            was = (seen if seen is not None and scope is fn.__globals__ else scope).get(name)
            self._globals.setdefault((id(scope), name), (scope, name, was))
        self._lay_out()

    def attribute(self, owner: Any, name: str) -> None:
        """Watch an attribute that is the same object each time: of a module, or a class's method, also where a base
        class has it."""
        if isinstance(owner, types.ModuleType):
            scope = vars(owner)
            self._globals.setdefault((id(scope), name), (scope, name, scope.get(name)))
        else:
            self._attributes.setdefault((id(owner), name), (owner, name, getattr(owner, name, None)))
        self._lay_out()

    def _lay_out(self) -> None:
        self._columns = [list(zip(*x.values(), strict=True)) for x in (self._globals, self._attributes)]

    def functions(self) -> list[types.FunctionType]:
        """The functions in Python that were put on the watch."""
        places = (*self._globals.values(), *self._attributes.values())
        return [was for _, _, was in places if isinstance(was, types.FunctionType)]

    def changed(self) -> bool:
        """True if one of the names means something else now."""
        scopes, attributes = self._columns
        if scopes and not all(map(operator.is_, map(dict.get, scopes[0], scopes[1]), scopes[2])):
            return True
        return bool(attributes) and not all(
            map(operator.is_, map(getattr, attributes[0], attributes[1], repeat(None)), attributes[2])
        )

    def names(self) -> list[str]:
        """Full names of what means something else now: "diffusers.models.transformers.transformer_flux.apply_…"."""
        found = [
            f"{s.get('__name__', '?')}.{name}" for s, name, was in self._globals.values() if s.get(name) is not was
        ]
        for owner, name, was in self._attributes.values():
            if getattr(owner, name, None) is not was:
                found.append(f"{owner.__module__}.{owner.__qualname__}.{name}")
        return found


def with_helpers(fn: types.FunctionType) -> list[types.FunctionType]:
    """Return a function and all functions of its module that it uses, directly or through others."""
    found = {fn: None}
    left = [fn]
    while left:
        for scope, name in _lookups(left.pop().__code__, fn.__globals__):
            value = scope.get(name)
            if isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__ and value not in found:
                found[value] = None
                left.append(value)
    return list(found)


def _lookups(code: types.CodeType, scope: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(dictionary, name) of everything that the code looks up there: globals, and attributes of modules."""
    for chain in _chains(code):
        where = scope
        for name in chain:
            if where is not scope and name not in where:
                break  # a module that makes its attributes when they are asked for
            yield where, name
            found = where.get(name)
            if not isinstance(found, types.ModuleType):
                break
            where = vars(found)


@functools.lru_cache(2048)
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Global names and attributes behind them, ("torch", "nn", "functional"), of a code object and those in it."""
    chains: list[list[str]] = []
    goes_on = False
    for instruction in dis.get_instructions(code):
        if instruction.opname == "EXTENDED_ARG":
            continue
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains.append([instruction.argval])
            goes_on = True
        elif goes_on and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1].append(instruction.argval)
        else:
            goes_on = False
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return tuple(dict.fromkeys([*map(tuple, chains), *(chain for nested in inner for chain in _chains(nested))]))
