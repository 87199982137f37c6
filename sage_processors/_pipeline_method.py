"""Give DiffusionPipeline its `set_attn_processor`, whichever of the two packages is imported first.

diffusers imports its pipelines lazily, and this package must not import diffusers.
"""

from __future__ import annotations

import sys

from ._on_import import when_imported


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


def _patch_loaded() -> None:
    pipeline = sys.modules[_MODULE].DiffusionPipeline
    if not hasattr(pipeline, "set_attn_processor"):
        pipeline.set_attn_processor = set_attn_processor


def add_pipeline_method() -> None:
    """Patch DiffusionPipeline now, or when diffusers loads it. Repeating it changes nothing."""
    when_imported(_MODULE, _patch_loaded, ready="DiffusionPipeline")
