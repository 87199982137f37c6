"""The command `sage-processors bench language`: perplexity and greedy text with INT8 attention and an INT8 cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import sage_kernels

from ..evaluation import language
from .as_json import JsonOption, answer
from .checks import check_csv, refusing
from .loading import DeviceOption, console, torch_device


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
    chat: Annotated[bool, typer.Option("--chat", help="Dialogues in the model's own chat template.")] = False,
    recipe: Annotated[str, typer.Option(help="Number formats of the two matmuls.")] = sage_kernels.DEFAULT_RECIPE,
    csv: Annotated[Path | None, typer.Option(help="results.csv to append to.")] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Perplexity and greedy text of a language model: INT8 attention and INT8 cache against stock attention.

    The text is plain, through the model's own tokenizer; tiny_lm reads dialogues in the markup that it was trained on.
    """
    check_csv(csv)
    if recipe not in sage_kernels.RECIPES:
        raise typer.BadParameter(f"{recipe}: expected one of {sorted(sage_kernels.RECIPES)}", param_hint="--recipe")
    loaded, tokenizer = _load(model, device)
    with answer(as_json) as found:
        try:
            text = language.heldout_windows(tokenizer, context, count=windows, chat=chat)
            starts = language.heldout_windows(tokenizer, prompt_tokens, count=prompts, chat=chat)
            with console.status("stock attention, then INT8 attention, then an INT8 cache"):
                results = language.evaluate(
                    loaded, text, starts, new_tokens=new_tokens, recipe=recipe, prefill=prefill, chunk=chunk,
                    batch=batch,
                )  # fmt: skip
        except ValueError as error:  # what language says of numbers that do not fit the model or the text
            raise typer.BadParameter(str(error)) from error
        found |= {name: result_data(result) for name, result in results.items()}
        console.print(results_table(model, results))
        for result in results.values():
            if said := differences(result):
                console.print(said, markup=False, highlight=False)
        if csv is not None:
            language.append_results(csv, Path(model).name + "_chat" * chat, results, loaded, context)
            console.print(f"Rows appended to {csv}", markup=False, highlight=False)


def result_data(result: language.Result) -> dict[str, Any]:
    """A way of running the model as data: everything but the tokens."""
    names = ("recipe", "ratio", "ratio_error", "first", "margin", "identical", "kv_bytes_per_token")
    data = {name: getattr(result, name) for name in (*names, "int8_calls", "cache_calls", "exact")}
    return data | {"perplexity": result.perplexity.value}


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
        places = [written[1] if place is None else place for place in result.first]
        same = torch.tensor(places, dtype=torch.float32, device="cpu").median()
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
    where = torch_device(device)
    with refusing(model, "--model"):
        return language.load(model, device=str(where))
