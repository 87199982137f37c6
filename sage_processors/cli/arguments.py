"""What the examples ask of their arguments: the checks of the commands, answered as the commands do, in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from .checks import check_file, check_picture, refusing


class OneLineParser(argparse.ArgumentParser):
    """An argument parser of a script: `description` is shown as it is written, mistakes are one line, exit code 2."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """End with this message."""
        self.exit(2, f"Error: {' '.join(message.split())} ({self.prog} --help)\n")

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Whatever goes wrong with loading the model `name` ends the script in one line."""
        try:
            with refusing(name):
                yield
        except typer.BadParameter as error:
            self.error(f"--model: {error.message}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """What a pipeline or a model says of its inputs, a ValueError, ends the script in one line."""
        try:
            yield
        except ValueError as error:
            self.error(str(error))


def at_least(least: int) -> Callable[[str], int]:
    """`type=` of an argument that is a whole number, `least` or more, and an int64."""

    def number(text: str) -> int:
        found = int(text)
        if not least <= found < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is not in the range {least} to 2**63 - 1")
        return found

    return number


def picture(text: str) -> Path:
    """`type=` of a picture to write."""
    return _checked(text, check_picture)


def gif(text: str) -> Path:
    """`type=` of a GIF to write."""
    return _checked(text, lambda path: check_file(path, "--output", ".gif"))


def json_file(text: str) -> Path:
    """`type=` of a JSON file to write."""
    return _checked(text, lambda path: check_file(path, "--output", ".json"))


def _checked(text: str, check: Callable[[Path], None]) -> Path:
    try:
        check(Path(text))
    except typer.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from error
    return Path(text)
