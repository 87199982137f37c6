"""Limits for skipping tiles by layer and noise level, as candidates for a calibration.

A limit is the share of a row's probability that may be left out. The whole model runs once without skipping and once
under each limit, with a probe on. This measures the error that a limit adds to a layer's attention, over the steps in
each range of noise levels. In a candidate, every layer has in each range the largest limit whose added error stays
below a bar. The bar falls from candidate to candidate.
"""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Sequence
from typing import Any

from sage_kernels.facts.recipe import MIXED_RECIPE

from ..option_groups import BY_CALL, LayerRule, Skip
from ..options import SageAttnProcessor
from .candidates import spread


# {layer: a limit for each range of noise levels}; 0: nothing is left out.
LayerLimits = dict[str, tuple[float, ...]]


def checked_limits(limits: Any, scalings: Sequence[str], target_psnr: float | None) -> tuple[float, ...]:
    """Return the limits to try, largest first. Raises: TypeError, ValueError."""
    expected = "limits to try, 0 < limit < 1, as a tuple of floats"
    if isinstance(limits, str) or not all(type(x) is float for x in limits):
        raise TypeError(f"skip_limits: got {str(limits)[:200]}, expected {expected}")
    if not all(0 < x < 1 for x in limits):  # refuses NaN too
        raise ValueError(f"skip_limits: got {str(limits)[:200]}, expected {expected}")
    if limits and target_psnr is None:
        raise ValueError(
            "skip_limits: got limits to try without target_psnr, expected it: only pictures show the loss"
        )
    if limits and all(scaling in BY_CALL for scaling in scalings):
        raise ValueError(
            f"skip_limits: got limits to try with scalings {list(scalings)}, expected one that is planned, such as "
            '"timestep": skipping needs the state that a planned scaling keeps'
        )
    return tuple(sorted(set(limits), reverse=True))


def can_skip(config: SageAttnProcessor) -> bool:
    """Return True if these options may skip tiles."""
    return config.scaling.is_planned and config.recipe != MIXED_RECIPE


def without_lists(config: SageAttnProcessor) -> SageAttnProcessor:
    """Return the options with skip=None and without limits of single layers."""
    rules = [dataclasses.replace(rule, skip_limit=None) for rule in config.layers]
    return dataclasses.replace(
        config, skip=None, layers=tuple(rule for rule in rules if rule != LayerRule(rule.pattern))
    )


def skipping(base: SageAttnProcessor, user: SageAttnProcessor, limit: float) -> SageAttnProcessor:
    """Return `base` with one limit for all layers, except those with a limit of their own in `user`."""
    skip = dataclasses.replace(user.skip or Skip(), limit=limit)
    rules = (LayerRule(pattern, skip_limit=own) for pattern, own in user.rules("skip_limit"))
    return dataclasses.replace(base, skip=skip, layers=(*base.layers, *rules))


def shares_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return {layer: [share of all tile pairs left out, share of calls with lists]} from rows of reports.

    Layers that left nothing out are missing.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["calls"]:
            listed = max(0.0, 1 - sum(row["dense"].values()) / row["calls"])
            found.setdefault(row["layer"], []).append((row["skipped_fraction"] * listed, listed))
    return {
        layer: [round(sum(column) / len(column), 6) for column in zip(*pairs, strict=True)]
        for layer, pairs in found.items()
        if any(left_out for left_out, _ in pairs)
    }


def check_shares(shares: dict[str, Any], remedy: str) -> None:
    """Raise ValueError unless `shares` has the form of a result of `shares_of`."""
    for pair in shares.values():
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(x) is float and 0 <= x <= 1 for x in pair):
            raise ValueError(f"path: got {str(pair)[:50]} for skipped, expected two shares from 0 to 1; {remedy}")


class SkipChoices:
    """Limits for every layer, chosen by measured errors.

    Args:
        base: options that skip nothing. user: the options that the search began with.
        noise: {limit: {layer: {step as str: (signal, noise)}}}, `layer_choices.sums_by_step` of the run under each
            limit; limit 0 is the run without skipping.
        levels: noise level of every step of a run. () if they are unknown: then there is one range.
    """

    def __init__(
        self, base: SageAttnProcessor, user: SageAttnProcessor, noise: dict[float, Any], levels: Sequence[float]
    ) -> None:
        self._base, self._user, self._noise, self._levels = base, user, noise, levels
        self._skip = user.skip or Skip()
        self.borders = self._skip.noise or self._border()
        self.limits = sorted((limit for limit in noise if limit), reverse=True)
        self.layers = sorted(noise[0.0])  # measured or read from a file, the order is the same
        self._errors = {
            (layer, where, limit): self._added(layer, where, limit)
            for layer in self.layers
            for where in range(len(self.borders) + 1)
            for limit in self.limits
        }

    def _border(self) -> tuple[float, ...]:
        """Return a border in the middle of the noise levels of steps that skip.

        () if there is no step between or if a probe did not see both sides.
        """
        listed = sorted(self._levels[self._skip.first_steps : len(self._levels) - self._skip.last_steps])
        middle = len(listed) // 2
        if middle == 0:
            return ()
        border = round((listed[middle - 1] + listed[middle]) / 2, 4)
        probed = {self._level(int(step)) for sums in self._noise[0.0].values() for step in sums}
        is_between = listed[middle - 1] < border < listed[middle] and min(probed) < border < max(probed)
        return (border,) if is_between and 0 < border < 1 else ()

    def _level(self, step: int) -> float:
        return self._levels[min(step, len(self._levels) - 1)]

    def _range(self, step: int) -> int:
        return sum(border <= self._level(step) for border in self.borders) if self.borders else 0

    def _added(self, layer: str, where: int, limit: float) -> float:
        """Return the relative L2 error that a limit adds to a layer, over the probed steps in a range."""
        shares = []
        for chosen in (limit, 0.0):
            pairs = [x for step, x in self._noise[chosen].get(layer, {}).items() if self._range(int(step)) == where]
            signal, noise = (math.fsum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
            shares.append(noise / signal if signal > 0 else 0.0)
        return math.sqrt(max(0.0, shares[0] - shares[1]))

    def choose(self, bar: float) -> LayerLimits:
        """Return for each layer and range the largest limit that adds at most the error `bar`."""
        return {
            layer: tuple(
                next((limit for limit in self.limits if self._errors[layer, where, limit] <= bar), 0.0)
                for where in range(len(self.borders) + 1)
            )
            for layer in self.layers
        }

    def options(self, chosen: LayerLimits) -> SageAttnProcessor:
        """Return the base options with chosen limits.

        The most frequent limit becomes `skip.limit`, the others become rules in `layers`.
        """
        whole = {layer: limits[0] if len(set(limits)) == 1 else limits for layer, limits in chosen.items()}
        single = [limit for limit in whole.values() if isinstance(limit, float) and limit]
        usual = max(sorted(set(single)), key=single.count) if single else max(max(x) for x in chosen.values())
        own = [LayerRule(glob.escape(layer), skip_limit=x) for layer, x in whole.items() if x != usual]
        needs_borders = self._skip.noise or any(isinstance(rule.skip_limit, tuple) for rule in own)
        found = skipping(self._base, self._user, usual)
        skip = dataclasses.replace(self._skip, limit=usual, noise=self.borders if needs_borders else ())
        return dataclasses.replace(found, skip=skip, layers=(*found.layers, *own))

    def candidates(self) -> list[SageAttnProcessor]:
        """Return options by falling error added to the worst layer. The last ones skip almost nothing."""
        errors = sorted({error for error in self._errors.values() if error > 0}, reverse=True)
        bars = [math.inf, *(math.nextafter(error, 0.0) for error in errors)]
        all_chosen = (chosen for chosen in map(self.choose, spread(bars)) if any(map(any, chosen.values())))
        return list(dict.fromkeys(map(self.options, all_chosen)))
