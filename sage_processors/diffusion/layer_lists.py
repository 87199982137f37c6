"""The lists of key tiles to skip of a model's layers: with which limits, and at which step of a run they are."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch

from sage_kernels.planning.skip_lists import SkipLists
from sage_kernels.planning.state import Site


def limit_of(config, layer: str) -> float | tuple[float, ...]:
    """The limit of a layer under these options, or one for each range of noise levels."""
    matches = (limit for pattern, limit in config.layer_skip_limit if fnmatch.fnmatchcase(layer, pattern))
    return next(matches, config.skip_limit)


def lists_of_layers(config, sites: list[Site], device: torch.device) -> SkipLists | None:
    """Lists for the call sites of a ScaleState, as the options want them: None is without.

    Sites are named as their layers are in handle.report(), the second one of a layer with "#1" behind it.
    """
    if config.skip != "temporal":
        return None
    limits = [limit_of(config, site.name.partition("#")[0]) for site in sites]
    return SkipLists(
        len(sites), device, limit=limits, borders=config.skip_noise, every=config.skip_every,
        first_steps=config.skip_first_steps, last_steps=config.skip_last_steps,
    )  # fmt: skip


def place_lists(lists: SkipLists, progress: Any, u: float | torch.Tensor) -> None:
    """Tell them which step runs, at noise level u. progress: windows.Progress; None: nobody knows where it is."""
    if progress is None or progress.is_over or not progress.is_told:
        lists.stop()
        return
    lists.at_level(u)
    lists.place(progress.taken, progress.total - progress.place)
