"""Finds out if a block runs only code of libraries, so that results inside of it may be postponed.

A hook, module or processor that the user put into a block may read its inputs, keep them or write to them, at any
time. Nothing is postponed in such a block.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from sage_kernels.compat import find, function_modes, is_differentiating_forward, is_traced

from ..patching.patched import code_of
from .library import is_library_class, is_library_function, is_pythons_function


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = [getattr(nn_module, name) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")]
_frame_callback = find("torch._C._dynamo.eval_frame.get_eval_frame_callback")
_PLAIN = {torch.Tensor, nn.Parameter, type(None), bool, int, float, complex, str, slice}


class Enclosure:
    """Knows if the code in one block is all of libraries.

    Every call compares what the answer depends on: modules, their classes and hooks, functions put on a module,
    processors. The block is examined again only if any of these differ.

    Attributes:
        owner: Owner of the swap that enclosed the block and will undo it; None in a copy.
        modules: the block and all modules in it; empty before the first call.
        obstacle: the code that is not a library's, in a few words; "" if there is none.
        has_casts: the last call postponed casts to a wider dtype.
        may_join: no call was given neighbours in memory without concatenating them.
    """

    owner: Any = None
    has_casts = False
    may_join = True
    modules: tuple[nn.Module, ...] = ()
    obstacle = ""

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the block has modules of its own
        return Enclosure, ()

    def _look(self, block: nn.Module) -> None:
        self.modules = modules = tuple(block.modules())
        inner = modules[1:]  # hooks of the block itself run before and after the region
        self._now: list[Any] = [m._modules for m in modules]
        self._now += [m.__dict__[name] for m in inner for name in _HOOKS]
        self._then = [dict(x) for x in self._now]
        self._attributes = [m.__dict__ for m in modules]
        self._sizes, self._kinds = list(map(len, self._attributes)), list(map(type, modules))
        self._with_processor = [m for m in modules if "processor" in m.__dict__]
        self._processors = [type(m.__dict__["processor"]) for m in self._with_processor]
        self._once_compiled = [m.__dict__ for m in inner if "_compiled_call_impl" in m.__dict__]
        self._compiled = [own["_compiled_call_impl"] for own in self._once_compiled]
        self._hooked = [m for m in inner if not _MOVERS.isdisjoint(m.__dict__)]
        self._movers = [_movers(m) for m in self._hooked]
        kinds = dict.fromkeys(
            x for own in self._kinds + self._processors for x in (own, getattr(own, "_sage_base", own))
        )
        self._watch = code_of(kinds, _CALLED, _is_followed)
        own = ((m, name, value) for m in inner for name, value in m.__dict__.items() if callable(value))
        self._put_on = [(m, name) for m, name, value in own if name != "processor" and not isinstance(value, _OTHERS)]
        for module, name in self._put_on:
            self._watch.item(module.__dict__, name)
        bindings = [x for x in (getattr(kind, "_sage_binding", None) for kind in self._processors) if x is not None]
        self._bound = [(binding, binding.inner) for binding in bindings]
        self.obstacle = self._find(inner)

    def _is_as_seen(self, block: nn.Module) -> bool:
        return (
            self._now == self._then
            and self._sizes == list(map(len, self._attributes))
            and self._kinds == list(map(type, self.modules))
            and self.modules[0] is block
            and self._processors == [type(m.__dict__.get("processor")) for m in self._with_processor]
            and (not self._hooked or self._movers == [_movers(m) for m in self._hooked])
            and self._compiled == [own["_compiled_call_impl"] for own in self._once_compiled]
            and all(binding.inner is known for binding, known in self._bound)
            and not self._watch.changed()
        )

    def _find(self, inner: tuple[nn.Module, ...]) -> str:
        """Name the code that is not a library's, in a few words; "" if there is none."""
        for module in self.modules:
            if not _is_of_library(type(module)):
                own = getattr(type(module), "_sage_base", type(module))
                is_replaced = is_library_class(own)
                return f"a replaced method of {own.__name__}" if is_replaced else f"a module of class {own.__name__}"
        for module in inner:
            own = module.__dict__
            if own.get("_compiled_call_impl") is not None:
                return "a compiled module"
            for hook in (hook for name in _HOOKS for hook in own[name].values()):
                if not _is_of_library_function(hook):
                    return f"a hook of a {_name(module)}"
            if not all(map(is_library_class, _movers(module))):
                return f"a hook of a {_name(module)}"
        for module, name in self._put_on:
            if not _is_of_library_function(module.__dict__[name]):
                return f"a {name} put on a {_name(module)}"
        for kind in self._processors:
            if not _is_of_library(kind):
                return f"a processor of class {getattr(kind, '_sage_base', kind).__name__}"
        if not all(binding.is_of_libraries for binding, _ in self._bound):
            return "a function that a processor uses"
        if not all(is_library_function(fn) or is_pythons_function(fn) for fn in self._watch.functions()):
            return "a function in the place of a library's"
        return ""

    def obstacle_of(self, block: nn.Module) -> str:
        """Examine the block as it is now and name the code that is not a library's; "" if there is none."""
        self.is_closed(block)
        return self.obstacle

    def is_closed(self, block: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
        """Return True if a call of the block with these arguments runs only code of libraries.

        False where Dynamo compiles, also behind a graph break: it would compile what is called here, and see results
        that wait.
        """
        if torch.compiler.is_compiling() or _is_dynamo_active():
            return False
        if not self.modules or not self._is_as_seen(block):
            self._look(block)
        if self.obstacle or any(_GLOBAL_HOOKS) or function_modes() or is_differentiating_forward():
            return False
        if is_traced():
            return False
        return _are_plain(args) and (not kwargs or _are_plain(kwargs.values()))


def _is_dynamo_active() -> bool:
    """Return True if Dynamo compiles the functions that are called next."""
    return _frame_callback is not None and _frame_callback() not in (None, False)


_MOVERS = {"_hf_hook", "_diffusers_hook"}  # attributes by which accelerate and diffusers move and cast weights


def _movers(module: nn.Module) -> list[type]:
    """Return the classes of the hooks with which accelerate or diffusers wrap a module's forward."""
    hook, registry = (module.__dict__.get(name) for name in sorted(_MOVERS, reverse=True))
    found = [] if hook is None else [hook, *getattr(hook, "hooks", ())]
    return [type(x) for x in (*found, *getattr(registry, "hooks", {}).values())]


_OTHERS = (type, nn.Module)  # what may be called and is looked at elsewhere, or never called
# What runs when a module or a processor is called
_CALLED = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
# Code that is not read for what it uses: what every module has, our own, and what makes messages and asks for versions
_NOT_FOLLOWED = (
    "torch.nn.modules.module",
    "sage_processors",
    "sage_kernels",
    *(f"{library}.utils" for library in ("accelerate", "diffusers", "peft", "transformers")),
)


def _is_followed(function: Any) -> bool:
    """Return True if the names that a function uses are watched: code of models, and of torch's layers."""
    name = function.__module__ or ""
    is_operation = name.startswith("torch.") and not name.startswith("torch.nn.modules.")
    return is_library_function(function) and not is_operation and not name.startswith(_NOT_FOLLOWED)


def _is_of_library_function(called: Any) -> bool:
    """Return True if calling this function, method, partial or object runs code of a library."""
    while isinstance(called, functools.partial):
        called = called.func
    if isinstance(called, types.BuiltinFunctionType):
        return True
    if not isinstance(called, (types.FunctionType, types.MethodType)):
        called = getattr(type(called), "__call__", None)  # noqa: B004 (the function, not whether there is one)
    return is_library_function(called)


def _name(module: nn.Module) -> str:
    name: str = getattr(type(module), "_sage_base", type(module)).__name__
    return name


def _is_of_library(kind: type) -> bool:
    """Return True if instances of this class run a library's code: `__call__`, and `forward` of a module."""
    own: Any = getattr(kind, "_sage_base", kind)
    called = [getattr(own, "__call__", None)]  # noqa: B004 (the function, not whether there is one)
    if issubclass(kind, nn.Module):
        called.append(getattr(own, "forward", None))
    return all(map(is_library_function, called)) and is_library_class(own)


def _are_plain(values: Iterable[Any]) -> bool:
    """Return True if these arguments hold only plain values and objects of libraries' classes.

    An object of a user's class could keep a postponed result or write to it.
    """
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind in (tuple, list):
            inner = _are_plain(value)
        else:
            inner = _are_plain(value.values()) if kind is dict else is_library_class(kind)
        if not inner:
            return False
    return True
