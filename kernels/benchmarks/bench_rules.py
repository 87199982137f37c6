"""Compare the scaling rules by PSNR, SSIM and attention's SQNR, on plain and harder models: rows of suite quality.

    python kernels/benchmarks/bench_rules.py tiny_sd --images 256 --csv kernels/benchmarks/results.csv
    python kernels/benchmarks/bench_rules.py tiny_flux --variant timestep --variant dynamic --hard plain

Two rules differ if the 95 % interval of their paired differences excludes 0, which needs 6 pairs or more. Pictures are
paired by seed. Attention's SQNR is paired by batch: a smaller --batch gives it more pairs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sage_processors.cli.checks import check_csv, check_names
from sage_processors.cli.loading import (
    BatchOption,
    CsvOption,
    DeviceOption,
    DtypeOption,
    ImagesOption,
    ModelArgument,
    SeedOption,
    StepsOption,
    clip_arguments,
    console,
    example_prompts,
    fail,
    load_pipeline,
    own_dtype,
    steps_bar,
)  # fmt: skip
from sage_processors.evaluation import hard_variants, metrics, quality
from sage_processors.evaluation.protocol.rating import LEAST_PAIRS


# Changes of a model that make INT8 harder but leave 16-bit attention's result as it is. Cases are named
# {pipeline}_{name}/{scaling}.
HARD = {
    "plain": lambda denoiser: contextlib.nullcontext(),
    "hard_a16": lambda denoiser: hard_variants.inject_outliers(denoiser, 16.0, 2),
    "hard": lambda denoiser: hard_variants.inject_outliers(denoiser, 64.0, 2),
    "hard_a256": lambda denoiser: hard_variants.inject_outliers(denoiser, 256.0, 2),
    "hard_k30": lambda denoiser: hard_variants.bias_keys(30.0),
}
# Figures by which two scalings are compared pair by pair: field of Quality -> (name of the figure, unit of a pair).
COMPARED = {"psnr_db": ("PSNR", "seed"), "attention_sqnr_db": ("attention's SQNR", "batch")}
# two baselines: timestep has no plan in the first step of a batch, unlike timestep_warm and frozen tables
BASELINES = ("timestep", "timestep_warm")


def main(
    model: ModelArgument = "tiny_sd",
    images: ImagesOption = 8,
    steps: StepsOption = 25,
    batch: BatchOption = 8,
    seed: SeedOption = 1000,
    hard: Annotated[list[str], typer.Option(help=f"Variant of the model: {', '.join(HARD)}. Repeatable.")] = [*HARD],  # noqa: B006
    variant: Annotated[list[str] | None, typer.Option(help="Measure only this scaling rule. Repeatable.")] = None,
    csv: CsvOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
) -> None:
    """Compare the scaling rules by PSNR, SSIM and attention's SQNR, on plain and harder models."""
    known = quality.study_variants()
    check_names("--variant", variant or (), [v.name for v in known])
    check_names("--hard", hard, HARD)
    check_csv(csv)
    chosen = [v for v in known if not variant or v.name in variant]
    pipe = load_pipeline(model, device, dtype)
    prompts, seeds = example_prompts(images, model), [seed + i for i in range(images)]
    own = "" if pipe.dtype == own_dtype(pipe.device) else f"_{pipe.dtype}".replace("torch.", "")
    for name in hard:
        # results.csv has no column for the dtype: rows of one dtype must not replace those of another
        label = Path(model).name + own + (f"_{name}" if name != "plain" else "")
        calls = -(-images // batch) * (1 + len(chosen)) + sum(v.warm for v in chosen)
        denoiser = getattr(pipe, "unet", None) or pipe.transformer
        with steps_bar(label, steps * calls) as tick, HARD[name](denoiser):
            size = {"steps": steps, "batch": batch, "arguments": clip_arguments(model)}
            results = list(quality.evaluate(pipe, prompts, seeds, chosen, on_step=tick, probe=True, **size).values())
        console.print(quality_table(label, results))
        if idle := [result.name for result in results if not result.int8_calls]:  # stock compared with itself
            fail(f"no attention call of {', '.join(idle)} ran in INT8: nothing to record")
        for baseline in BASELINES:
            if len(results) > 1 and any(result.name == baseline for result in results):
                for field in COMPARED:
                    console.print(differences(results, baseline, field))
        if csv is not None:
            quality.append_results(csv, label, results, device=str(pipe.device))


def quality_table(label: str, results) -> Table:
    """Return a table of PSNR, SSIM, attention's SQNR and calls, one row for each variant."""
    table = Table(title=f"{label}: against stock attention, {len(results[0].psnr_db)} pictures", title_justify="left")
    names = ("scaling", "PSNR mean, dB", "worst", "SSIM mean", "worst", "attention SQNR mean, dB", "worst batch")
    for name in (*names, "INT8 calls", "16-bit calls"):
        table.add_column(name, justify="left" if name == "scaling" else "right")
    for result in results:
        n = len(result.psnr_db)
        psnr = (f"{sum(result.psnr_db) / n:.2f}", f"{min(result.psnr_db):.2f}")
        ssim = (f"{sum(result.ssim) / n:.6f}", f"{min(result.ssim):.6f}")
        sqnr = result.attention_sqnr_db
        attention = (f"{sum(sqnr) / len(sqnr):.2f}", f"{min(sqnr):.2f}") if sqnr else ("–", "–")
        if not result.is_ours:
            psnr, ssim = (quality.NOTHING_RAN, "–"), ("–", "–")
        calls = (str(result.int8_calls), str(result.fallback_calls))
        table.add_row(result.name, *psnr, *ssim, *attention, *calls)
    return table


def differences(results, baseline: str, field: str) -> Table:
    """Return a table of paired differences from the baseline, with 95 % intervals and a verdict.

    field: a key of COMPARED.
    """
    what, pair = COMPARED[field]
    table = Table(title=f"{what} minus that of {baseline}, paired by {pair}", title_justify="left")
    for name in ("scaling", "mean, dB", "95 % interval", "largest", "that is"):
        table.add_column(name, justify="right" if name.endswith(("dB", "interval", "largest")) else "left")
    base = getattr(next(result for result in results if result.name == baseline), field)
    for result in results:
        values = getattr(result, field)
        if result.name == baseline or not (values and base):
            continue
        found = metrics.paired_interval(values, base)
        largest = max((a - b for a, b in zip(values, base, strict=True)), key=abs)
        said = "better" if found.low > 0 else "worse" if found.high < 0 else "no difference shown"
        said = said if len(base) >= LEAST_PAIRS else f"{len(base)} of {LEAST_PAIRS} pairs: too few to say"
        interval = f"{found.low:+.2f} to {found.high:+.2f}"
        table.add_row(result.name, f"{found.value:+.2f}", interval, f"{largest:+.2f}", said)
    return table


if __name__ == "__main__":
    typer.run(main)
