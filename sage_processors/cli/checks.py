"""Checks before a command's work, such as of its output files, and settings to restore after it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from ..files.whole_file import check_output, whole_file
from ..installation import pip_install


def check_csv(path: Path | None) -> None:
    """Raise typer.BadParameter if no row can be appended to the file of --csv."""
    if path is not None:
        from sage_kernels.results import check_appendable

        _refuse(check_appendable, path, "--csv")
        if not path.exists():  # permissions promise nothing where no file can be made, such as in /proc
            _refuse(check_output, path, "--csv")


def check_names(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise typer.BadParameter if a value of this option is not a known name."""
    if unknown := sorted(set(given) - set(known)):
        raise typer.BadParameter(f"{', '.join(unknown)}: expected one of {', '.join(known)}", param_hint=option)


def check_file(path: Path | None, option: str, suffix: str) -> None:
    """Raise typer.BadParameter if the file of an option has another suffix or can't be written."""
    if path is not None:
        if path.suffix != suffix:
            raise typer.BadParameter(f"{path.name}: expected a name that ends in {suffix}", param_hint=option)
        _refuse(check_output, path, option)


def check_folder(folder: Path, option: str, files: Iterable[str], folders: Iterable[str]) -> None:
    """Raise typer.BadParameter unless these files and folders can be written into a folder.

    The first of `files` is what all of them were written with: without it the others are somebody else's.
    """
    if not folder.parent.is_dir():
        raise typer.BadParameter(
            f"got {folder}, but folder {folder.parent} does not exist; make it first", param_hint=option
        )
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder}: expected a folder, new or of an earlier rating", param_hint=option)
    first, *others = [*files, *folders]
    strange = [name for name in others if (folder / name).exists()]
    if strange and not (folder / first).exists():
        raise typer.BadParameter(
            f"{folder} has {' and '.join(strange)} but no {first}, so they are of something else; expected a folder, "
            "new or of an earlier rating",
            param_hint=option,
        )
    for path in [folder / name for name in files] if folder.is_dir() else [folder]:
        _refuse(check_output, path, option)
    for path in [folder / name for name in folders]:
        if path.exists() and not path.is_dir():
            raise typer.BadParameter(f"{path} is no folder, expected one or none", param_hint=option)
        if path.exists():
            _refuse(check_output, path / "0.png", option)


def folder_named(text: str | Path) -> Path:
    """Return the path of a folder, as the `parser=` of an option: an empty name is an input error."""
    if not str(text).strip():
        raise typer.BadParameter("got an empty name, expected a folder's; the one you are in is .")
    return Path(text)


def check_picture(path: Path) -> None:
    """Raise typer.BadParameter if the --output is not the name of a picture or can't be written."""
    if _picture_format(path) is None:
        raise typer.BadParameter(f"{path.name}: expected a picture's name, such as x.png", param_hint="--output")
    _refuse(check_output, path, "--output")


def save_picture(picture, path: Path) -> None:
    """Write a PIL picture to a path that passed `check_picture`."""
    with whole_file(path) as file:
        picture.save(file, format=_picture_format(path))


def _picture_format(path: Path) -> str | None:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"pictures need pillow: {pip_install('diffusers')}") from error
    kind = Image.registered_extensions().get(path.suffix.lower())
    return kind if kind in Image.SAVE else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for a GPU's or a CPU's allocator, or Python, without memory."""
    import torch

    words = ("can't allocate memory", "not enough memory", "out of memory")  # a CPU's allocator has no type of its own
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


@contextmanager
def refusing(name: str, option: str | None = None) -> Iterator[None]:
    """Turn any error while the model `name` is loaded into typer.BadParameter, a message of one line.

    Libraries raise errors of many types for missing, broken or foreign files. ImportError passes through, as it names
    a missing package. Warnings and log messages of the libraries are hidden meanwhile, as they are about renamed
    options or repeat the error.
    """
    loggers = [logging.getLogger(library) for library in ("diffusers", "transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            for category in (FutureWarning, UserWarning):
                warnings.simplefilter("ignore", category)
            yield
    except (ImportError, typer.BadParameter):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if reason.rstrip().endswith(":"):  # a list follows
            reason = " ".join(str(error).split())
        raise typer.BadParameter(f"{name} could not be loaded: {reason}", param_hint=option) from error
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _refuse(check, path: Path, option: str) -> None:
    try:
        check(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


@contextmanager
def float32_settings_kept() -> Iterator[None]:
    """Restore cuDNN's fp32 precision settings afterwards.

    For callers of a command as a function, in a process with settings of its own.
    """
    import torch

    cudnn: Any = torch.backends.cudnn
    each = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    try:
        both = cudnn.allow_tf32
    except RuntimeError:  # the settings of the operators differ, so there is no common one
        both = None
    try:
        yield
    finally:
        if both is not None:  # has effects beyond the settings of the operators
            cudnn.allow_tf32 = both
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = each
