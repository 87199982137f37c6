"""The command `bench language`: perplexity and greedy text with INT8 attention and an INT8 KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import sage_kernels

from ..evaluation import language
from .checks import check_csv, refusing
from .loading import CsvOption, DeviceOption, JsonOption, RecipeOption, answer, console, torch_device


def bench_language(
    model: Annotated[str, typer.Option(help="The embedded tiny_lm, a folder, or a name on the Hub.")] = "tiny_lm",
    windows: Annotated[int, typer.Option(min=1, help="The number of pieces of held-out text for perplexity.")] = 64,
    context: Annotated[int, typer.Option(min=2, help="Tokens in a piece of text.")] = 512,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of a piece that are prefilled.")] = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in each later call, which reads the KV cache.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, help="The number of prompts to continue greedily.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens in a prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens after each prompt.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Pieces of text, or prompts, in one call.")] = 16,
    chat: Annotated[bool, typer.Option("--chat", help="Use dialogues in the model's own chat template.")] = False,
    recipe: RecipeOption = sage_kernels.DEFAULT_RECIPE,
    csv: CsvOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare a language model's perplexity and greedy text in INT8 with stock attention.

    Runs stock attention, then INT8 attention, then an INT8 KV cache.
    The model's own tokenizer reads plain text.
    tiny_lm reads dialogues in the markup of its training data.
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
        except ValueError as error:  # numbers that do not fit the model or the text
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
    """Return one way to run the model as data, without its tokens."""
    names = ("recipe", "ratio", "ratio_error", "first", "margin", "identical", "kv_bytes_per_token")
    data = {name: getattr(result, name) for name in (*names, "int8_calls", "cache_calls", "exact")}
    return data | {"perplexity": result.perplexity.value}


def results_table(name: str, results: dict[str, language.Result]) -> Table:
    """Return a table with one row for each way to run the model."""
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
    """Return a line with each text's first different token and stock's lead there; "" if all are equal."""
    found = [(place, lead) for place, lead in zip(result.first, result.margin, strict=True) if place is not None]
    listed = ", ".join(f"{place} ({lead:.3f})" for place, lead in sorted(found))
    return f"{result.name}: first token that is not stock's, and stock's lead there in nats: {listed}" if found else ""


def _load(model: str, device: str):
    where = torch_device(device)
    with refusing(model, "--model"):
        return language.load(model, device=str(where))
