"""Give DiffusionPipeline its `set_attn_processor`, whichever of the two packages is imported first.

diffusers imports its pipelines lazily, and this package must not import diffusers. So: patch the class if its module
is loaded, else wait for that one module through a finder at the front of sys.meta_path.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder


_MODULE = "diffusers.pipelines.pipeline_utils"


def set_attn_processor(self, processor):
    """Run the attention of every denoiser of this pipeline in INT8.

    Args:
        processor: a sage_processors.SageAttnProcessor.
    Returns: a sage_processors.Handle: report(), refresh(), reset(), remove().
    Raises: TypeError for other processors; diffusers' own are set on a model, pipe.unet.set_attn_processor(...).
    """
    from .apply import apply

    if processor is None:
        raise TypeError("processor: got None, expected sage_processors.SageAttnProcessor(...)")
    return apply(self, processor)


def _patch(module) -> None:
    if not hasattr(module.DiffusionPipeline, "set_attn_processor"):
        module.DiffusionPipeline.set_attn_processor = set_attn_processor


class _PatchingLoader(Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader  # leave no trace for inspect and importlib.reload
        self._loader.exec_module(module)
        _patch(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


def add_pipeline_method() -> None:
    """Patch DiffusionPipeline now, or when diffusers loads it. Repeating it changes nothing."""
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "DiffusionPipeline"):
        _patch(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
