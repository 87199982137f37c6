"""The commands of fidelity: `calibrate`, `bench rules` and `bench transfer`; main.py adds them to the command line."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import pipelines
from ..calibration.search import calibrate
from ..calibration.trials import HELD_OUT
from ..evaluation import hard_variants, metrics, quality
from ..option_groups import Linears
from ..options import SageAttnProcessor
from . import loading
from .as_json import JsonOption, answer, quality_data
from .checks import check_csv, check_file, float32_settings_kept
from .loading import (
    DeviceOption,
    DtypeOption,
    PipelineOption,
    clip_arguments,
    console,
    example_prompts,
    fail,
    own_dtype,
    quality_table,
    quiet_diffusers,
    refuse_idle,
    steps_bar,
)


# Ways to make INT8 harder that leave exact attention as it is, by the name of the case: {pipeline}_{name}/{scaling}.
HARD = {
    "": lambda denoiser: contextlib.nullcontext(),
    "hard_a16": lambda denoiser: hard_variants.inject_outliers(denoiser, 16.0, 2),
    "hard": lambda denoiser: hard_variants.inject_outliers(denoiser, 64.0, 2),
    "hard_a256": lambda denoiser: hard_variants.inject_outliers(denoiser, 256.0, 2),
    "hard_k30": lambda denoiser: hard_variants.bias_keys(30.0),
}
# What two ways of scaling are compared by, pair by pair: field of Quality -> (what it is, what the pairs are).
COMPARED = {"psnr_db": ("PSNR", "seed"), "attention_sqnr_db": ("attention's SQNR", "batch")}
# The bootstrap's interval lies between the least and the largest difference, and can't hold 0 where all point one way.
# Equal rules do that by chance in one of 2^(n - 1) sets of n pairs: only from 6 pairs on in less than 5 %.
LEAST_PAIRS = 6

ImagesOption = Annotated[int, typer.Option(min=1, help="Pictures.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Denoising steps.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Pictures per pipeline call.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the first picture.")]
HardOption = Annotated[
    list[str], typer.Option(help=f"Only these variants; {', '.join(filter(None, HARD))}, or plain.")
]
CsvOption = Annotated[Path | None, typer.Option(help="results.csv to append to.")]


def _options(pipeline: str, linears: list[str] | None = None) -> SageAttnProcessor:
    """The defaults; at the few tokens and channels of an embedded pipeline they would leave all of it exact."""
    is_small = pipeline in pipelines.names()
    return SageAttnProcessor(
        min_tokens=quality.MIN_TOKENS if is_small else None,
        linears=Linears("none", min_features=0 if is_small and linears else None),
    )


def case_label(name: str, pipe) -> str:
    """First part of a results' case: the pipeline's name, and its dtype where that is not the device's own.

    results.csv has no column for it, and in its tables rows of one dtype must not replace those of another.
    """
    dtype = "" if pipe.dtype == own_dtype(pipe.device) else f"_{pipe.dtype}".replace("torch.", "")
    return Path(name).name + dtype


@float32_settings_kept()
def calibrate_policy(
    pipeline: PipelineOption = "tiny_sd",
    target_psnr: Annotated[float | None, typer.Option(help="Mean PSNR against stock attention, dB.")] = None,
    max_attention_error: Annotated[float | None, typer.Option(help="Relative L2 of every layer's attention.")] = None,
    scaling: Annotated[list[str], typer.Option(help="To try; may be repeated.")] = ["timestep", "per_block"],  # noqa: B006
    recipe: Annotated[list[str] | None, typer.Option(help="To try; may be repeated. The default one if none.")] = None,
    linears: Annotated[
        list[str] | None, typer.Option(help="Formats to try for linear layers, int8 or fp8; may be repeated.")
    ] = None,
    skip_limit: Annotated[
        list[float] | None, typer.Option(help='Limits to try for skip="temporal", 0 to 1; may be repeated.')
    ] = None,
    images: ImagesOption = 8,
    steps: StepsOption = 25,
    batch: BatchOption = 8,
    seed: SeedOption = 2000,
    hard: Annotated[str, typer.Option(help=f"Calibrate a harder variant: {', '.join(filter(None, HARD))}.")] = "",
    output: Annotated[Path, typer.Option(help="The policy to write, .json.")] = Path("sage_policy.json"),
    state: Annotated[Path | None, typer.Option(help="Where to keep what was measured, to go on later; .json.")] = None,
    cost: Annotated[str, typer.Option(help="counted, measured or auto.")] = "auto",
    csv: CsvOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest attention that meets a quality budget. The exit code is 1 if none does."""
    variants = _variants([hard or "plain"])
    check_file(output, "--output", ".json")
    check_file(state, "--state", ".json")
    check_csv(csv)
    pipe = loading.load_pipeline(pipeline, device, dtype)
    prompts, seeds = example_prompts(images, pipeline), [seed + i for i in range(images)]
    arguments = clip_arguments(pipeline)
    with next(iter(variants.values()))(_denoiser(pipe)), answer(as_json) as said:
        try:
            found = calibrate(
                pipe, prompts, seeds=seeds, target_psnr=target_psnr, max_attention_error=max_attention_error,
                scalings=scaling, recipes=recipe or None, steps=steps, batch=batch, cost=cost, state_path=state,
                config=_options(pipeline, linears), linears=linears or (), progress=not as_json,
                skip_limits=skip_limit or (), arguments=arguments,
            )  # fmt: skip
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        said |= {"met": found.met, "budget": found.budget, "result": found.result, "curve": found.curve}
        found.print(console)
        found.save(output)
        said["policy"] = str(output.resolve())
        console.print(f"Policy: {output.resolve()}", soft_wrap=True, markup=False, highlight=False)
        if csv is not None:
            fresh = [number + (found.result["looks"] + 1) * HELD_OUT for number in seeds]  # seeds that decided nothing
            size: dict[str, Any] = {"steps": steps, "batch": batch, "arguments": arguments}
            variant = quality.Variant(quality.POLICY, found.config)
            drawn = quality.evaluate(pipe, prompts, fresh, [variant], **size)[quality.POLICY]
            label = case_label(pipeline, pipe) + (f"_{hard}" if hard else "")
            said[label] = [quality_data(drawn)]
            console.print(quality_table(label, [drawn]))
            quality.append_results(csv, label, [drawn], device=str(pipe.device))
    if not found.met:
        raise typer.Exit(1)


@float32_settings_kept()
def rules(
    pipeline: PipelineOption = "tiny_sd",
    images: ImagesOption = 8,
    steps: StepsOption = 25,
    batch: BatchOption = 8,
    seed: SeedOption = 1000,
    hard: HardOption = ["plain", "hard", "hard_a16", "hard_a256", "hard_k30"],  # noqa: B006
    variant: Annotated[list[str] | None, typer.Option(help="Only these rules; may be repeated.")] = None,
    csv: CsvOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """PSNR, SSIM and attention's own error of every scaling rule, on the plain and the harder variants.

    Two rules differ if the interval of their paired differences, of 6 pairs or more, does not hold 0. Pictures are
    paired seed by seed; attention's SQNR batch by batch, so a smaller --batch gives it more pairs.
    """
    known = quality.study_variants()
    if unknown := sorted(set(variant or ()) - {v.name for v in known}):
        expected = ", ".join(v.name for v in known)
        raise typer.BadParameter(f"{', '.join(unknown)}: expected some of {expected}", param_hint="--variant")
    chosen = [v for v in known if not variant or v.name in variant]
    settings = _variants(hard)
    check_csv(csv)
    pipe = loading.load_pipeline(pipeline, device, dtype)
    prompts, seeds = example_prompts(images, pipeline), [seed + i for i in range(images)]
    with answer(as_json) as found:
        for name, harder in settings.items():
            label = case_label(pipeline, pipe) + (f"_{name}" if name else "")
            calls = -(-images // batch) * (1 + len(chosen)) + sum(v.warm for v in chosen)
            with steps_bar(label, steps * calls) as tick, harder(_denoiser(pipe)):
                size: dict[str, Any] = {"steps": steps, "batch": batch, "arguments": clip_arguments(pipeline)}
                results = quality.evaluate(pipe, prompts, seeds, chosen, on_step=tick, probe=True, **size)
            # timestep runs the first step of each batch dynamic; rules with a frozen table never do, nor timestep_warm
            found[label] = _record(pipe, label, list(results.values()), csv, ("timestep", "timestep_warm"))


@float32_settings_kept()
def transfer(
    pipeline: PipelineOption = "tiny_sd",
    source: Annotated[str, typer.Option(help="Scheduler to learn with, CLASS:STEPS or CLASS:STEPS:shift=S.")] = (
        "DDIMScheduler:50"
    ),
    target: Annotated[list[str], typer.Option(help="Schedulers to run with; may be repeated.")] = [  # noqa: B006
        "DPMSolverMultistepScheduler:20",
        "EulerDiscreteScheduler:20",
    ],
    images: ImagesOption = 8,
    batch: BatchOption = 8,
    seed: SeedOption = 1000,
    csv: CsvOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a table of scales loses with another scheduler than it was learnt with: own table, and transferred."""
    check_csv(csv)
    pipe = loading.load_pipeline(pipeline, device, dtype)
    (learn, steps), *_ = schedulers = [_scheduler(pipe, text) for text in (source, *target)]
    config, prompts, arguments = _options(pipeline), example_prompts(images, pipeline), clip_arguments(pipeline)
    with tempfile.TemporaryDirectory() as folder, answer(as_json) as found:
        table = Path(folder) / "table.safetensors"
        pipe.scheduler = learn
        with pipe.set_attn_processor(config) as handle, steps_bar(f"learning with {source}", steps) as tick:
            others = [quality.WARM_UP_SEED + i for i in range(len(prompts[:batch]))]  # as many as the own table saw
            quality.generate(pipe, prompts[:batch], others, steps=steps, on_step=tick, **arguments)
            handle.save_scales(table)
        variants = (
            quality.Variant("timestep_warm", config, warm=True),
            quality.Variant("timestep_transferred", config, scales=table),
        )
        for text, (scheduler, steps) in zip(target, schedulers[1:], strict=True):
            pipe.scheduler = scheduler
            label = f"{case_label(pipeline, pipe)}_{text}"
            with steps_bar(label, steps * (1 + 3 * -(-images // batch))) as tick:
                seeds: list[int] = [seed + i for i in range(images)]
                size: dict[str, Any] = {"steps": steps, "batch": batch, "arguments": arguments}
                results = quality.evaluate(pipe, prompts, seeds, variants, on_step=tick, probe=True, **size)
            found[label] = _record(pipe, label, list(results.values()), csv, ("timestep_warm",))


def _variants(names) -> dict:
    if unknown := sorted(set(names) - {*HARD, "plain"}):
        expected = ", ".join(("plain", *filter(None, HARD)))
        raise typer.BadParameter(f"{', '.join(unknown)}: expected some of {expected}", param_hint="--hard")
    return {name: HARD[name] for name in ("" if n == "plain" else n for n in names)}


def _denoiser(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer


def _scheduler(pipe, text: str):
    """(scheduler, steps) of "CLASS:STEPS" or "CLASS:STEPS:shift=S"."""
    name, steps, *more = text.split(":")
    cls = getattr(quiet_diffusers(), name, None)
    if cls is None or not steps.isdigit() or len(more) > 1 or not all(x.startswith("shift=") for x in more):
        raise typer.BadParameter(f"{text!r}: expected a scheduler of diffusers as CLASS:STEPS or CLASS:STEPS:shift=S")
    # a fixed shift instead of the one that FLUX computes from the picture's size
    options = {"shift": float(more[0].removeprefix("shift=")), "use_dynamic_shifting": False} if more else {}
    return cls.from_config(pipe.scheduler.config, **options), int(steps)


def _record(pipe, label: str, results, csv: Path | None, baselines) -> dict[str, Any]:
    """Print, append to `csv`, and return as data: the results, and what they differ from each baseline by."""
    data: dict[str, Any] = {"results": [quality_data(result) for result in results], "differences": []}
    console.print(quality_table(label, results))
    refuse_idle(results)
    for baseline in baselines:
        if any(result.name == baseline for result in results) and len(results) > 1:
            for field in COMPARED:
                data["differences"] += _compared(results, baseline, field)
                console.print(_differences(results, baseline, field))
    if idle := [result.name for result in results if not result.is_ours]:
        fail(f"no attention call of {', '.join(idle)} ran in INT8: nothing to record")
    if csv is not None:
        quality.append_results(csv, label, results, device=str(pipe.device))
    return data


def _compared(results, baseline: str, field: str) -> list[dict[str, Any]]:
    """One of COMPARED over that of the baseline, of the same seeds: mean, 95 % interval, and what it says."""
    base = getattr(next(result for result in results if result.name == baseline), field)
    rows = []
    for result in results:
        values = getattr(result, field)
        if result.name == baseline or not (values and base and result.is_ours):
            continue  # nothing ran in INT8: nothing was measured
        found = metrics.paired_interval(values, base)
        largest = max((a - b for a, b in zip(values, base, strict=True)), key=abs)
        verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "no difference shown"
        said = verdict if len(base) >= LEAST_PAIRS else f"{len(base)} of {LEAST_PAIRS} pairs: too few to say"
        row = {"scaling": result.name, "baseline": baseline, "field": field, "mean": found.value, "low": found.low}
        rows.append(row | {"high": found.high, "largest": largest, "that_is": said})
    return rows


def _differences(results, baseline: str, field: str) -> Table:
    """What `_compared` found, as a table."""
    what, pair = COMPARED[field]
    table = Table(title=f"{what} minus that of {baseline}, paired by {pair}", title_justify="left")
    for name in ("scaling", "mean, dB", "95 % interval", "largest", "that is"):
        table.add_column(name, justify="right" if name.endswith(("dB", "interval", "largest")) else "left")
    for row in _compared(results, baseline, field):
        interval = f"{row['low']:+.2f} to {row['high']:+.2f}"
        table.add_row(row["scaling"], f"{row['mean']:+.2f}", interval, f"{row['largest']:+.2f}", row["that_is"])
    return table
