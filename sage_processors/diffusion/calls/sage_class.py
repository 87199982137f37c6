"""Subclasses of diffusers' attention processors that run their own code with INT8 attention.

The `__call__` of such a Sage class runs the code of the original with other globals (rebind.py). In it, the name
scaled_dot_product_attention leads to processors.py. Projections, norms, rotary embedding and masks stay the model's
own.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import types
from typing import Any

import torch

from ...options import SageAttnProcessor
from ...postponed.region import current, opened
from ...postponed.tensor import ordinary
from ...reporting.event_counter import EventCounter
from ...unsupported import PAG_REMEDY
from ..heads.postponed_heads import HeadSource
from ..heads.rotary import is_rotary
from ..host.dispatcher import without_ours
from ..host.patches import Binding, Patches
from ..steps.windows import Window
from .processors import EVENTS, STAND_INS, CallSite
from .processors import _fall_back as fall_back
from .processors import _running as running


logger = logging.getLogger("sage_processors")

# diffusers' tuples of the classes that `set_default_attn_processor` knows; the models' modules import them by name
_DEFAULTS_OF = ("ADDED_KV_ATTENTION_PROCESSORS", "CROSS_ATTENTION_PROCESSORS")


def _rebuild(
    base: type[Any], config: SageAttnProcessor | None, layer: str, kept: bool = False, rotated: bool = False
) -> Any:
    """Make the Sage processor that copy and pickle get, without state of the original's handle."""
    processor: Any = object.__new__(sage_class(base))
    processor._sage_arm(config, layer, kept=kept)
    object.__setattr__(processor, "_sage_rotated", rotated)
    return processor


class _SageMethods:
    """Attributes and methods that every Sage class adds to its base. All their names start with _sage_."""

    _sage_base: Any  # the original processor class
    _sage_calls: int  # number of attention calls in its code
    _sage_binding: Binding  # its code, with other attention ops
    _sage_rotary: str | None  # name of the rotary embedding function in its code, if that can be postponed
    _sage_config: SageAttnProcessor | None = None
    _sage_layer = "stand-alone processor"
    _sage_sites: tuple[CallSite, ...] = ()
    _sage_events: Any = None  # an EventCounter, once armed
    _sage_backend: Any = None
    _sage_window = None  # windows.Window of the handle, shared by layers with the same range of noise levels
    _sage_kept = False  # runs in 16 bit at all steps
    _sage_rotated = False  # its INT8 calls run with the Hadamard rotation; changes between steps only
    _sage_lock = None  # of the handle, held while a call counts in a state; None without a handle
    _sage_patches: Any = None  # patches.Patches, shared by layers of the same class
    _sage_waiting: Any = None  # postponed_heads.HeadSource, once armed
    _sage_probe = None  # probe.LayerProbe while a probe is on

    def _sage_arm(
        self,
        config: SageAttnProcessor | None,
        layer: str,
        *,
        device: torch.device | str = "cpu",
        kept: bool = False,
        window: Window | None = None,
        lock: threading.RLock | None = None,
        patches: Patches | None = None,
    ) -> None:
        """Set the options and start counting from zero, without planned scales.

        Args: config: None makes the processor behave as its base class. Others: as the attributes `_sage_...`.
        """
        set_ = functools.partial(object.__setattr__, self)  # nn.Module processors intercept plain assignment
        set_("_sage_config", config)
        set_("_sage_layer", layer)
        set_("_sage_kept", kept)
        set_("_sage_rotated", config is not None and config.rotation == "hadamard")
        set_("_sage_window", window)
        set_("_sage_lock", lock)
        set_("_sage_patches", patches or Patches(self._sage_binding))
        set_("_sage_waiting", HeadSource(layer))
        set_("_sage_events", EventCounter(len(EVENTS), device))
        set_("_sage_sent", [0])  # bytes sent to other devices
        set_("_sage_sites", tuple(CallSite() for _ in range(type(self)._sage_calls)))
        self._sage_accept_backend()

    def _sage_accept_backend(self) -> None:
        """Take the processor's current attention back end as the one for 16-bit calls.

        A back end that is set later wins over INT8 attention.
        """
        object.__setattr__(self, "_sage_backend", without_ours(getattr(self, "_attention_backend", None)))

    def _sage_bypassed(self, other: Any) -> None:
        """Count a forward in which another processor, `other`, was in the place of this one."""
        fall_back(self, "replaced", PAG_REMEDY if is_pag(other) else "")

    def __reduce__(self) -> tuple[Any, ...]:
        state = {k: v for k, v in self.__dict__.items() if not k.startswith("_sage_")}
        own = (self._sage_config, self._sage_layer, self._sage_kept, self._sage_rotated)
        return _rebuild, (type(self)._sage_base, *own), state


def sage_class(base: type) -> type:
    """Return the Sage subclass of a diffusers attention processor class.

    Instances made by calling it run INT8 attention with one quantisation scale per token. `_sage_calls` is the number
    of attention calls found in the code of `base`. If that is 0, as with linear or hand-written attention, the class
    behaves exactly as `base`.
    Raises: TypeError if `base` has no Python `__call__`.
    """
    fn = getattr(base, "__call__", None)  # noqa: B004 (a Python method, not any callable)
    if not isinstance(base, type) or not isinstance(fn, types.FunctionType):
        raise TypeError(f"base: got {base!r}, expected an attention processor class with a __call__ method")
    kind: Any = base
    found: type[Any] = _sage_class(kind, fn)
    if not found._sage_calls:  # an attention function may have been replaced when the class was made
        found._sage_binding.look()
        found._sage_calls = found._sage_binding.calls
    return found


@functools.cache
def _sage_class(base: Any, fn: types.FunctionType) -> Any:
    """Make the class for a base with the current `__call__` `fn`."""
    binding = Binding(base, STAND_INS)
    called: list[Any] = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    rotary = next((function.__name__ for function in called if is_rotary(function)), None)
    original: Any = base

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else kwargs.get("attn")
        patches = self._sage_patches
        if self._sage_lock is None and not torch.compiler.is_compiling():
            patches.look()
        if self._sage_config is None:
            return base.__call__(self, *args, **kwargs)
        if patches.found:
            fall_back(self, "patched")
            return base.__call__(self, *args, **kwargs)
        outer, outer_calls, outer_training = running.processor, running.calls, running.training
        running.processor, running.calls, running.training = self, 0, getattr(module, "training", False) is True
        try:
            if rotary is None or torch.compiler.is_compiling() or current() is not None:
                return binding.inner(self, *args, **kwargs)
            if not self._sage_waiting.is_closed(module, args, kwargs):
                return binding.inner(self, *args, **kwargs)
            with opened():
                return ordinary(binding.inner(self, *args, **kwargs))
        finally:  # after an exception too
            running.processor, running.calls, running.training = outer, outer_calls, outer_training

    binding.face = __call__
    binding.look()

    @functools.wraps(original.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        self._sage_arm(SageAttnProcessor(scaling="dynamic"), type(self).__name__)

    members = {
        "__call__": __call__,
        "__init__": __init__,
        "_sage_base": base,
        "_sage_calls": binding.calls,
        "_sage_binding": binding,
        "_sage_rotary": rotary,
        "__doc__": base.__doc__,
    }
    cls = type(
        "Sage" + base.__name__, (_SageMethods, base), members | {"__module__": "sage_processors.diffusion.by_name"}
    )
    _list_beside(cls, base)
    return cls


def _list_beside(cls: type, base: type) -> None:
    """Add a Sage class to each list in diffusers that has its base: diffusers compares exact classes."""
    _for_layer_skip(cls, base)
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("diffusers.")]:
        for name in _DEFAULTS_OF:
            known = vars(module).get(name)
            if isinstance(known, tuple) and base in known and cls not in known:
                setattr(module, name, (*known, cls))


def _for_layer_skip(cls: type, base: type) -> None:
    """Register a Sage class for diffusers' layer-skip and PAG hooks, if its base is registered."""
    try:
        from diffusers.hooks._helpers import AttentionProcessorRegistry
    except ImportError:
        logger.debug(
            "this diffusers has no AttentionProcessorRegistry: its layer-skip hooks can't meet Sage processors"
        )
        return
    try:
        metadata = AttentionProcessorRegistry.get(base)
    except ValueError:
        return  # the hooks don't know the base class either
    AttentionProcessorRegistry.register(cls, metadata)


def attention_calls_in(base: type) -> int:
    """Return the number of attention calls in the code of a processor class."""
    kind: Any = sage_class(base)
    calls: int = kind._sage_calls
    return calls


def swap(processor: Any, config: SageAttnProcessor, layer: str, **options: Any) -> Any:
    """Return a Sage processor that shares attributes and parameters with a live processor.

    Args: options: of `_sage_arm`.
    """
    twin: Any = object.__new__(sage_class(type(processor)))
    twin.__dict__.update(processor.__dict__)
    twin._sage_arm(config, layer, **options)
    return twin


def is_pag(processor: Any) -> bool:
    """True for a processor of perturbed-attention guidance.

    Pipelines put these into the model and take them out again within each step.
    """
    return getattr(type(processor), "_sage_base", type(processor)).__name__.startswith("PAG")


def is_sage(processor: Any) -> bool:
    """True for an instance of a Sage class."""
    return isinstance(processor, _SageMethods)
