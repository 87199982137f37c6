"""What the commands do before and after their work: outputs are tried first, settings of the process are put back."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer

from sage_kernels.results import check_appendable

from ..files.whole_file import check_output, whole_file


def check_csv(path: Path | None) -> None:
    """Refuse a --csv that no row could be appended to."""
    if path is not None:
        _refuse(check_appendable, path, "--csv")


def check_file(path: Path | None, option: str, suffix: str) -> None:
    """Refuse an output of another suffix, or where nothing can be written."""
    if path is not None:
        if path.suffix != suffix:
            raise typer.BadParameter(f"{path.name}: expected a name that ends in {suffix}", param_hint=option)
        _refuse(check_output, path, option)


def check_picture(path: Path) -> None:
    """Refuse an --output that is no picture's, or where nothing can be written."""
    if _picture_format(path) is None:
        raise typer.BadParameter(f"{path.name}: expected a picture's name, such as x.png", param_hint="--output")
    _refuse(check_output, path, "--output")


def save_picture(picture, path: Path) -> None:
    """Write a PIL picture that `check_picture` let through."""
    with whole_file(path) as file:
        picture.save(file, format=_picture_format(path))


def _picture_format(path: Path) -> str | None:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('pictures need pillow: pip install "sage-processors[diffusers]"') from error
    kind = Image.registered_extensions().get(path.suffix.lower())
    return kind if kind in Image.SAVE else None


@contextmanager
def refusing(name: str, option: str | None = None) -> Iterator[None]:
    """Loading the model `name`: whatever is wrong with it is a message of one line, not a traceback.

    Libraries raise anything for missing, broken or foreign files; a package that is not installed is none of it. What
    they warn and log meanwhile is left out: names of options that one of them has renamed, and the error once more.
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
    """TensorFloat-32 in convolutions is, afterwards, as it was: who calls a command in his process keeps his own."""
    cudnn: Any = torch.backends.cudnn
    each = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    try:
        both = cudnn.allow_tf32
    except RuntimeError:  # they differ: only the settings of each operator say what holds
        both = None
    try:
        yield
    finally:
        if both is not None:  # also what the settings of each operator don't show
            cudnn.allow_tf32 = both
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = each
