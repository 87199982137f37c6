"""The command `warm-up`, which compiles kernels before a model runs for the first time."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..options import SageAttnProcessor
from . import loading
from .loading import (
    DTYPES,
    DeviceOption,
    JsonOption,
    PipelineArgument,
    RecipeOption,
    ScalingOption,
    answer,
    console,
    torch_device,
)


def warm_up(
    model: PipelineArgument,
    recipe: RecipeOption = "qk_int8_pv_bf16",
    scaling: ScalingOption = "timestep",
    min_tokens: Annotated[
        int | None,
        typer.Option(help="Calls with fewer queries or keys run in 16 bit. Default: as measured for the GPU."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"The model's dtype: {', '.join(DTYPES)}.")] = "bfloat16",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compile the kernels of a model into Triton's cache, before its first call waits for them.

    Reads only the model's configs and loads no weights.
    """
    import torch

    from ..diffusion.host.discovery import denoisers, is_pipeline
    from ..entry import apply

    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype}: expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    try:
        given: dict[str, Any] = {"recipe": recipe, "scaling": scaling, "min_tokens": min_tokens}
        config = SageAttnProcessor(**given)
    except ValueError as error:
        option = str(error).partition(":")[0].replace("_", "-")
        raise typer.BadParameter(str(error), param_hint=f"--{option}") from error
    where = torch_device(device)
    target = loading.load_skeleton(model)
    for part in denoisers(target).values() if is_pipeline(target) else (target,):
        part.to(getattr(torch, dtype))
    try:
        handle = apply(target, config)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    with handle, answer(as_json) as found:
        found |= {"device": str(where), "kernels": 0, "seconds": 0.0, "cached": 0}
        if where.type == "cpu":
            console.print("Nothing to warm up: a CPU needs no kernels.")
            return
        try:
            done = handle.warm_up(device=where)
        except NotImplementedError as error:
            found.clear()
            loading.fail(str(error))
        found |= done._asdict()
        if done.kernels:
            console.print(f"{done.kernels} kernels in {done.seconds:.1f} s, {done.cached} of them from the cache.")
        else:
            console.print("Nothing to warm up: no call of this model is long enough for INT8 on this GPU.")
