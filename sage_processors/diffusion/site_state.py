"""State of a denoiser's attention call sites: parked scales of replaced sites, and skip lists."""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels.facts.state import COUNT_STEADY
from sage_kernels.planning.skip_lists import SkipLists
from sage_kernels.planning.state import ScaleState, Site


class Parked:
    """Call sites out of use for now, each with the ScaleState that served it last.

    An IP-Adapter adds a second attention call to a processor and later removes it; attention slicing takes a layer out
    of INT8. When a site with the same name and layout comes back, it goes on with its parked state.
    """

    def __init__(self):
        self._homes: dict[Site, tuple[ScaleState, int]] = {}

    def park(self, state: ScaleState) -> None:
        """Remember all sites of a state that is about to be replaced."""
        self._homes |= {site: (state, index) for index, site in enumerate(state.sites)}

    def move_into(self, state: ScaleState) -> bool:
        """Copy parked plans, tables and counts into a fresh state. Returns False if none was parked."""
        found = False
        for index, site in enumerate(state.sites):
            earlier, place = self._homes.pop(site, (None, 0))
            if earlier is not None:
                earlier.to(state.device)
                _copy_site(earlier, place, state, index)
                found = True
        return found

    def clear(self) -> None:
        """Forget all parked sites."""
        self._homes.clear()


def _rows(state: ScaleState, index: int) -> slice:
    first = sum(site.kv_heads for site in state.sites[:index])
    return slice(first, first + state.sites[index].kv_heads)


def _copy_site(source: ScaleState, source_index: int, target: ScaleState, target_index: int) -> None:
    old, new = _rows(source, source_index), _rows(target, target_index)
    shared, earlier = target._shared, source._shared
    # a state is as wide as its widest head: beyond a site's own head_dim there is nothing to copy
    width = min(shared.plan.shape[-1], earlier.plan.shape[-1])
    shared.plan[new, :, :width] = earlier.plan[old, :, :width]
    shared.stats[new, :, :width] = earlier.stats[old, :, :width]
    target._table[:, new, :, :width] = source._table[:, old, :, :width]
    for name in ("plan_scale", "counts"):
        getattr(shared, name)[new] = getattr(earlier, name)[old]
    shared.counts[new, COUNT_STEADY] = 0  # runs may have begun since
    target._table_run[:, new] = source._table_run[:, old]
    target._frozen_keys[new] = source._frozen_keys[old]
    target._totals[new] = source._totals[old]
    # run numbers only grow, so the largest is that of the latest state
    target._run.copy_(target._run.maximum(source._run))
    target.bin.copy_(source.bin)


def lists_of_layers(config, sites: list[Site], device: torch.device) -> SkipLists | None:
    """Return the lists of key tiles to skip for the call sites of a ScaleState; None without the option.

    config: SageAttnProcessor. A site is named as its layer in handle.report(), a layer's second site "layer#1".
    """
    skip = config.skip
    if skip is None:
        return None
    limits = [config.of_layer("skip_limit", site.name.partition("#")[0]) for site in sites]
    return SkipLists(
        len(sites), device, limit=limits, borders=skip.noise, every=skip.every, first_steps=skip.first_steps,
        last_steps=skip.last_steps, compensates=skip.compensate,
    )  # fmt: skip


def place_lists(lists: SkipLists, progress: Any, u: float | torch.Tensor) -> None:
    """Tell skip lists which step of the run is next, and its noise level u in [0, 1].

    progress: windows.Progress; None if the running step is unknown, which stops the lists.
    """
    if progress is None or progress.is_over or not progress.is_told:
        lists.stop()
        return
    lists.at_level(u)
    lists.place(progress.taken, progress.total - progress.place)
