"""INT8 attention for pipelines that SGLang's diffusers back end loads. Not run inside of it."""

from __future__ import annotations

import functools
from typing import Any

import sage_processors as sp


def install(*arguments: Any, **options: Any) -> None:
    """Let every pipeline that SGLang loads from now on run with `sp.SageAttnProcessor(*arguments, **options)`.

    Its `sage_handle` is the Handle. Call it in each process of the server before a model is loaded; a second call
    replaces the options. Raises: ImportError without SGLang; TypeError or ValueError for wrong options.
    """
    from sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline import DiffusersPipeline

    config = sp.SageAttnProcessor(*arguments, **options)
    load = getattr(
        DiffusersPipeline._load_diffusers_pipeline, "__wrapped__", DiffusersPipeline._load_diffusers_pipeline
    )

    @functools.wraps(load)
    def load_with_int8(self: Any, model_path: str, server_args: Any) -> Any:
        pipe = load(self, model_path, server_args)
        self.sage_handle = sp.apply(pipe, config)
        return pipe

    DiffusersPipeline._load_diffusers_pipeline = load_with_int8
