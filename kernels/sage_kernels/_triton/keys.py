"""Keys of kernels in Triton's cache: the same whatever a process launches first.

Before Triton 3.8 the key of a function holds the constants of those functions alone that it calls and that have a key
already. So it would depend on what was launched before, and compiled code would not be found in an archive, or in a
cache that a process with another order of launches filled.
"""

import dis
import inspect
import threading
import types
from collections.abc import Iterator
from typing import Any


_settled: dict[int, Any] = {}  # by id, which stays their own: a function's hash would ask for its key
_lock = threading.RLock()  # kernels are compiled in several threads


def settle_key(function: Any) -> None:
    """Give a kernel, or another function of Triton, its key after those of the functions that it calls."""
    with _lock:
        if id(function) in _settled:
            return
        _settled[id(function)] = function  # now, as a function may call itself
        for called in _called_functions(function):
            settle_key(called)
        getattr(function, "cache_key", None)


def _called_functions(function: Any) -> Iterator[Any]:
    """Yield the functions of Triton that a function's code names, in the order of their names."""
    body = getattr(function, "fn", None)
    if not isinstance(body, types.FunctionType):
        return
    scope = body.__globals__ | inspect.getclosurevars(body).nonlocals
    for name in sorted(_names(body.__code__)):
        found = scope.get(name)
        is_aggregate = getattr(found, "__triton_aggregate__", False)
        yield from (x for x in (found.hash_attrs if is_aggregate else (found,)) if hasattr(type(x), "cache_key"))


def _names(code: types.CodeType) -> set[str]:
    """Return the names outside of a function that its code reads; those of attributes are none."""
    read = {x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_DEREF")}
    return read.union(*(_names(x) for x in code.co_consts if isinstance(x, types.CodeType)))
