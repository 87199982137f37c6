"""What a CUDA graph of a model's forward takes for granted, and what of a model no such graph could hold.

A graph holds what Python decided when it was captured, and reads weights where they lay. So attributes of all modules
are compared before each replay (LoRA and IP-Adapter scales, FreeU, processors, hooks), and where each weight lies and
how often it was written to: about a microsecond a module, on a host that would be idle.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as nn_module

from ...linears.swap_hooks import EndHook, PrepareHook
from ...patching.other_globals import innermost
from ...patching.patched import Watch, with_helpers
from ...postponed.tensor import version_of
from ...torch_modes import AsUnderNoGrad
from ..host.root_hook import RootHook


OURS = (RootHook, PrepareHook, EndHook, AsUnderNoGrad)  # hooks that are captured with a forward
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
OPAQUE = ("torch", "builtins", "sage_kernels", "sage_processors")  # whose objects are compared by what they are alone
VERSION = operator.attrgetter("_version")
DEPTH = 3  # of containers in containers


def obstacle(model: nn.Module, device: torch.device) -> str:
    """Why calls of the model on this device can't be replayed, or "".

    "device": not all of it lies there. "offload": weights come and go. "hooks": Python that a replay would leave out.
    "compiled": a part is a graph of its own.
    """
    if any(getattr(nn_module, name) for name in GLOBAL_HOOKS):
        return "hooks"
    for module in model.modules():
        values = module.__dict__
        if any(x.device != device for x in _tensors(module)):
            return "device"
        if "_hf_hook" in values:  # accelerate's
            return "offload"
        if getattr(values.get("_diffusers_hook"), "hooks", None):
            return "hooks"
        if module is not model and values.get("_compiled_call_impl") is not None:
            return "compiled"
        for hook in (hook for name in HOOKS for hook in values[name].values()):
            if not isinstance(getattr(hook, "__self__", hook), OURS):
                return "hooks"
    return ""


class ModelState:
    """A model as it is when a graph of it has been captured. Attributes: in_8_bit: its swapped linear layers."""

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self.in_8_bit = [module for module in modules if "_sage_linear" in module.__dict__]
        held: list[tuple[Any, Any, torch.Tensor]] = []  # container, key, tensor
        self._now = [values for module in modules for values in _attributes(module)]
        self._then = [_copied(values, held) for values in self._now]
        self._containers, self._keys, self._tensors = ([x[i] for x in held] for i in range(3))
        self._counted = [x for x in self._tensors if version_of(x) is not None]
        self._memory = self._where_and_when()
        self._code = watch_of(modules)

    def holds(self) -> bool:
        """Whether the model is still what it was."""
        if any(getattr(nn_module, name) for name in GLOBAL_HOOKS) or self._code.changed():
            return False
        try:
            if self._now != self._then:
                return False
        except (RuntimeError, ValueError):  # what can't be compared took the place of what was there
            return False
        # of tensors dicts compare numbers, unless these are the same objects
        are_there = all(map(operator.is_, map(operator.getitem, self._containers, self._keys), self._tensors))
        return are_there and self._memory == self._where_and_when()

    def _where_and_when(self) -> list[int]:
        """Where the tensors lie, and how often they were written to."""
        return [*map(torch.Tensor.data_ptr, self._tensors), *map(VERSION, self._counted)]


def watch_of(modules: Iterable[nn.Module]) -> Watch:
    """A watch on the code of modules and of their attention processors, on what they use by name, and on attention."""
    watch = Watch(methods=[(F, "scaled_dot_product_attention")])
    owners: list[tuple[Any, str]] = [(type(module), "forward") for module in modules]
    owners += [(type(module.processor), "__call__") for module in modules if hasattr(module, "processor")]
    for cls, name in dict.fromkeys((getattr(cls, "_sage_base", cls), name) for cls, name in owners):
        watch.attribute(cls, name)
        own = innermost(getattr(cls, name))
        for function in with_helpers(own) if isinstance(own, types.FunctionType) else ():
            watch.function(function)
    return watch


def refresh_weights(modules: Iterable[nn.Module]) -> None:
    """Compare 8-bit weights with 16-bit ones that somebody may have written to uncounted; make those anew that differ.

    An eager forward does so, too, where it needs them.
    """
    for module in modules:
        state = module.__dict__.get("_sage_linear")
        if state is None or not state.is_filled:
            continue
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if not (state.dropped or state.is_fresh(weight)) or (bias is not None and state.bias_touched):
            with state.shared.lock:
                state.prepare(module)


def _copied(value: Any, held: list[tuple[Any, Any, torch.Tensor]], depth: int = DEPTH) -> Any:
    """Containers anew, so that what is put into them shows; everything else as it is. held: gets their tensors."""
    if depth == 0 or not (isinstance(value, dict) or type(value) in (list, tuple, set)):
        return value
    if isinstance(value, set):
        return set(value)
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    held += [(value, key, x) for key, x in items if isinstance(x, torch.Tensor)]
    found = {key: _copied(x, held, depth - 1) for key, x in items}
    return found if isinstance(value, dict) else type(value)(found.values())


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [x for owned in (module._parameters, module._buffers) for x in owned.values() if x is not None]


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    """Of a module and of objects that it has, such as a processor that is no module."""
    found = [module.__dict__]
    for name, value in module.__dict__.items():
        is_known = name == "processor" or type(value).__module__.partition(".")[0] not in OPAQUE
        is_known = is_known and not isinstance(value, (type, dict, nn.Module)) and name != "_compiled_call_impl"
        if is_known and isinstance(getattr(value, "__dict__", None), dict):
            found.append(value.__dict__)
    return found
