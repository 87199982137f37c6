"""Detect functions that others replaced, and mark objects put into a model by our own swaps.

Profilers, adapters and other accelerators replace functions of libraries while a program runs: module globals, methods
of classes, or a function's code. Where we run a library's code in our own way, that is correct only while every name
that the code looks up still means the same.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

from torch import nn


class Watch:
    """Names in the code of functions, each with the object that it first meant.

    Objects are compared by identity, in C: about 60 ns for each name.
    """

    def __init__(self, functions: Iterable[types.FunctionType] = (), methods: Iterable[tuple[Any, str]] = ()) -> None:
        """Watch some functions and attributes.

        Args: functions: each as in `function`. methods: (class or module, attribute name), each as in `attribute`.
        """
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._attributes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._columns: list[list[Any]] | None = None  # of the two above, for comparisons; made when they are needed
        for fn in functions:
            self.function(fn)
        for cls, name in methods:
            self.attribute(cls, name)

    def function(self, fn: types.FunctionType, seen: dict[str, Any] | None = None) -> None:
        """Watch a function's code, the globals that it uses, and attributes of modules such as `F.linear`.

        The code of functions that it calls is not watched. Add these too, if they matter (`with_helpers`).
        Args: seen: an earlier copy of its globals to compare with; None looks them up now.
        """
        self.attribute(fn, "__code__")
        for scope, name in _lookups(fn.__code__, fn.__globals__):
            was = (seen if seen is not None and scope is fn.__globals__ else scope).get(name)
            self._globals.setdefault((id(scope), name), (scope, name, was))
        self._columns = None

    def attribute(self, owner: Any, name: str) -> None:
        """Watch an attribute of a module, or a method of a class, inherited ones included.

        Each access must give the same object.
        """
        if isinstance(owner, types.ModuleType):
            self.item(vars(owner), name)
        else:
            self._attributes.setdefault((id(owner), name), (owner, name, getattr(owner, name, None)))
            self._columns = None

    def item(self, scope: dict[str, Any], name: str) -> None:
        """Watch an item of a dictionary, such as the one that holds an object's attributes."""
        self._globals.setdefault((id(scope), name), (scope, name, scope.get(name)))
        self._columns = None

    def functions(self) -> list[types.FunctionType]:
        """Return the watched objects that are functions in Python."""
        places = (*self._globals.values(), *self._attributes.values())
        return [was for _, _, was in places if isinstance(was, types.FunctionType)]

    def changed(self) -> bool:
        """True if one of the names now means another object."""
        if self._columns is None:
            self._columns = [list(zip(*x.values(), strict=True)) for x in (self._globals, self._attributes)]
        scopes, attributes = self._columns
        if scopes and not all(map(operator.is_, map(dict.get, scopes[0], scopes[1]), scopes[2])):
            return True
        return bool(attributes) and not all(
            map(operator.is_, map(getattr, attributes[0], attributes[1], repeat(None)), attributes[2])
        )

    def names(self) -> list[str]:
        """Return the full names that now mean another object.

        Such as "diffusers.models.transformers.transformer_flux.apply_rotary_emb".
        """
        found = [
            f"{s.get('__name__', '?')}.{name}" for s, name, was in self._globals.values() if s.get(name) is not was
        ]
        for owner, name, was in self._attributes.values():
            if getattr(owner, name, None) is not was:
                found.append(f"{owner.__module__}.{owner.__qualname__}.{name}")
        return found


def code_of(kinds: Iterable[Any], names: Iterable[str], is_followed: Callable[[Any], bool]) -> Watch:
    """Watch methods of classes, and all functions and methods that they use, directly or through others.

    Args:
        kinds: classes. names: of their methods to begin with; a class may lack some.
        is_followed(function): True if what a function uses is watched too.
    """
    watch, done = Watch(), set[Any]()
    left = [(kind, name) for kind in kinds for name in names if hasattr(kind, name)]
    for kind, name in left:  # grows
        if (kind, name) in done:
            continue
        done.add((kind, name))
        watch.attribute(kind, name)
        functions = [*_with_wrapped(getattr(kind, name))]
        for fn in functions:  # grows
            if fn in done or not isinstance(fn, types.FunctionType) or not is_followed(fn):
                continue
            done.add(fn)
            watch.function(fn)
            left += [(kind, used) for used in methods_used(kind, fn)]
            used = (scope.get(name) for scope, name in _lookups(fn.__code__, fn.__globals__))
            functions += [inner for value in used for inner in _with_wrapped(value)]
    return watch


def _with_wrapped(function: Any) -> Iterator[Any]:
    """Yield a function and those that its decorators wrapped."""
    while isinstance(function, types.FunctionType):
        yield function
        function = getattr(function, "__wrapped__", None)


def methods_used(kind: type, fn: types.FunctionType) -> list[str]:
    """Return the names of a class's own methods that the code of a function looks up."""
    return [name for name in _attributes(fn.__code__) if _is_own_method(kind, name)]


def _is_own_method(kind: type, name: str) -> bool:
    """Return True for a function that a class or one of its bases defines, but not nn.Module."""
    for base in kind.__mro__:
        if base is nn.Module:
            return False
        if name in vars(base):
            return isinstance(vars(base)[name], types.FunctionType)
    return False


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
    """Yield (dictionary, name) of each global and module attribute that the code looks up."""
    for chain in _chains(code):
        where = scope
        for name in chain:
            if where is not scope and name not in where:
                break  # a module with lazy attributes (PEP 562)
            yield where, name
            found = where.get(name)
            if not isinstance(found, types.ModuleType):
                break
            where = vars(found)


@functools.lru_cache(2048)
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return chains of a global name and its attributes, such as ("torch", "nn", "functional").

    Of a code object and all code objects nested in it.
    """
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


@functools.lru_cache(2048)
def _attributes(code: types.CodeType) -> frozenset[str]:
    """Return the names of all attributes that a code object looks up, and those nested in it."""
    own = {x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(own.union(*(_attributes(x) for x in code.co_consts if isinstance(x, types.CodeType))))


class Owner:
    """Mark on objects that a swap put into a model and will take out again.

    Copying or pickling a model copies the mark as one without a live swap. So what came along with a copy is known to
    be left over.

    Attributes: is_there: the swap is live.
    """

    def __init__(self, swap: Any = None) -> None:
        self._swap = None if swap is None else weakref.ref(swap)
        self.is_there = True

    @property
    def swap(self) -> Any:
        """Return the live swap, or None."""
        return self._swap() if self.is_there and self._swap is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _owner_without_swap, ()


def _owner_without_swap() -> Owner:
    owner = Owner()
    owner.is_there = False
    return owner


def is_left(mark: Any) -> bool:
    """True if no live swap will take out an object with this mark."""
    return mark is None or not mark.is_there
