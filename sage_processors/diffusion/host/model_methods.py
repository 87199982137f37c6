"""Let the `set_attn_processor` of diffusers' models take a SageAttnProcessor.

`model.set_attn_processor(SageAttnProcessor(...))` does what `apply` does. Options in a dict of processors, or on one
attention module, are refused before any processor is overwritten. The classes are patched when diffusers loads them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ...options import HANDED_IN, SageAttnProcessor
from ...patching.on_import import when_imported
from .pipeline_method import known_pipelines


# module → (name it defines last, classes with set_attn_processor, classes with set_processor)
_CLASSES = {
    "diffusers.models.attention": ("AttentionModuleMixin", ("AttentionMixin",), ("AttentionModuleMixin",)),
    "diffusers.models.attention_processor": ("AttnProcessor2_0", (), ("Attention",)),
    "diffusers.models.controlnets.controlnet_hunyuan": (
        "HunyuanDiT2DControlNetModel", ("HunyuanDiT2DControlNetModel",), (),
    ),
}  # fmt: skip


def _target_of(model: Any) -> Any:
    """Return the pipeline that has this model as its only denoiser; the model, if there is none."""
    from .discovery import denoisers  # which imports torch: `sage-processors --help` does without

    found = (pipe for pipe in known_pipelines() if [x for x in denoisers(pipe).values()] == [model])
    return next(found, model)


def _for_models(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def set_attn_processor(self: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(processor, SageAttnProcessor):
            return HANDED_IN["apply"]()(_target_of(self), processor)
        if isinstance(processor, dict):
            for name, one in processor.items():
                _refuse(one, f"in a dict of processors, at {str(name)[:200]!r}")
        return method(self, processor, *args, **kwargs)

    return set_attn_processor


def _for_modules(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def set_processor(self: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(processor, "for one attention module")
        return method(self, processor, *args, **kwargs)

    return set_processor


def _refuse(processor: Any, where: str) -> None:
    if isinstance(processor, SageAttnProcessor):
        raise TypeError(
            f"processor: got a SageAttnProcessor {where}, expected it as the only argument of "
            "model.set_attn_processor or pipe.set_attn_processor; its option `layers` chooses single layers. "
            "Nothing was changed"
        )


def _patch(module: str) -> None:
    _, of_models, of_modules = _CLASSES[module]
    for names, method, wrapped in (
        (of_models, "set_attn_processor", _for_models),
        (of_modules, "set_processor", _for_modules),
    ):
        for name in names:
            cls = getattr(sys.modules[module], name, None)
            own = vars(cls).get(method) if cls is not None else None
            if own is not None and not hasattr(own, "_sage"):
                made: Any = wrapped(own)
                made._sage = True
                setattr(cls, method, made)


_PATCHES = {module: functools.partial(_patch, module) for module in _CLASSES}


def add_model_methods() -> None:
    """Patch diffusers' classes, now or when it loads them."""
    for module, patch in _PATCHES.items():
        when_imported(module, patch, ready=_CLASSES[module][0])
