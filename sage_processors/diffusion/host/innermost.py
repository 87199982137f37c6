"""Replace a module's forward inside of the hooks that diffusers wraps around it."""

from __future__ import annotations

import types
from typing import Any

from torch import nn


MOVES = ("group_offloading", "layerwise_casting", "context_parallel")  # files of hooks that move or split data


def own_forward(module: nn.Module) -> Any:
    """Return the forward of the module's class, without hooks."""
    return types.MethodType(type(module).forward, module)


def put_forward(module: nn.Module, forward: Any, replaced: type) -> bool:
    """Call `forward` in place of the module's own one. replaced: class of earlier such functions.

    Returns False, and changes nothing, if a function of somebody else is in that place.
    """
    place, name = _place_of(module)
    now = vars(place).get(name)
    is_own = isinstance(now, types.MethodType) and now.__self__ is module
    if not (now is None or is_own or isinstance(now, replaced)):
        return False
    setattr(place, name, forward)
    return True


def take_out_forward(module: nn.Module, forward: Any) -> None:
    """Undo `put_forward`. Does nothing if another function is in that place by now."""
    place, name = _place_of(module)
    if vars(place).get(name) is not forward:
        return
    if place is module:
        delattr(module, name)
    else:
        base = getattr(type(module), "_sage_base", type(module))
        setattr(place, name, types.MethodType(base.forward, module))


def moving_hooks(module: nn.Module) -> list[str]:
    """Return the names of diffusers' hooks of a module that move its weights or split its data."""
    return [name for name, file in _hooks(module).items() if file in MOVES]


def hooks_of(module: nn.Module, *, but_parallel: bool) -> list[str]:
    """Return the names of diffusers' hooks of a module. but_parallel: but those of context parallelism."""
    return [name for name, file in _hooks(module).items() if not (but_parallel and file == "context_parallel")]


def _hooks(module: nn.Module) -> dict[str, str]:
    """Return {name of a hook of diffusers: the file that defines it}."""
    hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return {name: type(hook).__module__.rpartition(".")[2] for name, hook in hooks.items()}


def _place_of(module: nn.Module) -> tuple[Any, str]:
    """Return (object, attribute) in which the innermost function of a module's calls is kept."""
    references = getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", None)
    if not references:
        return module, "forward"
    first = references[0]
    return first, "forward" if first.original_forward is None else "original_forward"
