"""The lists of key tiles to skip of a model's layers: with which limits, and at which step of a run they are."""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels.planning.skip_lists import SkipLists
from sage_kernels.planning.state import Site


def lists_of_layers(config, sites: list[Site], device: torch.device) -> SkipLists | None:
    """Lists for the call sites of a ScaleState, as the options want them: None is without.

    Sites are named as their layers are in handle.report(), the second one of a layer with "#1" behind it.
    """
    skip = config.skip
    if skip is None:
        return None
    limits = [config.of_layer("skip_limit", site.name.partition("#")[0]) for site in sites]
    return SkipLists(
        len(sites), device, limit=limits, borders=skip.noise, every=skip.every, first_steps=skip.first_steps,
        last_steps=skip.last_steps,
    )  # fmt: skip


def place_lists(lists: SkipLists, progress: Any, u: float | torch.Tensor) -> None:
    """Tell them which step runs, at noise level u. progress: windows.Progress; None: nobody knows where it is."""
    if progress is None or progress.is_over or not progress.is_told:
        lists.stop()
        return
    lists.at_level(u)
    lists.place(progress.taken, progress.total - progress.place)
