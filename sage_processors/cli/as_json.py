"""--json: what a command found as data on stdout, and nothing else there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..files.strict_json import plain_data
from .loading import console


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@contextmanager
def answer(as_json: bool) -> Iterator[dict[str, Any]]:
    """A dict for what the command finds. With `as_json` it is printed at the end, in place of all tables.

    It is also printed where the command then fails, as with a full disk: what was found is not lost.
    """
    found: dict[str, Any] = {}
    before, console.quiet = console.quiet, as_json or console.quiet
    try:
        yield found
    finally:
        console.quiet = before
        if as_json and found:
            typer.echo(json.dumps(plain_data(found), indent=1, allow_nan=False))


def quality_data(result) -> dict[str, Any]:
    """An evaluation.quality.Quality as data; no distances where no call ran in INT8."""
    data = asdict(result)
    return data if result.is_ours else data | dict.fromkeys(("psnr_db", "ssim", "attention_sqnr_db"))
