"""Entry point of the command line, with the commands demo, report and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from ..installation import pip_install


try:
    import typer
    from rich.table import Table
except ImportError as missing:
    raise ImportError(f"the command line needs {missing.name}: {pip_install()}") from missing

from .. import pipelines
from ..option_groups import SCALINGS
from ..options import SageAttnProcessor
from ..version import __version__
from . import loading
from .arguments import OneLineErrors
from .calibrate import calibrate_policy
from .checks import check_names, check_picture, float32_settings_kept, save_picture
from .kinds import check_steps
from .loading import (
    RECIPES,
    DeviceOption,
    JsonOption,
    ModelArgument,
    PipelineArgument,
    RecipeOption,
    ScalingOption,
    SeedOption,
    StepsOption,
    answer,
    console,
    example_prompts,
    load_skeleton,
    quality_data,
    steps_bar,
    torch_device,
)
from .rate import rate, time_model
from .warm_up import warm_up


SLOW_REFERENCE = (
    "No GPU: INT8 attention runs in its reference, plain PyTorch that rounds as the kernels do. It shows the quality; "
    "it is slower than stock, and its times say nothing about a GPU."
)
NOTHING_YET = (
    "A forecast: nothing ran. Calls that fall back to 16 bit, such as short ones, are counted when they happen."
)

app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"sage-processors {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """INT8 attention for Hugging Face diffusers pipelines and transformers models."""


@app.command()
@float32_settings_kept()
def demo(
    model: PipelineArgument = "tiny_sd",
    prompt: Annotated[list[str] | None, typer.Option(help="Draw one picture of this prompt. Repeatable.")] = None,
    images: Annotated[
        int, typer.Option(min=1, max=64, help="The number of pictures, drawn together, if no --prompt is given.")
    ] = 3,
    steps: StepsOption = 20,
    seed: SeedOption = 0,
    recipe: RecipeOption = "qk_int8_pv_bf16",
    scaling: ScalingOption = "timestep",
    output: Annotated[Path, typer.Option(help="The picture to write, such as x.png.")] = Path("sage_demo.png"),
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Draw the same pictures with stock and with INT8 attention, and compare them.

    Writes a picture of both and of their amplified difference.
    Prints PSNR, SSIM and a report of the attention calls.
    """
    config = _config(recipe, scaling)
    check_picture(output)
    check_steps(model, steps)
    pipe = loading.load_pipeline(model, device)
    from ..evaluation import quality
    from ..evaluation.side_by_side import amplification, side_by_side
    from ..evaluation.video_drawing import strip

    prompts = list(prompt) if prompt else example_prompts(images, model)
    seeds = [seed + i for i in range(len(prompts))]
    arguments = pipelines.call_arguments(model)
    with answer(as_json) as found:
        if pipe.device.type == "cpu":
            console.print(SLOW_REFERENCE, style="yellow")
        with steps_bar("stock attention", steps) as tick:
            stock = quality.generate(pipe, prompts, seeds, steps=steps, on_step=tick, **arguments)
        with pipe.set_attn_processor(config) as handle:
            with steps_bar("INT8 attention", steps) as tick:
                ours = quality.generate(pipe, prompts, seeds, steps=steps, on_step=tick, **arguments)
            report = handle.report()
        result = quality.compare(scaling, recipe, ours, stock, (report.calls, sum(report.fallbacks.values())))
        found |= {"report": report.as_dict(), "prompts": prompts, "seeds": seeds, "quality": quality_data(result)}
        report.print(console)
        per_picture = Table(title=f"{recipe}, {scaling}: against stock attention, same seeds", title_justify="left")
        for name in ("prompt", "seed", "PSNR, dB", "SSIM"):
            per_picture.add_column(name, justify="left" if name == "prompt" else "right")
        for text, number, psnr, ssim in zip(prompts, seeds, result.psnr_db, result.ssim, strict=True):
            per_picture.add_row(text, str(number), f"{psnr:.2f}", f"{ssim:.5f}")
        if result.is_ours:
            console.print(per_picture)
        else:
            console.print("No attention call ran in INT8: the table above says why.", style="yellow")
        console.print(quality.in_words(result))
        if stock.dim() == 5:  # clips: frames of the first one
            sheet = strip(stock[0], ours[0], ran=result.is_ours)
        else:
            sheet = side_by_side(stock, ours, prompts, amplification(stock, ours), ran=result.is_ours)
        save_picture(sheet, output)
        found["picture"] = str(output.resolve())
        console.print(f"Picture: {output.resolve()}", soft_wrap=True, markup=False, highlight=False)


@app.command()
def report(
    model: ModelArgument,
    recipe: RecipeOption = "qk_int8_pv_bf16",
    scaling: Annotated[
        str,
        typer.Option(
            help=f"How quantisation scales are chosen: {', '.join(SCALINGS)}. Models of transformers always have "
            "per_token."
        ),
    ] = "timestep",
    as_json: JsonOption = False,
) -> None:
    """List the attention layers of a model that can run in INT8.

    Reads only the model's configs and loads no weights.
    Works for pipelines of diffusers and models of transformers.
    """
    language_model = loading.load_language_skeleton(model)
    if language_model is not None:
        _report_language(language_model, recipe, scaling, as_json)
        return
    from ..entry import apply

    config, target = _config(recipe, scaling), load_skeleton(model, with_texts=True)
    try:
        handle = apply(target, config)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    with handle, answer(as_json) as found:
        found |= (planned := handle.report()).as_dict()
        planned.print(console)
        console.print(NOTHING_YET)


def _report_language(model: Any, recipe: str, scaling: str, as_json: bool) -> None:
    """Print the report of a transformers model with this recipe, before any call."""
    from ..language.attention import attention_report
    from ..language.generation.handle import implementation_of

    if SCALINGS.get(scaling) != "per_token":
        raise typer.BadParameter(f"{scaling}: models of transformers have per_token", param_hint="--scaling")
    check_names("--recipe", [recipe], RECIPES.split(", "))
    options: Any = {"recipe": recipe, "scaling": "per_token"}
    model.set_attn_implementation(implementation_of(SageAttnProcessor(**options)))  # as sp.apply does
    with answer(as_json) as found:
        found |= (planned := attention_report(model)).as_dict()
        planned.print(console)
        console.print(NOTHING_YET)


@app.command()
def doctor(
    every: Annotated[bool, typer.Option("--all", help="List every check and every tile, not their sums.")] = False,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Say what this machine is fit for: versions, kernels, Triton's cache, a self-test of recipes.

    Changes no settings. On a GPU, the first run compiles kernels into Triton's cache.
    The exit code is 1 if the self-test fails.
    """
    from . import doctor as checks

    with answer(as_json) as found:
        found |= checks.examine(torch_device(device))
        checks.show(found, console, every)
    if not found["passed"]:
        raise typer.Exit(1)


app.command("time")(time_model)
app.command("rate")(rate)
app.command("warm-up")(warm_up)
app.command("calibrate")(calibrate_policy)


def _config(recipe: Any, scaling: Any) -> SageAttnProcessor:
    from ..evaluation.quality import MIN_TOKENS

    try:
        return SageAttnProcessor(recipe=recipe, scaling=scaling, min_tokens=MIN_TOKENS)
    except ValueError as error:
        option = "--recipe" if str(error).startswith("recipe") else "--scaling"
        raise typer.BadParameter(str(error), param_hint=option) from error
