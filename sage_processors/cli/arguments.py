"""Command line parsing with errors in one line, for the commands and the scripts in examples/.

Wrong input ends with one line on stderr and exit code 2, without usage, box or traceback.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from .checks import check_file, check_picture, is_out_of_memory, refusing


# options that make what a command holds smaller
SIZES = ("height", "width", "frames", "batch", "images", "context", "prompt_tokens", "new_tokens")


class OneLineErrors(TyperGroup):
    """Group of commands that reports wrong input in one line on stderr, with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Running out of memory, and Ctrl-C, end it with one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("Interrupted: no result was written.", err=True)
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort):  # RuntimeErrors, too
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            own = {parameter.name for parameter in self.commands[ctx.invoked_subcommand].params}
            smaller = " or ".join(f"--{name.replace('_', '-')}" for name in SIZES if name in own)
            more = re.search(r"tried to allocate [\d.]+ \w+", str(error), re.IGNORECASE)
            said = "out of memory" + (f", {more[0].replace('Tried', 'tried')}" if more else "")
            raise typer.BadParameter(said + f": choose a smaller {smaller}" * bool(smaller)) from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run as click's own `main`, but without usage, hint and box around an error message."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            typer.echo("Aborted.", err=True)
            code = 1
        except Exception as error:
            if not hasattr(error, "format_message"):  # not one of click's errors, such as typer.BadParameter
                raise
            said = " ".join(error.format_message().split())
            context = getattr(error, "ctx", None)
            if not said or type(error).__name__ == "NoArgsIsHelpError":  # no arguments: show the help
                error.show()  # type: ignore[attr-defined]
            else:
                where = f" ({context.command_path} --help)" if context is not None else ""
                typer.echo(f"Error: {said}{where}", err=True)
            code = error.exit_code  # type: ignore[attr-defined]
        sys.exit(code if isinstance(code, int) else 0)


class OneLineParser(argparse.ArgumentParser):
    """Argument parser of a script that reports wrong input in one line, with exit code 2.

    The help shows `description` with its line breaks.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """End the script with this message in one line and exit code 2."""
        self.exit(2, f"Error: {' '.join(message.split())} ({self.prog} --help)\n")

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """End the script with one line if the model `name` can't be loaded within this context."""
        try:
            with refusing(name):
                yield
        except typer.BadParameter as error:
            self.error(f"--model: {error.message}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """End the script with one line for a ValueError in this context, such as a pipeline's."""
        try:
            yield
        except ValueError as error:
            self.error(str(error))


def at_least(least: int) -> Callable[[str], int]:
    """Return a `type=` for an argument that is an int64 of `least` or more."""

    def number(text: str) -> int:
        found = int(text)
        if not least <= found < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is not in the range {least} to 2**63 - 1")
        return found

    return number


def picture(text: str) -> Path:
    """Return the path of a picture to write, as the `type=` of an argument."""
    return _checked(text, check_picture)


def clip(text: str) -> Path:
    """Return the path of a .gif or .mp4 to write, as the `type=` of an argument."""
    is_mp4 = text.endswith(".mp4")
    if is_mp4 and not all(map(importlib.util.find_spec, ("imageio", "imageio_ffmpeg"))):
        raise argparse.ArgumentTypeError(f"{text}: an mp4 needs another package: pip install imageio imageio-ffmpeg")
    return _checked(text, lambda path: check_file(path, "--output", ".mp4" if is_mp4 else ".gif"))


def json_file(text: str) -> Path:
    """Return the path of a JSON file to write, as the `type=` of an argument."""
    return _checked(text, lambda path: check_file(path, "--output", ".json"))


def _checked(text: str, check: Callable[[Path], None]) -> Path:
    try:
        check(Path(text))
    except typer.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from error
    return Path(text)
