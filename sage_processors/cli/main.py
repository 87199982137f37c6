"""The command line: sage-processors demo | report | doctor | warm-up | calibrate | bench."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch


try:
    import typer
    from rich.table import Table
except ImportError as missing:
    raise ImportError(f"the command line needs {missing.name}: pip install sage-processors") from missing

import sage_kernels

from .. import pipelines
from ..option_groups import SCALINGS
from ..options import SageAttnProcessor
from ..version import __version__
from . import loading
from .as_json import JsonOption, answer, quality_data
from .calibrate import calibrate_policy, case_label, rules, transfer
from .checks import check_csv, check_picture, float32_settings_kept, save_picture
from .language import bench_language
from .loading import (
    DeviceOption,
    DtypeOption,
    PipelineOption,
    clip_arguments,
    console,
    example_prompts,
    fail,
    load_skeleton,
    quality_table,
    refuse_idle,
    steps_bar,
    torch_device,
)
from .one_line import OneLineErrors
from .warm_up import warm_up


REPOSITORY = Path(__file__).resolve().parent.parent.parent  # in a checkout; elsewhere it has no kernels/benchmarks

app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure quality and speed.")
app.add_typer(bench, name="bench")
bench.command("language")(bench_language)
bench.command("rules")(rules)
bench.command("transfer")(transfer)
app.command("calibrate")(calibrate_policy)
app.command("warm-up")(warm_up)
RecipeOption = Annotated[str, typer.Option(help="Number formats of the two matmuls.")]
ScalingOption = Annotated[str, typer.Option(help=f"{', '.join(SCALINGS)}.")]


def main() -> None:
    """Entry point: a missing extra is a message that names the pip command, not a traceback."""
    try:
        app(prog_name="sage-processors")
    except ImportError as error:
        if "pip install" not in str(error):
            raise
        typer.echo(f"Error: {error}", err=True)
        sys.exit(1)


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
    """INT8 attention for Hugging Face pipelines."""


@app.command()
@float32_settings_kept()
def demo(
    pipeline: PipelineOption = "tiny_sd",
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated; one picture each.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Pictures, without --prompt.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture.")] = 0,
    recipe: RecipeOption = "qk_int8_pv_bf16",
    scaling: ScalingOption = "timestep",
    output: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("sage_demo.png"),
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Draw the same seeds with stock and with INT8 attention, and show what differs."""
    config = _config(recipe, scaling)
    check_picture(output)
    pipe = loading.load_pipeline(pipeline, device)
    from ..evaluation import quality
    from ..evaluation.side_by_side import amplification, side_by_side
    from ..evaluation.video_drawing import strip

    prompts = list(prompt) if prompt else example_prompts(images, pipeline)
    seeds = [seed + i for i in range(len(prompts))]
    arguments = pipelines.call_arguments(pipeline)
    with answer(as_json) as found:
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
        if stock.dim() == 5:  # of clips: the frames of the first one
            sheet = strip(stock[0], ours[0], ran=result.is_ours)
        else:
            sheet = side_by_side(stock, ours, prompts, amplification(stock, ours), ran=result.is_ours)
        save_picture(sheet, output)
        found["picture"] = str(output.resolve())
        console.print(f"Picture: {output.resolve()}", soft_wrap=True, markup=False, highlight=False)


@app.command()
def report(
    model: Annotated[
        str,
        typer.Argument(help="Embedded pipeline or language model, folder of a pipeline or model, or name on the Hub."),
    ],
    recipe: RecipeOption = "qk_int8_pv_bf16",
    scaling: Annotated[
        str, typer.Option(help=f"{', '.join(SCALINGS)}; models of transformers have per_token.")
    ] = "timestep",
    as_json: JsonOption = False,
) -> None:
    """List the attention layers that INT8 attention would run in. Reads configs only, loads no weights."""
    language_model = loading.load_language_skeleton(model)
    if language_model is not None:
        _report_language(language_model, recipe, scaling, as_json)
        return
    from ..diffusion.handle import apply

    config, target = _config(recipe, scaling), load_skeleton(model)
    try:
        handle = apply(target, config)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    with handle, answer(as_json) as found:
        found |= (planned := handle.report()).as_dict()
        planned.print(console)
        console.print(
            "Nothing ran. Calls with a mask, causal calls and short ones are found, and counted, when they happen."
        )


def _report_language(model: Any, recipe: str, scaling: str, as_json: bool) -> None:
    """The report of a transformers model with the name of a recipe, before any call."""
    from ..language.attention import attention_report
    from ..language.names import name_of

    if SCALINGS.get(scaling) != "per_token":
        raise typer.BadParameter(f"{scaling}: models of transformers have per_token", param_hint="--scaling")
    if recipe not in sage_kernels.RECIPES:
        raise typer.BadParameter(f"{recipe}: expected one of {sorted(sage_kernels.RECIPES)}", param_hint="--recipe")
    model.set_attn_implementation(name_of(recipe))
    with answer(as_json) as found:
        found |= (planned := attention_report(model)).as_dict()
        planned.print(console)
        console.print(
            "Nothing ran. Exact calls, of which short ones are some, are found and counted when they happen."
        )


@app.command()
def doctor(
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Check this machine: versions, kernels, a self-test of every recipe and scaling, Triton's cache. Changes nothing.

    The exit code is 1 if the self-test fails. On a GPU, the first run compiles its kernels.
    """
    from . import doctor as checks

    with answer(as_json) as found:
        found |= checks.examine(torch_device(device))
        checks.show(found, console)
    if not found["passed"]:
        raise typer.Exit(1)


@bench.command("quality")
@float32_settings_kept()
def bench_quality(
    pipeline: Annotated[list[str], typer.Option(help="May be repeated; as for demo.")] = ["tiny_sd"],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 25,
    images: Annotated[int, typer.Option(min=1, help="Pictures per variant.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Pictures per pipeline call.")] = 8,
    # seeds 0 to 31 chose the default margin: the figures come from others
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture.")] = 1000,
    recipe: RecipeOption = "qk_int8_pv_bf16",
    variant: Annotated[list[str] | None, typer.Option(help="Only these, e.g. timestep; may be repeated.")] = None,
    hard: Annotated[bool, typer.Option(help="Also with outliers planted in Q and K.")] = True,
    outlier: Annotated[int, typer.Option(help="Factor of the planted outliers, a power of two.")] = 64,
    pairs: Annotated[int, typer.Option(min=1, help="Outlier channel pairs per head.")] = 2,
    csv: Annotated[Path | None, typer.Option(help="results.csv to append to.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """PSNR and SSIM of every scaling against stock attention, and SQNR of attention: mean and worst."""
    from ..evaluation import hard_variants, quality

    _config(recipe, "timestep")
    known = [known.name for known in quality.default_variants(recipe)]
    if unknown := sorted(set(variant or ()) - set(known)):
        raise typer.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(known)}", param_hint="--variant")
    if outlier < 1 or outlier & (outlier - 1):
        raise typer.BadParameter(f"{outlier} is not a power of two", param_hint="--outlier")
    check_csv(csv)
    with answer(as_json) as found:
        for name in pipeline:
            pipe = loading.load_pipeline(name, device, dtype)
            variants = [v for v in quality.default_variants(recipe) if not variant or v.name in variant]
            prompts, seeds = example_prompts(images, name), [seed + i for i in range(images)]
            size: dict[str, Any] = {"steps": steps, "batch": batch, "arguments": clip_arguments(name)}
            watched: dict[str, Any] = {**size, "probe": True}
            batches = -(-images // batch)
            half = pipe.dtype in (torch.float16, torch.bfloat16)
            for suffix in ("", "_hard")[: 1 + hard]:
                label = case_label(name, pipe) + suffix
                calls = batches * (1 + len(variants)) + sum(v.warm for v in variants) + 2 * batches * half
                denoiser = getattr(pipe, "unet", None) or pipe.transformer
                planted = hard_variants.inject_outliers(denoiser, outlier, pairs) if suffix else nullcontext()
                with steps_bar(label, steps * calls) as tick, planted:
                    results = list(quality.evaluate(pipe, prompts, seeds, variants, on_step=tick, **watched).values())
                    if half:
                        results.append(quality.floor(pipe, prompts, seeds, on_step=tick, **size))
                found[label] = [quality_data(result) for result in results]
                console.print(quality_table(label, results))
                refuse_idle(results)
                if csv is not None:
                    quality.append_results(csv, label, results, device=str(pipe.device))
        if csv is not None:
            console.print(f"Rows appended to {csv}", markup=False, highlight=False)


@bench.command("attention", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench_attention(context: typer.Context) -> None:
    """Time the attention kernels (needs a checkout); all options go to kernels/benchmarks/bench.py."""
    script = REPOSITORY / "kernels" / "benchmarks" / "bench.py"
    if not script.is_file():
        fail("the benchmark is not part of the installed package: clone the repository and run `make bench` there")
    sys.exit(subprocess.run([sys.executable, str(script), *context.args], check=False).returncode)


def _config(recipe: Any, scaling: Any) -> SageAttnProcessor:
    from ..evaluation.quality import MIN_TOKENS

    try:
        return SageAttnProcessor(recipe=recipe, scaling=scaling, min_tokens=MIN_TOKENS)
    except ValueError as error:
        option = "--recipe" if str(error).startswith("recipe") else "--scaling"
        raise typer.BadParameter(str(error), param_hint=option) from error


if __name__ == "__main__":
    main()
