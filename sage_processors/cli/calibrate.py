"""Commands `calibrate`, `bench rules` and `bench transfer`. main.py adds them to the command line."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import pipelines
from ..option_groups import LINEARS, SCALINGS, Linears
from ..options import SageAttnProcessor
from . import loading
from .checks import check_csv, check_file, check_names, float32_settings_kept
from .loading import (
    RECIPES,
    BatchOption,
    CsvOption,
    DeviceOption,
    DtypeOption,
    ImagesOption,
    JsonOption,
    ModelArgument,
    SeedOption,
    StepsOption,
    answer,
    clip_arguments,
    console,
    example_prompts,
    fail,
    own_dtype,
    quality_data,
    quality_table,
    quiet_diffusers,
    refuse_idle,
    steps_bar,
)


# Changes of a model that make INT8 harder but leave 16-bit attention's result as it is. Cases are named
# {pipeline}_{name}/{scaling}.
HARD = {
    "": lambda denoiser: contextlib.nullcontext(),
    "hard_a16": lambda denoiser: _hard().inject_outliers(denoiser, 16.0, 2),
    "hard": lambda denoiser: _hard().inject_outliers(denoiser, 64.0, 2),
    "hard_a256": lambda denoiser: _hard().inject_outliers(denoiser, 256.0, 2),
    "hard_k30": lambda denoiser: _hard().bias_keys(30.0),
}
# Figures by which two scalings are compared pair by pair: field of Quality -> (name of the figure, unit of a pair).
COMPARED = {"psnr_db": ("PSNR", "seed"), "attention_sqnr_db": ("attention's SQNR", "batch")}
# The bootstrap's interval lies between the smallest and the largest difference, so it does not contain 0 if all have
# the same sign. With equal rules and n pairs, this happens by chance once in 2^(n - 1): below 5 % from 6 pairs on.
LEAST_PAIRS = 6

HardOption = Annotated[
    list[str],
    typer.Option(help=f"Measure on this variant of the model: plain, {', '.join(filter(None, HARD))}. Repeatable."),
]


def _hard() -> Any:
    from ..evaluation import hard_variants

    return hard_variants


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


def case_label(name: str, pipe) -> str:
    """Return the first part of a result's case: the pipeline's name, and a dtype other than the default.

    results.csv has no column for the dtype, and in its tables rows of one dtype must not replace those of another.
    """
    dtype = "" if pipe.dtype == own_dtype(pipe.device) else f"_{pipe.dtype}".replace("torch.", "")
    return Path(name).name + dtype


@float32_settings_kept()
def calibrate_policy(
    model: ModelArgument = "tiny_sd",
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
    hard: Annotated[
        str, typer.Option(help=f"Calibrate a variant that is harder in INT8: {', '.join(filter(None, HARD))}.")
    ] = "",
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
    csv: CsvOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest options that meet a quality budget, and write them to a policy file.

    The budget is either --target-psnr or --max-attention-error, such as --target-psnr 40.
    The exit code is 1 if no options meet it.
    """
    from ..calibration import search
    from ..calibration.trials import HELD_OUT
    from ..evaluation import quality

    check_names("--scaling", scaling, SCALINGS)
    check_names("--recipe", recipe or (), RECIPES.split(", "))
    check_names("--linears", linears or (), LINEARS[1:])
    check_names("--cost", [cost], ("auto", "counted", "measured"))
    variants = _variants([hard or "plain"])
    check_file(output, "--output", ".json")
    check_file(state, "--state", ".json")
    if (target_psnr is None) == (max_attention_error is None):
        raise typer.BadParameter(
            "give one of them alone, such as --target-psnr 40", param_hint="--target-psnr or --max-attention-error"
        )
    check_csv(csv)
    pipe = loading.load_pipeline(model, device, dtype)
    prompts, seeds = example_prompts(images, model), [seed + i for i in range(images)]
    arguments = clip_arguments(model)
    with next(iter(variants.values()))(_denoiser(pipe)), answer(as_json) as said:
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
        console.print(f'Use it: pipe.set_attn_processor(SageAttnProcessor.from_policy("{output.name}"))', **options)
        if csv is not None:
            fresh = [number + (found.result["looks"] + 1) * HELD_OUT for number in seeds]  # seeds new to the search
            size: dict[str, Any] = {"steps": steps, "batch": batch, "arguments": arguments}
            variant = quality.Variant(quality.POLICY, found.config)
            drawn = quality.evaluate(pipe, prompts, fresh, [variant], **size)[quality.POLICY]
            label = case_label(model, pipe) + (f"_{hard}" if hard else "")
            said[label] = [quality_data(drawn)]
            console.print(quality_table(label, [drawn]))
            quality.append_results(csv, label, [drawn], device=str(pipe.device))
    if not found.met:
        raise typer.Exit(1)


@float32_settings_kept()
def rules(
    model: ModelArgument = "tiny_sd",
    images: ImagesOption = 8,
    steps: StepsOption = 25,
    batch: BatchOption = 8,
    seed: SeedOption = 1000,
    hard: HardOption = ["plain", "hard", "hard_a16", "hard_a256", "hard_k30"],  # noqa: B006
    variant: Annotated[
        list[str] | None, typer.Option(help="Measure only this scaling rule. Repeatable. Default: all.")
    ] = None,
    csv: CsvOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the scaling rules by PSNR, SSIM and attention's SQNR, on plain and harder models.

    Two rules differ if the 95 % interval of their paired differences excludes 0.
    This needs 6 pairs or more. Pictures are paired by seed.
    Attention's SQNR is paired by batch: a smaller --batch gives it more pairs.
    """
    from ..evaluation import quality

    known = quality.study_variants()
    check_names("--variant", variant or (), [v.name for v in known])
    chosen = [v for v in known if not variant or v.name in variant]
    settings = _variants(hard)
    check_csv(csv)
    pipe = loading.load_pipeline(model, device, dtype)
    prompts, seeds = example_prompts(images, model), [seed + i for i in range(images)]
    with answer(as_json) as found:
        for name, harder in settings.items():
            label = case_label(model, pipe) + (f"_{name}" if name else "")
            calls = -(-images // batch) * (1 + len(chosen)) + sum(v.warm for v in chosen)
            with steps_bar(label, steps * calls) as tick, harder(_denoiser(pipe)):
                size: dict[str, Any] = {"steps": steps, "batch": batch, "arguments": clip_arguments(model)}
                results = quality.evaluate(pipe, prompts, seeds, chosen, on_step=tick, probe=True, **size)
            # two baselines: timestep has no plan in the first step of a batch, unlike timestep_warm and frozen tables
            found[label] = _record(pipe, label, list(results.values()), csv, ("timestep", "timestep_warm"))


@float32_settings_kept()
def transfer(
    model: ModelArgument = "tiny_sd",
    source: Annotated[str, typer.Option(help="The scheduler to learn with: CLASS:STEPS or CLASS:STEPS:shift=S.")] = (
        "DDIMScheduler:50"
    ),
    target: Annotated[list[str], typer.Option(help="A scheduler to run with, in the same form. Repeatable.")] = [  # noqa: B006
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
    """Measure how much quality a scale table loses with a scheduler other than its own.

    Learns a table with the --source scheduler.
    Compares it with a table learnt with each --target scheduler.
    """
    from ..evaluation import quality

    check_csv(csv)
    pipe = loading.load_pipeline(model, device, dtype)
    (learn, steps), *_ = schedulers = [_scheduler(pipe, text) for text in (source, *target)]
    config, prompts, arguments = _options(model), example_prompts(images, model), clip_arguments(model)
    with tempfile.TemporaryDirectory() as folder, answer(as_json) as found:
        table = Path(folder) / "table.safetensors"
        pipe.scheduler = learn
        with pipe.set_attn_processor(config) as handle, steps_bar(f"learning with {source}", steps) as tick:
            others = [quality.WARM_UP_SEED + i for i in range(len(prompts[:batch]))]  # as many as its own table sees
            quality.generate(pipe, prompts[:batch], others, steps=steps, on_step=tick, **arguments)
            handle.save_scales(table)
        variants = (
            quality.Variant("timestep_warm", config, warm=True),
            quality.Variant("timestep_transferred", config, scales=table),
        )
        for text, (scheduler, steps) in zip(target, schedulers[1:], strict=True):
            pipe.scheduler = scheduler
            label = f"{case_label(model, pipe)}_{text}"
            with steps_bar(label, steps * (1 + 3 * -(-images // batch))) as tick:
                seeds: list[int] = [seed + i for i in range(images)]
                size: dict[str, Any] = {"steps": steps, "batch": batch, "arguments": arguments}
                results = quality.evaluate(pipe, prompts, seeds, variants, on_step=tick, probe=True, **size)
            found[label] = _record(pipe, label, list(results.values()), csv, ("timestep_warm",))


def _variants(names) -> dict:
    check_names("--hard", names, ["plain", *filter(None, HARD)])
    return {name: HARD[name] for name in ("" if n == "plain" else n for n in names)}


def _denoiser(pipe):
    return getattr(pipe, "unet", None) or pipe.transformer


def _scheduler(pipe, text: str):
    """Return (scheduler, steps) of a text "CLASS:STEPS" or "CLASS:STEPS:shift=S"."""
    name, steps, *more = text.split(":")
    cls = getattr(quiet_diffusers(), name, None)
    if cls is None or not steps.isdigit() or len(more) > 1 or not all(x.startswith("shift=") for x in more):
        raise typer.BadParameter(f"{text!r}: expected a scheduler of diffusers as CLASS:STEPS or CLASS:STEPS:shift=S")
    # a fixed shift, instead of the one that FLUX computes from the picture's size
    options = {"shift": float(more[0].removeprefix("shift=")), "use_dynamic_shifting": False} if more else {}
    return cls.from_config(pipe.scheduler.config, **options), int(steps)


def _record(pipe, label: str, results, csv: Path | None, baselines) -> dict[str, Any]:
    """Print results and their differences from each baseline, append to `csv`, and return both as data."""
    from ..evaluation import quality

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
    """Return one row per result with its mean paired difference from the baseline, and a verdict.

    Rows also have the 95 % interval of the difference. field: a key of COMPARED.
    """
    from ..evaluation import metrics

    base = getattr(next(result for result in results if result.name == baseline), field)
    rows = []
    for result in results:
        values = getattr(result, field)
        if result.name == baseline or not (values and base and result.is_ours):
            continue  # the baseline itself, or nothing ran in INT8
        found = metrics.paired_interval(values, base)
        largest = max((a - b for a, b in zip(values, base, strict=True)), key=abs)
        verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "no difference shown"
        said = verdict if len(base) >= LEAST_PAIRS else f"{len(base)} of {LEAST_PAIRS} pairs: too few to say"
        row = {"scaling": result.name, "baseline": baseline, "field": field, "mean": found.value, "low": found.low}
        rows.append(row | {"high": found.high, "largest": largest, "that_is": said})
    return rows


def _differences(results, baseline: str, field: str) -> Table:
    """Return the rows of `_compared` as a table."""
    what, pair = COMPARED[field]
    table = Table(title=f"{what} minus that of {baseline}, paired by {pair}", title_justify="left")
    for name in ("scaling", "mean, dB", "95 % interval", "largest", "that is"):
        table.add_column(name, justify="right" if name.endswith(("dB", "interval", "largest")) else "left")
    for row in _compared(results, baseline, field):
        interval = f"{row['low']:+.2f} to {row['high']:+.2f}"
        table.add_row(row["scaling"], f"{row['mean']:+.2f}", interval, f"{row['largest']:+.2f}", row["that_is"])
    return table
