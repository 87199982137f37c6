"""Checks of the options of linear layers, made before a model is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..option_checks import flag, one_of, whole
from ..options import LINEARS, POLICIES, SageAttnProcessor


def check_patterns_of(config: SageAttnProcessor, names: Collection[str]) -> None:
    """Raise ValueError for a pattern of `keep_linears` or `layer_linears` that matches no layer's name."""
    _check_patterns("keep_linears", config.keep_linears, names)
    _check_patterns("layer_linears", [pattern for pattern, _ in config.layer_linears], names)


def _check_patterns(option: str, patterns: Iterable[str], names: Collection[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{option}: got {pattern!r}, which matches no linear layer, expected a pattern of names such as "
                f"{list(names)[:3]}"
            )


def checked_options(
    names: Collection[str], linears: Any, keep: Any, layers: Any, min_features: Any, policy: Any, drop_weights: Any
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """`keep` as a tuple, and `layers` as one of pairs. names: of the model's linear layers.

    Raises: TypeError, ValueError: see `quantize_linears`.
    """
    for name, value, allowed in (("linears", linears, LINEARS), ("policy", policy, POLICIES)):
        one_of(name, value, allowed)
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers: got {layers!r}, expected (layer pattern, format) pairs or a dict")
    pairs = tuple(layers.items()) if isinstance(layers, Mapping) else tuple(layers)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"layers: got {pair!r}, expected (layer pattern, format) pairs or a dict")
        if not isinstance(pair[1], str) or pair[1] not in LINEARS:
            raise ValueError(f"layers: got {pair[1]!r}, expected one of {sorted(LINEARS)}")
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise TypeError(f"keep: got {keep!r}, expected a tuple of patterns")
    keep = tuple(keep)
    if not all(isinstance(pattern, str) for pattern in keep):
        raise TypeError(f"keep: got {keep!r}, expected a tuple of patterns")
    if min_features is not None:
        whole("min_features", min_features, 0)
    flag("drop_weights", drop_weights)
    _check_patterns("keep", keep, names)
    _check_patterns("layers", [pattern for pattern, _ in pairs], names)
    return keep, pairs
