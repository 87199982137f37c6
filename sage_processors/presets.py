"""Presets: options by one name, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from .option_checks import one_of
from .option_groups import Linears


PresetName = Literal["fast", "small"]

# name → the options it sets. All others have their usual defaults. P·V is in 16 bit: in a CUDA graph FP8 P·V keeps no
# row maxima, and is then no faster at any shape measured (tests/diffusion/test_presets.py reads the rows).
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {"linears": Linears("int8"), "graphs": "auto"},
    "small": {"linears": Linears("int8", drop_weights=True), "graphs": "auto"},
}


def with_preset(preset: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a preset, replaced by those that are given.

    None: only those that are given.

    Raises: TypeError or ValueError for an unknown preset, naming the closest one.
    """
    if preset is None:
        return dict(given)
    one_of("preset", preset, PRESETS)
    return {**PRESETS[preset], **given}


def overridden(config: Any) -> list[str]:
    """Return the names of the options in which a SageAttnProcessor differs from its preset alone."""
    alone = type(config)(config.preset)
    names = [field.name for field in fields(config)]
    return [name for name in names if getattr(config, name) != getattr(alone, name)]


def heading(config: Any) -> str:
    """Return the first line of a report: the preset and the options that differ from it."""
    if config.preset is None:
        return ""
    others = overridden(config)
    return f'Preset "{config.preset}"' + (f" with other options for {', '.join(others)}" if others else "")
