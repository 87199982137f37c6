"""The ways from one choice of options to better and slower ones that a calibration climbs."""

from __future__ import annotations

import dataclasses
import glob

from .config import SageAttnProcessor


def ladders(base: SageAttnProcessor, worst_first: list[str], steps: int):
    """Lists of options, each with more in 16 bit (or of a finer scaling, or rotated) than the one before.

    worst_first: names of the layers. steps: of a run.
    """
    names = [glob.escape(name) for name in worst_first]
    count = len(names)

    def with_(**options):
        return dataclasses.replace(base, **options)

    finer = [] if base.scaling in ("dynamic", "per_token") else [((name, "per_token"),) for name in names]
    yield [with_(layer_scaling=sum(finer[:n], ())) for n in range(1, len(finer) + 1)]
    rotated = tuple((name, "hadamard") for name in names) if base.rotation == "none" else ()
    yield [with_(layer_rotation=rotated[:n]) for n in range(1, len(rotated) + 1)]
    if finer:
        yield [with_(layer_rotation=rotated[:n], layer_scaling=sum(finer[:n], ())) for n in range(1, len(rotated) + 1)]
    yield [with_(keep_layers=tuple(names[:n])) for n in range(1, count)]
    yield [with_(keep_first_steps=n) for n in range(1, steps // 2 + 1)]
    yield [with_(keep_last_steps=n) for n in range(1, steps // 2 + 1)]
    yield [
        with_(keep_layers=tuple(names[:n]), keep_first_steps=steps * n // (3 * count), keep_last_steps=steps // 3)
        for n in range(1, count)
    ]
