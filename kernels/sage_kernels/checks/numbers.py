"""Checks of Python numbers: an int may be larger than any float, or than an int64."""

from __future__ import annotations

import sys

import torch


INT64_MAX = 2**63 - 1


def short(number: int | float | torch.SymInt) -> str:
    """Return a number for a message, without all the digits of an int that has thousands."""
    if isinstance(number, int) and number.bit_length() > 100:
        return f"an int of {number.bit_length()} bits"
    return str(number)


def check_size(name: str, number, meaning: str = "") -> None:
    """Raise unless a Python number is finite as a float and >= 0.

    Symbolic numbers of a compiler pass: they are known only later.
    """
    # compared, not converted: a Python int may be beyond any float
    if isinstance(number, (int, float)) and not 0 <= number <= sys.float_info.max:
        raise ValueError(f"{name}: got {short(number)}, expected a finite number >= 0{meaning}")


def check_softcap(softcap) -> None:
    """Raise unless softcap is a finite Python number >= 0."""
    if isinstance(softcap, torch.Tensor) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap: got {type(softcap).__name__}, expected a Python number (0: off)")
    check_size("softcap", softcap, " (0: off)")


def check_scale(scale) -> None:
    """Raise unless the softmax scale is None or a finite Python number >= 0."""
    if scale is None:
        return
    if isinstance(scale, torch.Tensor) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(
            f"scale: got {type(scale).__name__}, expected a Python float or None (reading a tensor would sync)"
        )
    check_size("scale", scale)


def check_window(window) -> None:
    """Raise unless window is an int >= 1 that fits an int64."""
    if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)):
        raise TypeError(f"window: got {type(window).__name__}, expected an int or None")
    if window < 1:
        raise ValueError(f"window: got {short(window)}, expected at least 1, the row's own key")
    if isinstance(window, int) and window > INT64_MAX:
        raise ValueError(f"window: got {short(window)}, expected at most an int64; None is no window")
