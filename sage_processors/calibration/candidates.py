"""Sequences of candidate options for a calibration, each with more layers or steps in 16 bit.

layer_choices.py makes the candidates that differ by layer: other INT8 options, or 16 bit at some noise levels.
"""

from __future__ import annotations

import dataclasses
import glob

from ..option_groups import IN_16_BIT, LINEARS, LayerRule
from ..options import SageAttnProcessor


MAX_CANDIDATES = 64  # of a sequence


def candidate_sequences(base: SageAttnProcessor, worst_first: list[str], steps: int):
    """Yield lists of options, in each of which more and more runs in 16 bit.

    worst_first: names of the layers, by falling error. steps: denoising steps of a run.
    """
    names = [glob.escape(name) for name in worst_first]
    count = len(names)

    def keeping(config, **steps):
        return dataclasses.replace(config, keep=dataclasses.replace(config.keep, **steps))

    def kept(n):
        return tuple(LayerRule(name, recipe=IN_16_BIT) for name in names[:n])

    yield [base.with_rules(*kept(n)) for n in range(1, count)]
    yield [keeping(base, first_steps=n) for n in range(1, steps // 2 + 1)]
    yield [keeping(base, last_steps=n) for n in range(1, steps // 2 + 1)]
    yield [
        keeping(base.with_rules(*kept(n)), first_steps=steps * n // (3 * count), last_steps=steps // 3)
        for n in range(1, count)
    ]


def spread(candidates: list) -> list:
    """Return all candidates, or MAX_CANDIDATES of them, evenly spread from the first to the last."""
    last = len(candidates) - 1
    if last < MAX_CANDIDATES:
        return candidates
    return [candidates[i * last // (MAX_CANDIDATES - 1)] for i in range(MAX_CANDIDATES)]


def label(config: SageAttnProcessor) -> str:
    """Describe options in a few words, for tables and progress bars."""
    recipes = [recipe for _, recipe in config.rules("recipe")]
    parts = [config.recipe, config.scaling.name]
    parts += [f"{recipes.count(IN_16_BIT)} layers in 16 bit"] if IN_16_BIT in recipes else []
    parts += [config.rotation] if config.rotation != "none" else []
    for found in (recipes, *([value for _, value in config.rules(name)] for name in ("scaling", "rotation"))):
        others = [value for value in found if value != IN_16_BIT]
        parts += [f"{len(others)} layers {others[0]}"] if others else []
    parts += [f"first {config.keep.first_steps} steps in 16 bit"] if config.keep.first_steps else []
    parts += [f"last {config.keep.last_steps} steps in 16 bit"] if config.keep.last_steps else []
    spans = [span for _, span in config.rules("keep_noise") if span]
    for span in sorted(set(spans)):
        parts.append(f"{spans.count(span)} layers in 16 bit at noise {span[0]:.4g} to {span[1]:.4g}")
    if config.skip is not None:
        parts.append(f"skips within {config.skip.limit:.4g}")
        limits = config.rules("skip_limit")
        parts += [f"{len(limits)} layers within others"] if limits else []
    if config.linears.format != "none":
        parts.append(f"linear layers {config.linears.format}")
        formats = [format for _, format in config.rules("linears")]
        parts += [f"{formats.count(f)} of them {f}" for f in LINEARS if f != config.linears.format and f in formats]
    return ", ".join(parts).replace("of them none", "of them 16 bit")
