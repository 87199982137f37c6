"""The command line: sage-processors demo | report | doctor | calibrate | bench."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

import torch


try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as missing:
    raise ImportError(f"the command line needs {missing.name}: pip install sage-processors") from missing

from . import pipelines
from .calibrate_command import DTYPES, DtypeOption, calibrate_policy, case_label, own_dtype, rules, transfer
from .command_checks import check_csv, check_picture, float32_settings_kept, save_picture
from .config import SCALINGS, SageAttnProcessor
from .language_command import bench_language
from .layer_report import NOTHING_RAN


REPOSITORY = Path(__file__).resolve().parent.parent  # in a checkout; elsewhere it has no kernels/benchmarks
RESULTS = Path("kernels") / "benchmarks" / "results.csv"

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="INT8 attention for Hugging Face pipelines."
)
bench = typer.Typer(no_args_is_help=True, help="Measure, and turn measurements into README's tables.")
app.add_typer(bench, name="bench")
bench.command("language")(bench_language)
bench.command("rules")(rules)
bench.command("transfer")(transfer)
app.command("calibrate")(calibrate_policy)
# a file or a pipe has no width of its own, and 80 columns break the layer names of the report apart
console = Console(width=None if sys.stdout.isatty() else 160)

PipelineOption = Annotated[str, typer.Option(help="Embedded pipeline, folder, or name on the Hub.")]
RecipeOption = Annotated[str, typer.Option(help="Number formats of the two matmuls.")]
ScalingOption = Annotated[str, typer.Option(help=f"{', '.join(SCALINGS)}.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")]


def main() -> None:
    """Entry point: a missing extra is a message that names the pip command, not a traceback."""
    try:
        app(prog_name="sage-processors")
    except ImportError as error:
        if "pip install" not in str(error):
            raise
        Console(stderr=True).print(f"Error: {error}", style="red", markup=False)
        sys.exit(1)


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
) -> None:
    """Draw the same seeds with stock and with INT8 attention, and show what differs."""
    config = _config(recipe, scaling)
    check_picture(output)
    pipe = _load_pipeline(pipeline, device)
    from . import quality
    from .side_by_side import amplification, side_by_side

    prompts = list(prompt) if prompt else _prompts(images)
    seeds = [seed + i for i in range(len(prompts))]
    arguments = pipelines.call_arguments(pipeline)
    with _steps_bar("stock attention", steps) as tick:
        stock = quality.generate(pipe, prompts, seeds, steps=steps, on_step=tick, **arguments)
    with pipe.set_attn_processor(config) as handle:
        with _steps_bar("INT8 attention", steps) as tick:
            ours = quality.generate(pipe, prompts, seeds, steps=steps, on_step=tick, **arguments)
        report = handle.report()
    result = quality.compare(scaling, recipe, ours, stock, (report.calls, sum(report.fallbacks.values())))
    report.print(console)
    per_picture = Table(title=f"{recipe}, {scaling}: against stock attention, same seeds", title_justify="left")
    for name, justify in (("prompt", "left"), ("seed", "right"), ("PSNR, dB", "right"), ("SSIM", "right")):
        per_picture.add_column(name, justify=justify)
    for text, number, psnr, ssim in zip(prompts, seeds, result.psnr_db, result.ssim, strict=True):
        per_picture.add_row(text, str(number), f"{psnr:.2f}", f"{ssim:.5f}")
    if result.is_ours:
        console.print(per_picture)
    else:
        console.print("No attention call ran in INT8: the table above says why.", style="yellow")
    console.print(quality.in_words(result))
    save_picture(side_by_side(stock, ours, prompts, amplification(stock, ours), ran=result.is_ours), output)
    console.print(f"Picture: {output.resolve()}", soft_wrap=True, markup=False, highlight=False)


@app.command()
def report(
    model: Annotated[
        str, typer.Argument(help="Embedded pipeline, folder of a pipeline or model, or name on the Hub.")
    ],
    recipe: RecipeOption = "qk_int8_pv_bf16",
    scaling: ScalingOption = "timestep",
) -> None:
    """List the attention layers that INT8 attention would run in. Reads configs only, loads no weights."""
    from .apply import apply

    config = _config(recipe, scaling)
    target = _load_skeleton(model)
    try:
        handle = apply(target, config)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    with handle:
        handle.report().print(console)
    console.print(
        "Nothing ran. Calls with a mask, causal calls and short ones are found, and counted, when they happen."
    )


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
    device: DeviceOption = "auto",
) -> None:
    """Check this machine: versions, kernels, a self-test of every recipe and scaling, Triton's cache. Changes nothing.

    The exit code is 1 if the self-test fails. On a GPU, the first run compiles its kernels.
    """
    from . import doctor as checks

    found = checks.examine(_torch_device(device))
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
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
) -> None:
    """PSNR and SSIM of every scaling against stock attention, and SQNR of attention: mean and worst."""
    from . import hard_variants, quality

    _config(recipe, "timestep")
    known = [known.name for known in quality.default_variants(recipe)]
    if unknown := sorted(set(variant or ()) - set(known)):
        raise typer.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(known)}", param_hint="--variant")
    if outlier < 1 or outlier & (outlier - 1):
        raise typer.BadParameter(f"{outlier} is not a power of two", param_hint="--outlier")
    check_csv(csv)
    for name in pipeline:
        pipe = _load_pipeline(name, device, dtype)
        variants = [v for v in quality.default_variants(recipe) if not variant or v.name in variant]
        prompts, seeds = _prompts(images), [seed + i for i in range(images)]
        size = {"steps": steps, "batch": batch}
        watched = {**size, "probe": True}
        batches = -(-images // batch)
        half = pipe.dtype in (torch.float16, torch.bfloat16)
        for suffix in ("", "_hard")[: 1 + hard]:
            label = case_label(name, pipe) + suffix
            calls = batches * (1 + len(variants)) + sum(v.warm for v in variants) + 2 * batches * half
            denoiser = getattr(pipe, "unet", None) or pipe.transformer
            planted = hard_variants.inject_outliers(denoiser, outlier, pairs) if suffix else nullcontext()
            with _steps_bar(label, steps * calls) as tick, planted:
                results = list(quality.evaluate(pipe, prompts, seeds, variants, on_step=tick, **watched).values())
                if half:
                    results.append(quality.floor(pipe, prompts, seeds, on_step=tick, **size))
            console.print(_quality_table(label, results))
            _refuse_idle(results)
            if csv is not None:
                quality.append_results(csv, label, results, device=str(pipe.device))
    if csv is not None:
        console.print(f"Rows appended to {csv}", markup=False, highlight=False)


@bench.command("attention", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench_attention(context: typer.Context) -> None:
    """Time the attention kernels (needs a checkout); all options go to kernels/benchmarks/bench.py."""
    script = REPOSITORY / "kernels" / "benchmarks" / "bench.py"
    if not script.is_file():
        _fail("the benchmark is not part of the installed package: clone the repository and run `make bench` there")
    sys.exit(subprocess.run([sys.executable, str(script), *context.args], check=False).returncode)


@bench.command("tables")
def bench_tables(
    readme: Annotated[Path, typer.Option(help="File with the results markers.")] = Path("README.md"),
    results: Annotated[Path, typer.Option(help="results.csv to read.")] = RESULTS,
) -> None:
    """Rewrite README's result tables, and RESULTS.md beside results.csv."""
    from .tables import update

    for path, option in ((readme, "--readme"), (results, "--results")):
        if not path.is_file():
            raise typer.BadParameter(f"{path} does not exist", param_hint=option)
    try:
        changed = update(readme, results)
    except ValueError as error:
        raise typer.BadParameter(f"{readme}: {error}", param_hint="--readme") from error
    console.print(f"{readme}: {'updated' if changed else 'already up to date'}", markup=False, highlight=False)


def _refuse_idle(results) -> None:
    """End where a variant ran nothing in INT8: stock pictures compared with themselves are no measurement."""
    idle = [result.name for result in results if result.recipe and not result.int8_calls]
    if idle:
        _fail(f"no attention call of {', '.join(idle)} ran in INT8: nothing to record")


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"Error: {message}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)


def _config(recipe: str, scaling: str) -> SageAttnProcessor:
    from .quality import MIN_TOKENS

    try:
        return SageAttnProcessor(recipe=recipe, scaling=scaling, min_tokens=MIN_TOKENS)
    except ValueError as error:
        option = "--recipe" if str(error).startswith("recipe") else "--scaling"
        raise typer.BadParameter(str(error), param_hint=option) from error


def _prompts(count: int) -> list[str]:
    """Prompts of the embedded pipelines' vocabulary, each different for the first 64: every shape in every colour."""
    shapes = ("circle", "star", "heart", "square", "ring", "triangle", "diamond", "cross")
    colors = ("red", "yellow", "green", "white", "orange", "cyan", "purple", "black")
    grounds = ("blue", "black", "white", "purple", "green", "red", "yellow")
    picks = ((colors[(i + i // 8) % 8], shapes[i % 8], grounds[i % 7]) for i in range(2 * count + 64))
    texts = [f"a {color} {shape} on a {ground} background" for color, shape, ground in picks if color != ground]
    return texts[:count]


def _torch_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise typer.BadParameter(f"{device}: {str(error).splitlines()[0]}", param_hint="--device") from error
    return chosen


def _diffusers():
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise ImportError(f'{error.name} is not installed: pip install "sage-processors[diffusers]"') from error
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    return diffusers


def _locate(name: str) -> str:
    """What diffusers loads: the folder of an embedded pipeline, a folder, or a name on the Hub."""
    if name in pipelines.names():
        return str(pipelines.path(name))
    known = f"the embedded ones are {', '.join(pipelines.names())}"
    folder = Path(name)
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("model_index.json", "config.json")):
            raise typer.BadParameter(f"folder {name} has no model_index.json and no config.json; {known}")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise typer.BadParameter(f"{name!r} is no embedded pipeline, no folder and no name on the Hub; {known}")
    return name


@contextmanager
def _loading(name: str):
    try:
        yield
    except (OSError, ValueError) as error:  # what diffusers raises for missing or broken files and names
        raise typer.BadParameter(f"{name} could not be loaded: {str(error).strip().splitlines()[0]}") from error


def _load_pipeline(name: str, device: str, dtype: str | None = None):
    """A pipeline on a device ("auto": a GPU if there is one); dtype: of DTYPES, None is the device's own."""
    diffusers, where = _diffusers(), _torch_device(device)
    source = _locate(name)
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype}: expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    chosen = own_dtype(where) if dtype is None else getattr(torch, dtype)
    if chosen == torch.float32:
        torch.backends.cudnn.allow_tf32 = False  # torch's default: convolutions with 10 bits, a floor of their own
    with _loading(name), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch_dtype: renamed in diffusers 0.42, and the only name in 0.36
        pipe = diffusers.DiffusionPipeline.from_pretrained(source, torch_dtype=chosen, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(where)


class _Skeleton:
    """A pipeline's components as far as `apply` looks at them: models without weights, and the scheduler."""

    def __init__(self, components: dict):
        self.components = components
        self.scheduler = components.get("scheduler")


def _load_skeleton(name: str):
    diffusers, source = _diffusers(), _locate(name)

    def build(class_name: str, **where):
        cls = getattr(diffusers, class_name)
        config = cls.load_config(source, **where)
        if not issubclass(cls, diffusers.ModelMixin):
            return cls.from_config(config)
        with torch.device("meta"):
            return cls.from_config(config).eval()  # as from_pretrained leaves it

    with _loading(name):
        if (Path(source) / "config.json").is_file() and not (Path(source) / "model_index.json").is_file():
            return build(json.loads((Path(source) / "config.json").read_text())["_class_name"])
        index = diffusers.DiffusionPipeline.load_config(source)
        parts = {
            part: pair[1] for part, pair in index.items() if isinstance(pair, (list, tuple)) and pair[0] == "diffusers"
        }
        return _Skeleton(
            {part: build(class_name, subfolder=part) for part, class_name in parts.items() if part != "vae"}
        )


@contextmanager
def _steps_bar(label: str, total: int):
    """A progress bar; yields the function that moves it by one step."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


def _quality_table(label: str, results) -> Table:
    table = Table(title=f"{label}: against stock attention, {len(results[0].psnr_db)} pictures", title_justify="left")
    names = ("scaling", "PSNR mean, dB", "worst", "SSIM mean", "worst", "attention SQNR mean, dB", "worst batch")
    for name in (*names, "INT8 calls", "exact calls"):
        table.add_column(name, justify="left" if name == "scaling" else "right")
    for result in results:
        n = len(result.psnr_db)
        psnr = (f"{sum(result.psnr_db) / n:.2f}", f"{min(result.psnr_db):.2f}")
        ssim = (f"{sum(result.ssim) / n:.6f}", f"{min(result.ssim):.6f}")
        sqnr = result.attention_sqnr_db
        attention = (f"{sum(sqnr) / len(sqnr):.2f}", f"{min(sqnr):.2f}") if sqnr else ("–", "–")
        if not result.is_ours:
            psnr, ssim = (NOTHING_RAN, "–"), ("–", "–")
        calls = (str(result.int8_calls), str(result.fallback_calls))
        table.add_row(result.name, *psnr, *ssim, *attention, *calls)
    return table


if __name__ == "__main__":
    main()
