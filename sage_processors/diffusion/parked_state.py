"""Keep what attention calls have learnt while diffusers replaces their processors, and add or drop calls with them."""

from __future__ import annotations

from sage_kernels.planning.state import ScaleState, Site


class Parked:
    """Call sites that are out of use for now, with the state that last served them.

    An IP-Adapter adds a second attention call to a processor and takes it away again; attention slicing takes the
    layer out of INT8 altogether. The site that comes back, of the same name and layout, goes on where it stopped.
    """

    def __init__(self):
        self._homes: dict[Site, tuple[ScaleState, int]] = {}

    def park(self, state: ScaleState) -> None:
        """`state` is about to be replaced: remember where each of its sites is."""
        self._homes |= {site: (state, index) for index, site in enumerate(state.sites)}

    def move_into(self, state: ScaleState) -> bool:
        """Give the sites of a fresh `state` their plans, tables and counts back. False if none was parked."""
        found = False
        for index, site in enumerate(state.sites):
            earlier, place = self._homes.pop(site, (None, 0))
            if earlier is not None:
                earlier.to(state.device)
                _copy_site(earlier, place, state, index)
                found = True
        return found

    def clear(self) -> None:
        """Forget them: the scales start anew."""
        self._homes.clear()


def _rows(state: ScaleState, index: int) -> slice:
    first = sum(site.kv_heads for site in state.sites[:index])
    return slice(first, first + state.sites[index].kv_heads)


def _copy_site(source: ScaleState, source_index: int, target: ScaleState, target_index: int) -> None:
    old, new = _rows(source, source_index), _rows(target, target_index)
    shared, earlier = target._shared, source._shared
    # states are as wide as their widest head: beyond a site's own head_dim there is nothing to keep
    width = min(shared.plan.shape[-1], earlier.plan.shape[-1])
    shared.plan[new, :, :width] = earlier.plan[old, :, :width]
    shared.stats[new, :, :width] = earlier.stats[old, :, :width]
    target._table[:, new, :, :width] = source._table[:, old, :, :width]
    for name in ("plan_scale", "counts"):
        getattr(shared, name)[new] = getattr(earlier, name)[old]
    target._table_run[:, new] = source._table_run[:, old]
    target._frozen_keys[new] = source._frozen_keys[old]
    target._totals[new] = source._totals[old]
    # the numbers of runs only grow, so the latest state's is the largest
    target._run.copy_(target._run.maximum(source._run))
    target.bin.copy_(source.bin)
