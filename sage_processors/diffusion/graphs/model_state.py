"""Check that a model is still as it was when a CUDA graph of its forward was captured.

A graph keeps what Python decided during the capture, and reads weights at their addresses of that time. So before each
replay the attributes of all modules are compared (scales of LoRA and IP-Adapters, FreeU, processors, hooks), and the
address and the count of writes of each weight. This takes about a microsecond a module, on a host that would be idle.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as nn_module

from ...linears.swap_hooks import EndHook, PrepareHook
from ...linears.weights.linear_state import linear_state
from ...patching.other_globals import innermost
from ...patching.patched import Watch, methods_used, with_helpers
from ...postponed.tensor import version_of
from ...torch_modes import AsUnderNoGrad
from ..host.innermost import hooks_of, moving_hooks
from ..host.root_hook import RootHook


OURS = (RootHook, PrepareHook, EndHook, AsUnderNoGrad)  # hooks that may be captured with a forward
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
COLLECTORS = "transformers.utils.output_capturing"
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
OPAQUE = ("torch", "builtins", "sage_kernels", "sage_processors")  # attributes of their objects are not compared
VERSION = operator.attrgetter("_version")
DEPTH = 3  # levels of nested containers that are compared


def obstacle(model: nn.Module, device: torch.device, *, is_block: bool = False, parallel: bool = False) -> str:
    """Return the reason why a model's forward can't be captured on this device; "" if it can.

    is_block: what is captured is the forward of a block itself, inside of its own hooks. parallel: hooks of context
    parallelism may be captured, too, as all processes agree about it.

    Returns:
        "device": some of its tensors are elsewhere.
        "offload": accelerate moves its weights in and out.
        "parallel": weights are split over devices, so that a graph would have collectives (tensor parallelism).
        "hooks": there are hooks not our own, which a replay would leave out. Those of transformers that collect
            hidden states stay on a model for good, and do nothing while nobody collects.
        "compiled": one of its submodules is compiled.
    """
    if any(getattr(nn_module, name) for name in GLOBAL_HOOKS):
        return "hooks"
    for module in model.modules():
        values = module.__dict__
        if any(x.device != device for x in _tensors(module)):
            return "device"
        if any(hasattr(x, "device_mesh") for x in _tensors(module)):  # a DTensor
            return "parallel"  # NCCL wants them replayed by all processes or by none
        if "_hf_hook" in values:  # of accelerate
            return "offload"
        is_inside = is_block and module is model
        if moving_hooks(module) if is_inside else hooks_of(module, but_parallel=parallel):
            return "hooks"
        if (is_block or module is not model) and values.get("_compiled_call_impl") is not None:
            return "compiled"
        if is_inside:
            continue
        for hook in (hook for name in HOOKS for hook in values[name].values()):
            is_idle = getattr(hook, "__module__", None) == COLLECTORS and not is_collecting()
            if not (is_idle or isinstance(getattr(hook, "__self__", hook), OURS)):
                return "hooks"
    return ""


def is_collecting() -> bool:
    """Return True if transformers collects hidden states or attention weights of a forward that runs now."""
    module = sys.modules.get(COLLECTORS)
    collector = getattr(module, "_active_collector", None)
    return module is not None and (collector is None or collector.get() is not None)


class ModelState:
    """A model's state right after a capture, to compare later.

    Attributes: in_8_bit: its swapped linear layers.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        self.in_8_bit = [module for module in modules if linear_state(module) is not None]
        held: list[tuple[Any, Any, torch.Tensor]] = []  # container, key, tensor
        self._now = [values for module in modules for values in _attributes(module)]
        self._then = [_copied(values, held) for values in self._now]
        self._containers, self._keys, self._tensors = ([x[i] for x in held] for i in range(3))
        self._counted = [x for x in self._tensors if version_of(x) is not None]
        self._memory = self._where_and_when()
        self._code = watch_of(modules)

    def holds(self) -> bool:
        """True if the model is unchanged."""
        if any(getattr(nn_module, name) for name in GLOBAL_HOOKS) or self._code.changed():
            return False
        try:
            if self._now != self._then:
                return False
        except (RuntimeError, ValueError):  # a new value can't be compared, such as a tensor of several elements
            return False
        # comparing dicts compares the values of tensors that are not the same object; a graph needs the same objects
        are_there = all(map(operator.is_, map(operator.getitem, self._containers, self._keys), self._tensors))
        return are_there and self._memory == self._where_and_when()

    def has_moved(self) -> bool:
        """True if a tensor has other memory than at the capture: a replay would read what may be gone."""
        return self._memory[: len(self._tensors)] != list(map(torch.Tensor.data_ptr, self._tensors))

    def _where_and_when(self) -> list[int]:
        """Return the addresses of all tensors and the counts of writes to them."""
        return [*map(torch.Tensor.data_ptr, self._tensors), *map(VERSION, self._counted)]


def watch_of(modules: Iterable[nn.Module]) -> Watch:
    """Return a watch on the code of modules, of their attention processors, and of attention itself.

    It notices if such a function, or one that it uses by name, is replaced.
    """
    watch = Watch(methods=[(F, "scaled_dot_product_attention")])
    owners: list[tuple[Any, str]] = [(type(module), "forward") for module in modules]
    owners += [(type(module.processor), "__call__") for module in modules if hasattr(module, "processor")]
    left = list(dict.fromkeys((getattr(cls, "_sage_base", cls), name) for cls, name in owners))
    for cls, name in left:  # grows
        watch.attribute(cls, name)
        own = innermost(getattr(cls, name))
        for function in with_helpers(own) if isinstance(own, types.FunctionType) else ():
            watch.function(function)
            left += [pair for used in methods_used(cls, function) if (pair := (cls, used)) not in left]
    return watch


def refresh_weights(modules: Iterable[nn.Module]) -> None:
    """Quantise 8-bit weights again if their 16-bit weights have changed, even by uncounted writes.

    An eager forward does the same for the weights it needs.
    """
    for module in modules:
        state = linear_state(module)
        if state is None or not state.is_filled:
            continue
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if not (state.dropped or state.is_fresh(weight)) or (bias is not None and state.bias_touched):
            with state.shared.lock:
                state.prepare(module)


def _copied(value: Any, held: list[tuple[Any, Any, torch.Tensor]], depth: int = DEPTH) -> Any:
    """Copy nested containers, so that later changes in them show. Other values are kept as they are.

    held: receives (container, key, tensor) for each tensor in a dict, list or tuple.
    """
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
    """Return the attribute dicts of a module and of objects it holds, such as a processor."""
    found = [module.__dict__]
    for name, value in module.__dict__.items():
        is_known = name == "processor" or type(value).__module__.partition(".")[0] not in OPAQUE
        is_known = is_known and not isinstance(value, (type, dict, nn.Module)) and name != "_compiled_call_impl"
        if is_known and isinstance(getattr(value, "__dict__", None), dict):
            found.append(value.__dict__)
    states = (values.get("_sage") for values in found)
    return found + [state.__dict__ for state in states if getattr(state, "is_compared", False)]
