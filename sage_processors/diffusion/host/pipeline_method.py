"""The method `set_attn_processor` for diffusers' pipelines, and news of their new components.

The pipeline classes, modular ones too, are patched whichever package is imported first: diffusers imports them lazily,
and this package must not import diffusers. A patched pipeline also announces each model and scheduler that it is
given, because several pipelines may share a model.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable

from ...options import HANDED_IN
from ...patching.on_import import when_imported


_pipelines: weakref.WeakSet = weakref.WeakSet()
_listeners: list[Callable] = []


def known_pipelines() -> list:
    """Return the live pipelines that were given a component since this package was imported."""
    return list(_pipelines)


def listen(listener) -> None:
    """Call `listener(pipeline)` from now on whenever a pipeline is given a model or a scheduler."""
    _listeners.append(listener)


def _telling(setattr_):
    """Wrap a pipeline's `__setattr__` to call the listeners when a component is set."""

    @functools.wraps(setattr_)
    def __setattr__(self, name, value):
        setattr_(self, name, value)
        if hasattr(type(value), "set_timesteps") or hasattr(type(value), "named_modules"):
            _pipelines.add(self)
            for listener in _listeners:
                listener(self)

    __setattr__._sage = True  # type: ignore[attr-defined]  # functools.wraps of another library copies this mark
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
    return HANDED_IN["apply"]()(self, processor)


def _patch(module: str, name: str) -> None:
    pipeline = getattr(sys.modules[module], name)
    if not hasattr(pipeline, "set_attn_processor"):
        pipeline.set_attn_processor = set_attn_processor
    if not hasattr(pipeline.__setattr__, "_sage"):
        pipeline.__setattr__ = _telling(pipeline.__setattr__)


# module → (name of its pipeline class, function that patches the class)
_PATCHES = {
    module: (name, functools.partial(_patch, module, name))
    for module, name in (
        ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline"),
        ("diffusers.modular_pipelines.modular_pipeline", "ModularPipeline"),
    )
}


def add_pipeline_method() -> None:
    """Give the pipeline classes their method, now or when diffusers loads them."""
    for module, (name, patch) in _PATCHES.items():
        when_imported(module, patch, ready=name)
