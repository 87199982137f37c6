"""The command `sage-processors bench language`: perplexity and greedy text with INT8 attention and an INT8 cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import sage_kernels

from ..evaluation import language
from .checks import check_csv


def bench_language(
    model: Annotated[str, typer.Option(help="Embedded: tiny_lm; or a folder or name on the Hub.")] = "tiny_lm",
    windows: Annotated[int, typer.Option(min=1, help="Windows of held-out text.")] = 64,
    context: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of a window before the cache is read.")] = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per call that reads the cache.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts that are continued greedily.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens written per prompt.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Windows, or prompts, per call.")] = 16,
    recipe: Annotated[str, typer.Option(help="Number formats of the two matmuls.")] = sage_kernels.DEFAULT_RECIPE,
    csv: Annotated[Path | None, typer.Option(help="results.csv to append to.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")] = "auto",
) -> None:
    """Perplexity and greedy text of a language model: INT8 attention and INT8 cache against stock attention."""
    check_csv(csv)
    if recipe not in sage_kernels.RECIPES:
        raise typer.BadParameter(f"{recipe}: expected one of {sorted(sage_kernels.RECIPES)}", param_hint="--recipe")
    console = Console(width=None if sys.stdout.isatty() else 160)
    loaded, tokenizer = _load(model, device)
    try:
        text = language.heldout_windows(tokenizer, context, count=windows)
        starts = language.heldout_windows(tokenizer, prompt_tokens, count=prompts)
        with console.status("stock attention, then INT8 attention, then an INT8 cache"):
            results = language.evaluate(
                loaded, text, starts, new_tokens=new_tokens, recipe=recipe, prefill=prefill, chunk=chunk, batch=batch
            )
    except ValueError as error:  # what language says of numbers that do not fit the model or the text
        raise typer.BadParameter(str(error)) from error
    console.print(results_table(model, results))
    for result in results.values():
        if found := differences(result):
            console.print(found, markup=False, highlight=False)
    if csv is not None:
        language.append_results(csv, Path(model).name, results, loaded, context)
        console.print(f"Rows appended to {csv}", markup=False, highlight=False)


def results_table(name: str, results: dict[str, language.Result]) -> Table:
    """One row per way of running the model."""
    stock = results["stock"]
    text, written = len(stock.perplexity.losses), tuple(stock.tokens.shape)
    title = f"{name}: {text} windows of held-out text, {written[0]} prompts continued by {written[1]} tokens"
    table = Table(title=title, title_justify="left")
    columns = (
        "case",
        "perplexity",
        "over stock",
        "± standard error",
        "identical",
        "same tokens, median",
        "KV bytes/token",
    )
    for column in (*columns, "INT8 calls", "on INT8 cache", "exact calls"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for result in results.values():
        same = torch.tensor([written[1] if place is None else place for place in result.first]).float().median()
        exact = ", ".join(f"{reason} {count}" for reason, count in result.exact.items()) or "0"
        table.add_row(
            result.name, f"{result.perplexity.value:.4f}", f"{result.ratio:.5f}", f"{result.ratio_error:.5f}",
            f"{result.identical:.1%}", f"{same:.0f}", str(result.kv_bytes_per_token), str(result.int8_calls),
            str(result.cache_calls), exact,
        )  # fmt: skip
    return table


def differences(result: language.Result) -> str:
    """Where texts leave stock's, and how sure stock was of its token there; empty if none does."""
    found = [(place, lead) for place, lead in zip(result.first, result.margin, strict=True) if place is not None]
    listed = ", ".join(f"{place} ({lead:.3f})" for place, lead in sorted(found))
    return f"{result.name}: first token that is not stock's, and stock's lead there in nats: {listed}" if found else ""


def _load(model: str, device: str):
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise typer.BadParameter(f"{device}: {str(error).splitlines()[0]}", param_hint="--device") from error
    try:
        return language.load(model, device=device)
    except (OSError, ValueError) as error:  # what transformers raises for missing or broken files and names
        reason = str(error).strip().splitlines()[0]
        raise typer.BadParameter(f"{model} could not be loaded: {reason}", param_hint="--model") from error
