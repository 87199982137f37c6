"""The command `calibrate`. main.py adds it to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import pipelines
from ..option_groups import LINEARS, SCALINGS, Linears
from ..options import SageAttnProcessor
from . import loading
from .checks import check_file, check_names, float32_settings_kept
from .kinds import check_steps
from .loading import (
    RECIPES,
    BatchOption,
    DeviceOption,
    DtypeOption,
    ImagesOption,
    JsonOption,
    PipelineArgument,
    SeedOption,
    StepsOption,
    answer,
    clip_arguments,
    console,
    example_prompts,
)


def _options(model: str, linears: list[str] | None = None) -> SageAttnProcessor:
    """Return the default options, with smaller limits for an embedded pipeline.

    It has so few tokens and channels that the default limits would keep all of it in 16 bit.
    """
    from ..evaluation import quality

    is_small = model in pipelines.names()
    return SageAttnProcessor(
        min_tokens=quality.MIN_TOKENS if is_small else None,
        linears=Linears("none", min_features=0 if is_small and linears else None),
    )


@float32_settings_kept()
def calibrate_policy(
    model: PipelineArgument = "tiny_sd",
    target_psnr: Annotated[float | None, typer.Option(help="The budget: least mean PSNR against stock, dB.")] = None,
    max_attention_error: Annotated[
        float | None, typer.Option(help="The budget: largest relative L2 error of a layer's attention.")
    ] = None,
    scaling: Annotated[list[str], typer.Option(help=f"A scaling to try: {', '.join(SCALINGS)}. Repeatable.")] = [  # noqa: B006
        "timestep",
        "per_block",
    ],
    recipe: Annotated[
        list[str] | None, typer.Option(help=f"A recipe to try: {RECIPES}. Repeatable. Default: qk_int8_pv_bf16 alone.")
    ] = None,
    linears: Annotated[
        list[str] | None, typer.Option(help="A format to try for linear layers: int8 or fp8. Repeatable.")
    ] = None,
    skip_limit: Annotated[
        list[float] | None, typer.Option(help="A limit to try for skipped key tiles, 0 to 1. Repeatable.")
    ] = None,
    images: ImagesOption = 8,
    steps: StepsOption = 25,
    batch: BatchOption = 8,
    seed: SeedOption = 2000,
    output: Annotated[Path, typer.Option(help="The policy file to write, .json.")] = Path("sage_policy.json"),
    state: Annotated[
        Path | None, typer.Option(help="A file for the measurements, .json. A later calibration goes on from it.")
    ] = None,
    cost: Annotated[
        str,
        typer.Option(
            help="How to rate speed: counted (operations and bytes), measured (on this machine), or auto (measured "
            "on a GPU)."
        ),
    ] = "auto",
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest options that meet a quality budget, and write them to a policy file.

    The budget is either --target-psnr or --max-attention-error, such as --target-psnr 40.
    The exit code is 1 if no options meet it.
    """
    from ..calibration import search

    check_names("--scaling", scaling, SCALINGS)
    check_names("--recipe", recipe or (), RECIPES.split(", "))
    check_names("--linears", linears or (), LINEARS[1:])
    check_names("--cost", [cost], ("auto", "counted", "measured"))
    check_file(output, "--output", ".json")
    check_file(state, "--state", ".json")
    if (target_psnr is None) == (max_attention_error is None):
        raise typer.BadParameter(
            "give one of them alone, such as --target-psnr 40", param_hint="--target-psnr or --max-attention-error"
        )
    check_steps(model, steps)
    pipe = loading.load_pipeline(model, device, dtype)
    prompts, seeds = example_prompts(images, model), [seed + i for i in range(images)]
    arguments = clip_arguments(model)
    with answer(as_json) as said:
        found = search.calibrate(
            pipe, prompts, seeds=seeds, target_psnr=target_psnr, max_attention_error=max_attention_error,
            scalings=scaling, recipes=recipe or None, steps=steps, batch=batch, cost=cost, state_path=state,
            config=_options(model, linears), linears=linears or (), progress=not as_json,
            skip_limits=skip_limit or (), arguments=arguments,
        )  # fmt: skip
        said |= {"met": found.met, "budget": found.budget, "result": found.result, "curve": found.curve}
        found.print(console)
        found.save(output)
        said["policy"] = str(output.resolve())
        options: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}
        console.print(f"Policy: {output.resolve()}", **options)
        console.print(f"Use it: pipe.set_attn_processor(SageAttnProcessor.from_policy({str(output)!r}))", **options)
    if not found.met:
        raise typer.Exit(1)
