"""Run a function's own code with another attention op: the same code, other globals.

Why this and not a re-implementation: every attention processor of diffusers calls the module-level names
`F.scaled_dot_product_attention` or `dispatch_attention_fn` directly, so replacing what these names mean is enough.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F

from ...patching.other_globals import scope_of, with_globals
from . import dispatcher


attention_dispatch = dispatcher.module()
dispatch_attention_fn = attention_dispatch.dispatch_attention_fn


class StandIns(NamedTuple):
    """What code gets to see instead of the module torch.nn.functional and of the two attention functions.

    other: a global -> what else it is replaced with, or None.
    """

    functional: types.ModuleType
    sdpa: types.FunctionType
    dispatch: types.FunctionType
    other: Callable[[object], object]


class _Functional(types.ModuleType):
    """torch.nn.functional with one function replaced; everything else is looked up there when it is used."""

    def __getattr__(self, name):
        return getattr(F, name)


def stand_ins(sdpa, dispatch, other=lambda value: None) -> StandIns:
    """Stand-ins that call `sdpa` and `dispatch`, which take the arguments of the originals."""
    functional: Any = _Functional("torch.nn.functional")
    functional.scaled_dot_product_attention = sdpa
    return StandIns(functional, sdpa, dispatch, other)


def _stand_in(value, names, ops: StandIns):
    """What the global `value` is replaced with, or None."""
    if value is F and "scaled_dot_product_attention" in names:
        return ops.functional
    if value is F.scaled_dot_product_attention:
        return ops.sdpa
    return ops.dispatch if value is dispatch_attention_fn else None


@functools.lru_cache(2048)
def _names_in(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """(instruction, name) of each instruction of `code` that has a name: layers of a model share a few functions."""
    return tuple((i.opname, i.argval) for i in dis.get_instructions(code) if isinstance(i.argval, str))


class Found(NamedTuple):
    """What the code of a function calls.

    Attributes: calls: of attention. replaced: globals to replace. helpers: functions of its module that call
        attention, by name. others: functions that `ops.other` stands in for.
    """

    calls: int = 0
    replaced: dict[str, object] = {}
    helpers: dict[str, types.FunctionType] = {}
    others: tuple[types.FunctionType, ...] = ()


def _scan(fn, ops: StandIns, scope: dict[str, Any], above=()) -> Found:
    """scope: the globals of `fn`, or a copy."""
    instructions = _names_in(fn.__code__)
    names = {name for _, name in instructions}
    calls = 0
    replaced: dict[str, object] = {}
    helpers: dict[str, types.FunctionType] = {}
    others: dict[str, object] = {}
    functions: tuple[Any, ...] = ()
    for opname, name in instructions:
        value = scope.get(name) if opname in ("LOAD_GLOBAL", "LOAD_NAME") else None
        stand_in = _stand_in(value, names, ops)
        if stand_in is not None:
            replaced[name] = stand_in
            calls += stand_in is not ops.functional
        elif opname in ("LOAD_ATTR", "LOAD_METHOD") and name == "scaled_dot_product_attention":
            calls += 1
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
    return Found(calls, replaced | others, helpers, functions) if replaced else Found()


class Bound(NamedTuple):
    """A function with stand-ins. Attributes: function. calls: of attention, in its code. made_of: the functions whose
    code, or code of ours in its place, runs when it is called. seen: the globals that it was made with."""

    function: types.FunctionType
    calls: int
    made_of: list[types.FunctionType]
    seen: dict[str, Any]


def rebind(fn, ops: StandIns) -> Bound:
    """`fn` with `ops` in place of the attention functions of torch and diffusers."""
    seen = dict(fn.__globals__)
    found = _scan(fn, ops, seen)
    scope = scope_of(seen, found.replaced)
    scope.update({name: with_globals(helper, scope) for name, helper in found.helpers.items()})
    return Bound(with_globals(fn, scope), found.calls, [fn, *found.helpers.values(), *found.others], seen)


_LOOK_ONLY = stand_ins(F.scaled_dot_product_attention, dispatch_attention_fn)


def attention_calls(fn) -> int:
    """Number of attention calls in a Python function's own code; 0 for anything else."""
    return _scan(fn, _LOOK_ONLY, fn.__globals__).calls if isinstance(fn, types.FunctionType) else 0
