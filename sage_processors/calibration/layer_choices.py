"""Choose for every layer the cheapest way to run it whose measured error stays below a limit.

A layer's ways are: an INT8 choice at all steps, an INT8 choice with 16 bit at some noise levels, and 16 bit at all
steps. INT8 choices are the recipe as given, P·V in 16 bit, a scale per token, and the Hadamard rotation.

A probe measures each choice by layer and step, while the whole model runs under it. A way's error is that of its
choice over the steps which run in INT8.
"""

from __future__ import annotations

import dataclasses
import glob
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

import sage_kernels

from ..diffusion.steps.windows import inside
from ..option_groups import IN_16_BIT, LayerRule
from ..options import MAX_RANGES, SageAttnProcessor
from .candidates import spread
from .cost import EXACT


_SAME = 1e-9  # relative tolerance: sums of the same costs in another order differ in their last digits


@dataclass(frozen=True)
class Choice:
    """How the INT8 calls of a layer run."""

    recipe: str
    scaling: str
    rotation: str

    @classmethod
    def of(cls, config: SageAttnProcessor) -> Choice:
        """Return the choice that these options make for layers without options of their own."""
        return cls(config.recipe, config.scaling.name, config.rotation)


@dataclass(frozen=True)
class Way:
    """How a layer runs at each noise level.

    choice: how its INT8 calls run; None: 16 bit at all steps.
    span: (low, high), the range of noise levels at which the layer runs in 16 bit; () for none.
    """

    choice: Choice | None
    span: tuple[float, ...] = ()


def sums_by_step(probes) -> dict:
    """Return {layer: {step: [signal, noise]}}, sums of squares over heads and attention calls.

    Steps are strings, as JSON wants keys.
    """
    found: dict[str, dict] = {}
    for row in (row for probe in probes for row in probe.summary("layer", "step")):
        steps = found.setdefault(row["layer"].partition("#")[0], {})
        before = steps.get(str(row["step"]), (0.0, 0.0))
        steps[str(row["step"])] = [
            float(f"{x + y:.9e}") for x, y in zip(before, (row["signal"], row["noise"]), strict=True)
        ]
    return found


def check_sums(sums: dict, remedy: str) -> None:
    """Raise ValueError unless `sums` has the form of a result of `sums_by_step`."""
    pairs: list[list] = []
    for steps in sums.values():
        if not isinstance(steps, dict) or not all(step.isdecimal() for step in steps):
            raise ValueError(f"path: got noise of a layer without steps, expected sums by step; {remedy}")
        pairs += steps.values()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(x) is float and x >= 0 for x in pair):
            raise ValueError(f"path: got {str(pair)[:50]} for noise, expected two numbers >= 0; {remedy}")


def relative_l2(pairs) -> float:
    """Return the relative L2 error from (signal, noise) pairs of sums of squares; inf without signal."""
    signal, noise = map(sum, zip((0.0, 0.0), *pairs, strict=True))
    if not noise:
        return 0.0
    return round(math.sqrt(noise / signal), 8) if signal > 0 else math.inf


def milder_recipe(recipe: str) -> str:
    """Return the recipe with the same Q·Kᵀ and P·V in 16 bit.

    That is the recipe itself if its P·V runs in 16 bit, and the default recipe if no recipe fits.
    """
    given = sage_kernels.RECIPES[recipe]
    wanted = (given.qk, given.plain, "16bit")
    same = (name for name, other in sage_kernels.RECIPES.items() if (other.qk, other.plain, other.pv) == wanted)
    return next(same, sage_kernels.DEFAULT_RECIPE)


def options_to_probe(base: SageAttnProcessor) -> list[SageAttnProcessor]:
    """Return the options to measure with a probe, one INT8 choice for all layers in each.

    First the base options, then P·V in 16 bit, a scale per token, the rotation, and both of these.
    """
    found = [base]
    mild = dataclasses.replace(base, recipe=milder_recipe(base.recipe))
    scaling = base.scaling.name
    scalings = [scaling, *(["per_token"] if scaling not in ("dynamic", "per_token") else [])]
    rotations = [base.rotation, *(["hadamard"] if base.rotation == "none" else [])]
    for rotation in rotations:
        found += [dataclasses.replace(mild.with_scaling(name), rotation=rotation) for name in scalings]
    return list(dict.fromkeys(found))


class LayerChoices:
    """Options for every layer, chosen by measured errors.

    Args:
        base: the options of layers that need no others.
        noise: {Choice: {layer: {step: (signal, noise)}}}, `sums_by_step` of the run under each choice. A layer that is
            missing under a choice had no error there.
        seconds: (layer, Choice or None for 16 bit) -> cost of one step.
        levels: noise level of every step of a run. () if they are unknown: then no ranges of noise levels are tried.
    """

    def __init__(self, base: SageAttnProcessor, noise: dict, seconds: Callable, levels):
        self._base, self._noise, self._seconds, self._levels = base, noise, seconds, levels
        self.layers = list(dict.fromkeys(layer for found in noise.values() for layer in found))
        owned = base.keep.noise or base.rules("keep_noise")  # ranges that the user gave stay, and no others are tried
        steps = sorted({int(step) for found in noise.values() for sums in found.values() for step in sums})
        self._spans = [] if owned or not levels else _spans({_level_at(levels, s) for s in steps})
        # every way of every layer: (cost of a run, its rank among equals, way, error), cheapest first
        self._ways = {layer: self._ways_of(layer) for layer in self.layers}

    def error(self, layer: str, choice: Choice, span=()) -> float:
        """Return the measured relative L2 error of a layer, without the steps at noise levels in `span`."""
        sums = self._noise[choice].get(layer, {})
        return relative_l2(
            pair for step, pair in sums.items() if not (span and inside(span, _level_at(self._levels, int(step))))
        )

    def _cost(self, layer: str, way: Way) -> float:
        exact = self._seconds(layer, None)
        if way.choice is None:
            return exact
        if not way.span:
            return self._seconds(layer, way.choice)
        kept = sum(inside(way.span, level) for level in self._levels) / len(self._levels)
        return kept * exact + (1 - kept) * self._seconds(layer, way.choice)

    def _ways_of(self, layer: str) -> list:
        exact = self._seconds(layer, None)
        ways = [Way(choice, span) for span in ((), *self._spans) for choice in self._noise]
        rows = [
            (self._cost(layer, way), rank, way, self.error(layer, way.choice, way.span))
            for rank, way in enumerate(ways)
            if way.choice is not None
        ]
        # with short sequences some ways cost more than 16 bit, such as the rotation
        cheaper = [row for row in rows if row[0] < exact]
        return [*sorted(cheaper, key=lambda row: row[:2]), (exact, len(ways), Way(None), 0.0)]

    def choose(self, limits: dict[str, float], banned=frozenset()) -> dict[str, Way]:
        """Return {layer: its cheapest way with an error of at most its limit}.

        All ways together have at most MAX_RANGES different ranges of noise levels. banned: (layer, Way) pairs that
        must not be chosen.
        """
        best: dict[str, dict] = {layer: {} for layer in self.layers}  # the cheapest way for each range
        for layer in self.layers:
            for row in self._ways[layer]:
                if row[3] <= limits[layer] and (layer, row[2]) not in banned:
                    best[layer].setdefault(row[2].span if row[2].choice else (), row)
        spans = self._cheapest_ranges(list(best.values()))
        return {
            layer: min((rows[span] for span in ((), *spans) if span in rows), key=lambda row: row[:2])[2]
            for layer, rows in best.items()
        }

    @staticmethod
    def _cheapest_ranges(best: list[dict]) -> tuple:
        """Return the ranges, at most MAX_RANGES, with which all layers together cost least.

        best: for each layer, the cheapest row for each range.
        """
        used = sorted({span for rows in best for span in rows if span})
        each = [[rows.get(span, rows[()])[0] for rows in best] for span in ((), *used)]
        costs = torch.tensor(each, dtype=torch.float64, device="cpu")  # [1 + ranges, layers]
        costs = torch.minimum(costs, costs[:1])
        least, found = float(costs[0].sum()), ()
        for count in range(1, MAX_RANGES + 1):
            sets = list(combinations(range(len(used)), count))
            if not sets:
                break
            totals = costs[1:][torch.tensor(sets, dtype=torch.int64, device="cpu")].amin(1).sum(-1)  # [sets]
            lowest = float(totals.min())
            if lowest < least * (1 - _SAME):  # otherwise fewer ranges do as well
                first = int((totals <= lowest * (1 + _SAME)).nonzero()[0])
                least, found = lowest, tuple(used[i] for i in sets[first])
        return found

    def options(self, chosen: dict[str, Way]) -> SageAttnProcessor:
        """Return the base options with the ways that were chosen for layers."""
        base, usual = self._base, dataclasses.asdict(Choice.of(self._base))
        rules = []
        for layer, way in chosen.items():
            if way.choice is None:
                own: dict[str, Any] = {"recipe": IN_16_BIT}
            else:
                own = {name: value for name, value in dataclasses.asdict(way.choice).items() if value != usual[name]}
                own |= {"keep_noise": way.span} if way.span else {}
            rules += [LayerRule(glob.escape(layer), **own)] if own else []
        return base.with_rules(*rules)

    def candidates(self) -> list[SageAttnProcessor]:
        """Return options by falling error of the worst layer, each dearer than the one before."""
        errors = {error for ways in self._ways.values() for *_, error in ways if 0 < error < math.inf}
        # the choice changes only where the limit falls below a measured error
        limits = [math.nextafter(error, 0.0) for error in sorted(errors, reverse=True)]
        all_chosen = (self.choose(dict.fromkeys(self.layers, limit)) for limit in spread(limits))
        found = (self.options(chosen) for chosen in all_chosen if any(way.choice for way in chosen.values()))
        return [config for config in dict.fromkeys(found) if config != self._base]


def _level_at(levels, step: int) -> float:
    return levels[min(step, len(levels) - 1)]


def _spans(probed: set[float]) -> list[tuple[float, float]]:
    """Return all ranges of neighbouring probed noise levels, except the range that holds all of them.

    Borders lie half-way between two probed levels.
    """
    levels = sorted(probed)
    middles = [(round((a + b) / 2, 4), a, b) for a, b in zip(levels, levels[1:], strict=False)]
    edges = (0.0, *(middle for middle, a, b in middles if a < middle < b), 1.0)
    return [pair for pair in combinations(edges, 2) if pair != (0.0, 1.0)]


def seconds_of(costs) -> Callable:
    """Return the function `seconds` that LayerChoices takes, made from a CostTable."""

    def seconds(layer: str, choice: Choice | None) -> float:
        if layer not in costs.shapes:  # its calls were too short for INT8 in the run that showed the shapes
            return 1.0 if choice is None else 0.5
        if choice is None:
            return costs.seconds(layer, EXACT)
        return costs.seconds(layer, choice.scaling, choice.recipe, choice.rotation)

    return seconds
