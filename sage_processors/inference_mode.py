"""A forward called under torch.inference_mode() runs as under torch.no_grad(): there tensors count their writes.

What waits for its use (postponed/tensor.py) has to notice when an input is written to meanwhile, and a layer in 8 bit
when its weight is. Tensors that are made under inference_mode do not tell.
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


class AsUnderNoGrad:
    """Two hooks of a model. Its inputs are the same memory, as tensors that count; results are such tensors.

    Not where the model is given what may hold other tensors, such as a cache of keys and values: it may write to them,
    which torch refuses outside of inference_mode. Such a forward runs as it is called.
    """

    def __init__(self, is_leftover: bool = False) -> None:
        self._thread, self.is_leftover = threading.local(), is_leftover

    def install(self, model: nn.Module) -> list[Any]:
        """The handles of the hooks, to remove them."""
        begin = model.register_forward_pre_hook(self.begin, with_kwargs=True)
        return [begin, model.register_forward_hook(self.end, always_call=True)]

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model has hooks of its own, which nobody will remove
        return AsUnderNoGrad, (True,)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Leave inference_mode until the forward is over."""
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
        self._running().append(modes)  # of every call, as `end` is called for each
        return given

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Back to the caller's mode, after an error too."""
        if not torch.compiler.is_compiling() and self._running():
            self._running().pop().close()

    def _running(self) -> list[ExitStack]:
        if not hasattr(self._thread, "running"):
            self._thread.running = []  # a model may call itself
        running: list[ExitStack] = self._thread.running
        return running


def counts_writes(parameter: torch.Tensor) -> bool:
    """Whether it is counted from now on what is written to a parameter.

    One that was made or moved under inference_mode gets a counter, and stays the object that it is. Not where that is
    held in other ways: weak references to it do.
    """
    if not parameter.is_inference():
        return True
    with torch.inference_mode(False), torch.no_grad():
        try:
            plain = _alias(parameter.detach())
            counting = nn.Parameter(plain, requires_grad=parameter.requires_grad)
            counting.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, counting)  # the object stays, which modules and others hold
        except (UnknownValueError, RuntimeError):
            return False
    return True


def _is_traced() -> bool:
    """Whether calls are written down by what they are given: for that a tensor of the same memory is another one."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return is_traced() or (proxies is not None and proxies.get_proxy_mode() is not None)


def _counting(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or the same memory as one that counts its writes."""
    return _alias(x) if x.is_inference() else x


def _alias(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of its own. Raises: UnknownValueError where more than memory would be another."""
    if type(x) is not torch.Tensor or x.__dict__ or not are_ordinary((x,)):
        raise UnknownValueError
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
