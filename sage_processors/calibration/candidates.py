"""Sequences of candidate options for a calibration, each with more layers or steps in 16 bit.

layer_choices.py makes the candidates that differ by layer: other INT8 options, or 16 bit at some noise levels.
"""

from __future__ import annotations

import dataclasses
import glob

from ..options import LINEARS, SageAttnProcessor


def candidate_sequences(base: SageAttnProcessor, worst_first: list[str], steps: int):
    """Yield lists of options, in each of which more and more runs in 16 bit.

    worst_first: names of the layers, by falling error. steps: denoising steps of a run.
    """
    names = [glob.escape(name) for name in worst_first]
    count = len(names)

    def with_(**options):
        return dataclasses.replace(base, **options)

    yield [with_(keep_layers=tuple(names[:n])) for n in range(1, count)]
    yield [with_(keep_first_steps=n) for n in range(1, steps // 2 + 1)]
    yield [with_(keep_last_steps=n) for n in range(1, steps // 2 + 1)]
    yield [
        with_(keep_layers=tuple(names[:n]), keep_first_steps=steps * n // (3 * count), keep_last_steps=steps // 3)
        for n in range(1, count)
    ]


def label(config: SageAttnProcessor) -> str:
    """Describe options in a few words, for tables and progress bars."""
    parts = [config.recipe, config.scaling]
    parts += [f"{len(config.keep_layers)} layers in 16 bit"] if config.keep_layers else []
    parts += [config.rotation] if config.rotation != "none" else []
    parts += [f"{len(config.layer_recipe)} layers {config.layer_recipe[0][1]}"] if config.layer_recipe else []
    parts += [f"{len(config.layer_scaling)} layers {config.layer_scaling[0][1]}"] if config.layer_scaling else []
    parts += [f"{len(config.layer_rotation)} layers {config.layer_rotation[0][1]}"] if config.layer_rotation else []
    parts += [f"first {config.keep_first_steps} steps in 16 bit"] if config.keep_first_steps else []
    parts += [f"last {config.keep_last_steps} steps in 16 bit"] if config.keep_last_steps else []
    spans = sorted({span for _, span in config.layer_keep_noise if span})
    for span in spans:
        number = sum(own == span for _, own in config.layer_keep_noise)
        parts.append(f"{number} layers in 16 bit at noise {span[0]:.4g} to {span[1]:.4g}")
    if config.skip != "none":
        parts.append(f"skips within {config.skip_limit:.4g}")
        parts += [f"{len(config.layer_skip_limit)} layers within others"] if config.layer_skip_limit else []
    if config.linears != "none":
        parts.append(f"linear layers {config.linears}")
        formats = [format for _, format in config.layer_linears]
        parts += [f"{formats.count(f)} of them {f}" for f in LINEARS if f != config.linears and f in formats]
    return ", ".join(parts).replace("of them none", "of them 16 bit")
