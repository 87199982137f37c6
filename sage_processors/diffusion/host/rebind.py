"""Rebind a function: the same code with other globals, so that it calls our attention functions.

This replaces a re-implementation of every attention processor in diffusers. They all call the module-level names
`F.scaled_dot_product_attention` or `dispatch_attention_fn`, so it is enough to change the meaning of these names.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...patching.other_globals import scope_of, with_globals
from . import dispatcher, valid_tokens


attention_dispatch = dispatcher.module()
dispatch_attention_fn = attention_dispatch.dispatch_attention_fn


class StandIns(NamedTuple):
    """The replacements for torch.nn.functional and for the two attention functions.

    torch: replaces torch in code that calls torch.nonzero. other: maps any other global to its replacement, or to None
    if it stays. nested: maps (code, its globals) to code with replacements of functions that it defines itself, and
    the globals which these need.
    """

    functional: types.ModuleType
    torch: types.ModuleType
    sdpa: types.FunctionType
    dispatch: types.FunctionType
    other: Callable[[object], object]
    nested: Callable[[types.CodeType, dict[str, Any]], tuple[types.CodeType, dict[str, Any]]]


class _Functional(types.ModuleType):
    """A copy of torch.nn.functional with one function replaced. Looks everything else up there on use."""

    def __getattr__(self, name):
        return getattr(F, name)


class _Torch(types.ModuleType):
    """A copy of torch with one function replaced. Looks everything else up there on use."""

    def __getattr__(self, name):
        return getattr(torch, name)


def stand_ins(sdpa, dispatch, other=lambda value: None, nested=lambda code, scope: (code, {})) -> StandIns:
    """Return stand-ins that call `sdpa` and `dispatch` with the arguments of the original functions."""
    functional: Any = _Functional("torch.nn.functional")
    functional.scaled_dot_product_attention = sdpa
    whole: Any = _Torch("torch")
    whole.nonzero = valid_tokens.nonzero
    return StandIns(functional, whole, sdpa, dispatch, other, nested)


def _stand_in(value, names, ops: StandIns):
    """Return the replacement of a global's value; None if it stays."""
    if value is F and "scaled_dot_product_attention" in names:
        return ops.functional
    if value is F.scaled_dot_product_attention:
        return ops.sdpa
    return ops.dispatch if value is dispatch_attention_fn else None


@functools.lru_cache(2048)
def _names_in(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """Return (instruction, name) of each instruction with a name. Cached: layers share few functions."""
    return tuple((i.opname, i.argval) for i in dis.get_instructions(code) if isinstance(i.argval, str))


class Found(NamedTuple):
    """The attention calls and globals found in the code of a function.

    Attributes:
        calls: number of attention calls.
        replaced: globals to replace, by name.
        helpers: functions of the same module that call attention, by name.
        others: functions replaced by `StandIns.other`.
        reads_masks: the code asks torch.nonzero which tokens of a mask are valid.
    """

    calls: int = 0
    replaced: dict[str, object] = {}
    helpers: dict[str, types.FunctionType] = {}
    others: tuple[types.FunctionType, ...] = ()
    reads_masks: bool = False


def _scan(fn, ops: StandIns, scope: dict[str, Any], above=()) -> Found:
    """Find the attention calls of a function and of its helpers. scope: its globals, or a copy."""
    instructions = _names_in(fn.__code__)
    names = {name for _, name in instructions}
    calls = 0
    replaced: dict[str, object] = {}
    helpers: dict[str, types.FunctionType] = {}
    others: dict[str, object] = {}
    functions: tuple[Any, ...] = ()
    reads_masks = False
    for opname, name in instructions:
        value = scope.get(name) if opname in ("LOAD_GLOBAL", "LOAD_NAME") else None
        stand_in = _stand_in(value, names, ops)
        if stand_in is not None:
            replaced[name] = stand_in
            calls += stand_in is not ops.functional
        elif opname in ("LOAD_ATTR", "LOAD_METHOD") and name == "scaled_dot_product_attention":
            calls += 1
        elif value is torch and "nonzero" in names:
            others[name], reads_masks = ops.torch, True
        elif value is not None and (stand_in := ops.other(value)) is not None:
            others[name] = stand_in
            functions += (value,)
        elif isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__ and value not in above:
            inner = _scan(value, ops, scope, (*above, fn))
            if inner.calls:
                calls += inner.calls
                replaced |= inner.replaced
                helpers |= inner.helpers | {name: value}
                functions += inner.others
                reads_masks |= inner.reads_masks
    return Found(calls, replaced | others, helpers, functions, reads_masks) if replaced else Found()


class Bound(NamedTuple):
    """A rebound function.

    Attributes:
        function: the code with stand-ins.
        calls: number of attention calls in the code.
        made_of: the original functions that it runs, or that a stand-in replaces.
        seen: the globals it was made with.
        reads_masks: as in Found.
        has_nested: `StandIns.nested` replaced a function.
        imported: (module, name) of what the code imports when it runs.
    """

    function: types.FunctionType
    calls: int
    made_of: list[types.FunctionType]
    seen: dict[str, Any]
    reads_masks: bool
    has_nested: bool
    imported: list[tuple[types.ModuleType, str]]


def rebind(fn, ops: StandIns) -> Bound:
    """Return a function's code with stand-ins for the attention functions of torch and diffusers."""
    seen = dict(fn.__globals__)
    found = _scan(fn, ops, seen)
    scope = scope_of(seen, found.replaced)
    scope.update({name: with_globals(helper, scope) for name, helper in found.helpers.items()})
    made_of = [fn, *found.helpers.values(), *found.others]
    code, added = ops.nested(fn.__code__, seen) if found.calls else (fn.__code__, {})
    scope.update(added)
    imported = list(_imported(fn.__code__, seen)) if found.calls else []
    values = [vars(module).get(name) for module, name in imported]
    if any(value is not None and ops.other(value) is not None for value in values):
        scope["__builtins__"] = _with_imports(seen["__builtins__"], ops)
    function = with_globals(fn, scope, code=code)
    return Bound(function, found.calls, made_of, seen, found.reads_masks, bool(added), imported)


def _imported(code: types.CodeType, scope: dict[str, Any]) -> Iterator[tuple[types.ModuleType, str]]:
    """Yield (module, name) of each `from module import name` in the code.

    Modules that nobody has imported so far are left out.
    """
    instructions = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
    for level, names, statement in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if statement.opname != "IMPORT_NAME" or type(names.argval) is not tuple or type(level.argval) is not int:
            continue
        try:
            full = importlib.util.resolve_name("." * level.argval + statement.argval, scope.get("__package__"))
        except (ImportError, ValueError):
            continue
        module = sys.modules.get(full)
        if type(module) is types.ModuleType:
            yield from ((module, name) for name in names.argval)


def _with_imports(own: Any, ops: StandIns) -> dict[str, Any]:
    """Return built-in names with an import statement that gets stand-ins. own: those of the code as it is."""
    names_of_own = vars(own) if isinstance(own, types.ModuleType) else own
    own_import = names_of_own["__import__"]

    def importing(name, globals=None, locals=None, fromlist=(), level=0):
        module = own_import(name, globals, locals, fromlist, level)
        found = {each: vars(module).get(each) for each in fromlist or ()}
        functions = {each: value for each, value in found.items() if isinstance(value, types.FunctionType)}
        replaced = {each: made for each, value in functions.items() if (made := _stand_in_of(value, ops)) is not None}
        if not replaced:
            return module
        names = types.ModuleType(module.__name__)  # IMPORT_FROM raises an ImportError for what it lacks
        vars(names).update({each: getattr(module, each) for each in found if hasattr(module, each)} | replaced)
        return names

    return {**names_of_own, "__import__": importing}


@functools.lru_cache(64)
def _stand_in_of(value: Any, ops: StandIns) -> Any:
    return ops.other(value)


_LOOK_ONLY = stand_ins(F.scaled_dot_product_attention, dispatch_attention_fn)


def attention_calls(fn) -> int:
    """Return the number of attention calls in a Python function's code; 0 for any other object."""
    return _scan(fn, _LOOK_ONLY, fn.__globals__).calls if isinstance(fn, types.FunctionType) else 0
