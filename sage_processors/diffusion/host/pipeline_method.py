"""Give diffusers' pipelines, modular ones too, their `set_attn_processor`, whichever package is imported first.

Pipelines also tell here of the models and schedulers that they are given: several may share a model. diffusers imports
its pipelines lazily, and this package must not import diffusers.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable

from ...patching.on_import import when_imported


_pipelines: weakref.WeakSet = weakref.WeakSet()
_listeners: list[Callable] = []
_swaps: list[Callable] = []


def known_pipelines() -> list:
    """Pipelines that were given a component since this package was imported, and are alive."""
    return list(_pipelines)


def listen(listener) -> None:
    """Have `listener(pipeline)` called whenever a pipeline gets a model or a scheduler."""
    _listeners.append(listener)


def _telling(setattr_):
    """A pipeline's `__setattr__` that tells handles of its models when it gets another component."""

    @functools.wraps(setattr_)
    def __setattr__(self, name, value):
        setattr_(self, name, value)
        if hasattr(type(value), "set_timesteps") or hasattr(type(value), "named_modules"):
            _pipelines.add(self)
            for listener in _listeners:
                listener(self)

    __setattr__._sage_tells = True  # type: ignore[attr-defined]
    return __setattr__


def set_attn_processor(self, processor):
    """Run the attention of every denoiser of this pipeline in INT8.

    Args:
        processor: a sage_processors.SageAttnProcessor.
    Returns: a sage_processors.Handle: report(), refresh(), reset(), remove().
    Raises: TypeError for other processors; diffusers' own are set on a model, pipe.unet.set_attn_processor(...).
    """
    if processor is None:
        raise TypeError("processor: got None, expected sage_processors.SageAttnProcessor(...)")
    return _swaps[-1](self, processor)


def _patch(module: str, name: str) -> None:
    pipeline = getattr(sys.modules[module], name)
    if not hasattr(pipeline, "set_attn_processor"):
        pipeline.set_attn_processor = set_attn_processor
    if not hasattr(pipeline.__setattr__, "_sage_tells"):
        pipeline.__setattr__ = _telling(pipeline.__setattr__)


# module → (its class of pipelines, what patches it once it is loaded)
_PATCHES = {
    module: (name, functools.partial(_patch, module, name))
    for module, name in (
        ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline"),
        ("diffusers.modular_pipelines.modular_pipeline", "ModularPipeline"),
    )
}


def add_pipeline_method(swap) -> None:
    """Patch the classes now, or when diffusers loads them. swap(pipeline, processor) is what the method does."""
    _swaps.append(swap)
    for module, (name, patch) in _PATCHES.items():
        when_imported(module, patch, ready=name)
