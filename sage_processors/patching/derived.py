"""Derived classes that give a module another forward, and the way back to its own class."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn


if TYPE_CHECKING:
    _Beside = nn.Module
else:
    _Beside = object


class Derived(_Beside):
    """Mixin of derived classes. Copies and pickles of a module have its derived class, too.

    Attributes:
        _sage_base: the class that the module had.
        _derive: the function that derives a class from another one, None if it can't.
    """

    _sage_base: type
    _derive: Callable[[Any], type | None]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kind = type(self)
        return _rebuild, (kind._derive, kind._sage_base), self.__dict__


def _rebuild(derive: Callable[[Any], type | None], base: type) -> Any:
    """Make an empty module of the derived class, for copy and pickle."""
    return object.__new__(derive(base) or base)


def derived(mixin: type, base: Any, forward: Callable[..., Any], derive: Callable[[Any], type | None]) -> Any:
    """Return a subclass of `mixin` and `base` with this forward. derive: the function that calls this one."""
    members = {"forward": forward, "_sage_base": base, "_derive": staticmethod(derive)}
    members |= {"__doc__": base.__doc__, "__module__": mixin.__module__}
    return type("Sage" + base.__name__, (mixin, base), members)


def put_class(module: Any, cls: Any) -> None:
    """Give a module another class. Hooks of accelerate and diffusers that hold its forward follow.

    A class that was derived from ours for one module, as by a parametrization, stays and gets another base.
    """
    now: Any = type(module)
    old, new = now.forward, cls.forward
    if issubclass(now, Derived) and "_sage_base" not in now.__dict__:
        now.__bases__ = (cls,)
    else:
        module.__class__ = cls
    own = module.__dict__
    for name in ("forward", "_old_forward"):
        if name in own:
            own[name] = _rebound(own[name], module, old, new)
    hooks = own.get("_diffusers_hook")
    for reference in getattr(hooks, "_fn_refs", ()):
        for name in ("forward", "original_forward"):
            setattr(reference, name, _rebound(getattr(reference, name), module, old, new))


def derive_class(module: Any, derive: Callable[[Any], type | None]) -> None:
    """Give a module the class that `derive` makes of its own."""
    put_class(module, derive(type(module)))


def give_back_class(module: Any) -> None:
    """Give a module the class back that it had."""
    put_class(module, type(module)._sage_base)


def _rebound(method: Any, module: Any, old: Any, new: Any) -> Any:
    if isinstance(method, types.MethodType) and method.__self__ is module and method.__func__ is old:
        return types.MethodType(new, module)
    return method
