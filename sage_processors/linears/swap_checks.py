"""Checks of the options of linear layers, made before a model is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..option_checks import flag, one_of, whole
from ..option_groups import LINEARS
from ..options import ON_UNSUPPORTED, SageAttnProcessor
from .weights.layers import Choice


DROPPED = (
    "weight of {}: got a model whose 16-bit weights were dropped (drop_weights=True) or never loaded (SageConfig), "
    "expected one that has them; load the model again"
)

LOADED = (
    "linears: got options for other 8-bit layers than {} was loaded with (SageConfig({!r})), expected the same "
    "format and layers, or linears='none'; load the model again with another SageConfig for others"
)


def check_patterns_of(config: SageAttnProcessor, names: Collection[str]) -> None:
    """Raise ValueError for a rule of linear layers with a pattern that matches none of their names."""
    _check_patterns("layers", [pattern for pattern, _ in config.rules("linears")], names)


def _check_patterns(option: str, patterns: Iterable[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{option}: got {pattern!r}, which matches no linear layer, expected a pattern of names such as "
                f"{list(names)[:3]}"
            )


def agree_with(rules: Iterable[tuple[str, str]], choices: Iterable[Choice], name: str) -> bool:
    """Return True if the first rule that matches a layer names its format, for all layers.

    name: of the model in its pipeline, with which patterns may begin; "" for none.
    """
    for choice in choices:
        own = f"{name}.{choice.name}" if name else choice.name
        if next((value for pattern, value in rules if fnmatchcase(own, pattern)), choice.format) != choice.format:
            return False
    return True


def checked_options(
    names: Collection[str], linears: Any, layers: Any, min_features: Any, on_unsupported: Any, drop_weights: Any
) -> tuple[tuple[str, str], ...]:
    """Check the arguments of `quantize_linears` and return `layers` as (pattern, format) pairs.

    names: of the model's linear layers. Raises: TypeError, ValueError.
    """
    for name, value, allowed in (("linears", linears, LINEARS), ("on_unsupported", on_unsupported, ON_UNSUPPORTED)):
        one_of(name, value, allowed)
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers: got {layers!r}, expected (layer pattern, format) pairs or a dict")
    pairs = tuple(layers.items()) if isinstance(layers, Mapping) else tuple(layers)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"layers: got {pair!r}, expected (layer pattern, format) pairs or a dict")
        if not isinstance(pair[1], str) or pair[1] not in LINEARS:
            raise ValueError(f"layers: got {pair[1]!r}, expected one of {sorted(LINEARS)}")
    if min_features is not None:
        whole("min_features", min_features, 0)
    flag("drop_weights", drop_weights)
    _check_patterns("layers", [pattern for pattern, _ in pairs], names)
    return pairs
