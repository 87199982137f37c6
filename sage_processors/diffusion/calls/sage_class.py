"""Subclasses of diffusers' attention processors that run their own code with INT8 attention.

The `__call__` of such a Sage class runs the code of the original with other globals (rebind.py). In it, the name
scaled_dot_product_attention leads to processors.py. Projections, norms, rotary embedding and masks stay the model's
own.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
from typing import Any

import torch

from ...options import SageAttnProcessor
from ...postponed.region import current, opened
from ...postponed.tensor import ordinary
from ...reporting.event_counter import EventCounter
from ...unsupported import PAG_REMEDY
from ..heads.nested_rotary import NESTED
from ..heads.rotary import has_norms_alone, is_rotary
from ..host.patches import Binding, Patches
from .processor_state import ProcessorState
from .processors import EVENTS, STAND_INS, count_short
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
    _arm(processor, config, layer, kept=kept)
    processor._sage.rotated = rotated
    return processor


class _SageMethods:
    """Attributes and methods that every Sage class adds to its base.

    Attributes:
        _sage_base: the original processor class.
        _sage_binding: the code of its `__call__` with other attention ops, shared by all instances.
        _sage: the instance's ProcessorState.
    """

    _sage_base: Any
    _sage_binding: Binding
    _sage: ProcessorState

    def __reduce__(self) -> tuple[Any, ...]:
        state = {k: v for k, v in self.__dict__.items() if k != "_sage"}
        own = self._sage
        return _rebuild, (type(self)._sage_base, own.config, own.layer, own.kept, own.rotated), state


def _arm(
    processor: Any,
    config: SageAttnProcessor | None,
    layer: str,
    *,
    device: torch.device | str = "cpu",
    patches: Patches | None = None,
    **options: Any,
) -> None:
    """Give a Sage processor its state, with counts of zero and without planned scales.

    Args: device: where calls are counted. patches: shared by layers of the class. options: of ProcessorState.
    """
    binding: Binding = processor._sage_binding
    events = EventCounter(len(EVENTS), device)
    state = ProcessorState(config, layer, patches or Patches(binding), binding.calls, events, **options)
    state.accept_backend(processor)
    object.__setattr__(processor, "_sage", state)  # nn.Module processors intercept plain assignment


def count_bypassed(processor: Any, other: Any) -> None:
    """Count a forward in which another processor, `other`, was in the place of this Sage processor."""
    fall_back(processor._sage, "replaced", PAG_REMEDY if is_pag(other) else "")


def sage_class(base: type) -> type:
    """Return the Sage subclass of a diffusers attention processor class.

    Instances made by calling it run INT8 attention with one quantisation scale per token. `_sage_binding.calls` is
    the number of attention calls found in the code of `base`. If that is 0, as with linear or hand-written attention,
    the class behaves exactly as `base`.
    Raises: TypeError if `base` has no Python `__call__`.
    """
    fn = getattr(base, "__call__", None)  # noqa: B004 (a Python method, not any callable)
    if not isinstance(base, type) or not isinstance(fn, types.FunctionType):
        raise TypeError(f"base: got {base!r}, expected an attention processor class with a __call__ method")
    kind: Any = base
    found: type[Any] = _sage_class(kind, fn)
    if not found._sage_binding.calls:  # an attention function may have been replaced when the class was made
        found._sage_binding.look()
    return found


@functools.cache
def _sage_class(base: Any, fn: types.FunctionType) -> Any:
    """Make the class for a base with the current `__call__` `fn`."""
    binding = Binding(base, STAND_INS)
    called: list[Any] = [*(fn.__globals__.get(name) for name in fn.__code__.co_names), *binding.imported]
    names = [function.__name__ for function in called if is_rotary(function)]
    binding.rotary = names[0] if names else NESTED if binding.has_nested else None
    binding.joins_heads = binding.rotary is not None or has_norms_alone(fn)
    original: Any = base

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else kwargs.get("attn")
        own = self._sage
        if own.lock is None and not torch.compiler.is_compiling():
            own.patches.look()
        if own.config is None:
            return base.__call__(self, *args, **kwargs)
        if own.patches.found:
            fall_back(own, "patched")
            return base.__call__(self, *args, **kwargs)
        is_unknown = torch.compiler.is_compiling() or binding.reads_masks
        kind = None if is_unknown else own.short.kind(self, args, kwargs)
        if calls := own.short.known(kind):
            count_short(own, calls)
            return base.__call__(self, *args, **kwargs)
        outer = running.processor, running.calls, running.short, running.training
        running.processor, running.calls, running.short = self, 0, 0
        running.training = getattr(module, "training", False) is True
        try:
            if (
                not binding.joins_heads
                or torch.compiler.is_compiling()
                or current() is not None
                or not own.waiting.is_closed(module, args, kwargs)
            ):
                out = binding.inner(self, *args, **kwargs)
            else:
                with opened():
                    out = ordinary(binding.inner(self, *args, **kwargs))
            if kind is not None:
                own.short.note(kind, running.calls, running.short)
            return out
        finally:  # after an exception too
            running.processor, running.calls, running.short, running.training = outer

    binding.face = __call__
    binding.look()

    @functools.wraps(original.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        _arm(self, SageAttnProcessor(scaling="dynamic"), type(self).__name__)

    members = {
        "__call__": __call__,
        "__init__": __init__,
        "_sage_base": base,
        "_sage_binding": binding,
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
    calls: int = kind._sage_binding.calls
    return calls


def swap(processor: Any, config: SageAttnProcessor, layer: str, **options: Any) -> Any:
    """Return a Sage processor that shares attributes and parameters with a live processor.

    Args: options: of `_arm`.
    """
    twin: Any = object.__new__(sage_class(type(processor)))
    twin.__dict__.update(processor.__dict__)
    _arm(twin, config, layer, **options)
    return twin


def is_pag(processor: Any) -> bool:
    """True for a processor of perturbed-attention guidance.

    Pipelines put these into the model and take them out again within each step.
    """
    return getattr(type(processor), "_sage_base", type(processor)).__name__.startswith("PAG")


def is_sage(processor: Any) -> bool:
    """True for an instance of a Sage class."""
    return isinstance(processor, _SageMethods)
