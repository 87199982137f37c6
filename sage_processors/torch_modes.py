"""Autocast for the attention op, and hooks that turn inference_mode into no_grad in a forward.

A postponed result (postponed/tensor.py) has to notice a write to one of its inputs, and an 8-bit linear layer a write
to its weight. PyTorch counts the writes to a tensor, but not for tensors that are made under inference_mode.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from sage_kernels.compat import are_ordinary, is_traced

from .patching.nested import UnknownValueError, mapped


def is_autocast(device: torch.device) -> bool:
    """True if autocast is on for a device; always False for "meta", where PyTorch would raise."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast(*tensors):
    """Cast inputs of attention as autocast does for scaled_dot_product_attention.

    PyTorch does not know our op by name. Floating-point tensors other than fp64 get autocast's dtype.
    """
    device = tensors[0].device
    if not is_autocast(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


class AsUnderNoGrad:
    """Two hooks of a model that leave torch.inference_mode() during its forward.

    The forward runs under torch.no_grad() instead, where tensors count writes. The model gets its inputs as counting
    tensors of the same memory, and returns counting tensors. A forward with an argument that may hold further tensors,
    such as a KV cache, stays in inference_mode: the model may write to these tensors, and torch forbids that outside
    of inference_mode.

    Attributes: is_leftover: the hooks came with a copy of the model, so nobody will remove them.
    """

    def __init__(self, is_leftover: bool = False) -> None:
        self._thread, self.is_leftover = threading.local(), is_leftover

    def install(self, model: nn.Module) -> list[Any]:
        """Add the hooks to a model. Returns their handles, for removal."""
        begin = model.register_forward_pre_hook(self.begin, with_kwargs=True)
        return [begin, model.register_forward_hook(self.end, always_call=True)]

    def __reduce__(self) -> tuple[Any, ...]:  # hooks of a copy of the model
        return AsUnderNoGrad, (True,)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Leave inference_mode until the end of the forward. Returns the new inputs; None keeps them."""
        if torch.compiler.is_compiling():
            return None
        modes, given = ExitStack(), None
        if torch.is_inference_mode_enabled() and not _is_traced():
            with ExitStack() as tried:
                tried.enter_context(torch.inference_mode(False))
                tried.enter_context(torch.no_grad())
                with contextlib.suppress(UnknownValueError):
                    given = mapped((args, kwargs), _counting)
                    modes = tried.pop_all()
        self._running().append(modes)  # in every call, as every call ends in `end`
        return given

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Return to the caller's mode, after an error too."""
        if not torch.compiler.is_compiling() and self._running():
            self._running().pop().close()

    def _running(self) -> list[ExitStack]:
        if not hasattr(self._thread, "running"):
            self._thread.running = []  # a stack, as a model may call itself
        running: list[ExitStack] = self._thread.running
        return running


def counts_writes(parameter: torch.Tensor) -> bool:
    """Make a parameter count writes to it. Returns False if that is impossible.

    A parameter that was made or moved under inference_mode gets a counter and stays the same object. That fails if
    there are weak references to it.
    """
    if not parameter.is_inference():
        return True
    with torch.inference_mode(False), torch.no_grad():
        try:
            plain = _alias(parameter.detach())
            counting = nn.Parameter(plain, requires_grad=parameter.requires_grad)
            counting.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, counting)  # modules and others keep the same object
        except (UnknownValueError, RuntimeError):
            return False
    return True


def _is_traced() -> bool:
    """True while a tracer records calls.

    A tracer knows tensors by their identity, so it must not get aliases of the inputs.
    """
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return is_traced() or (proxies is not None and proxies.get_proxy_mode() is not None)


def _counting(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it counts writes, else an alias that does."""
    return _alias(x) if x.is_inference() else x


def _alias(x: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the same memory.

    Raises: UnknownValueError for a subclass, attributes, or anything else that the new tensor would lose.
    """
    if type(x) is not torch.Tensor or x.__dict__ or not are_ordinary((x,)):
        raise UnknownValueError
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
