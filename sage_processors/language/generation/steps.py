"""One decode step of a model as a call, and as what was captured of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...diffusion.graphs.model_state import ModelState
from ...reporting.event_counter import EventCounter
from ..kv_cache import Int8KVCache
from .step_cache import length_of, unfit


MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass
class Step:
    """One call of the model for one token.

    Attributes:
        cache, name: the caller's cache, and the name of its argument.
        given: (args, kwargs) without the cache and the mask.
        mask: [B, seen + 1], 0 for padding; None without padding.
        seen: number of tokens in the cache.
    """

    cache: Any
    name: str
    given: tuple[tuple[Any, ...], dict[str, Any]]
    mask: torch.Tensor | None
    seen: int


@dataclass
class Graph:
    """One captured step.

    Attributes:
        places: the input tensors that it reads.
        form, results: as `_taken_apart` returns them; each replay overwrites the results.
        replay: runs it.
        state: the model's state at the capture.
        events: what one replay has to count: (counter, event, calls).
        replays: number of replays so far. counted: how many of them are in the counters.
    """

    places: list[torch.Tensor]
    form: Any
    results: dict[str, Any]
    replay: Any
    state: ModelState
    events: list[tuple[EventCounter, int, int]]
    replays: int = 0
    counted: int = 0

    def settle(self) -> None:
        """Add the replays to the layers' counters."""
        new, self.counted = self.replays - self.counted, self.replays
        for counter, event, calls in self.events if new else ():
            counter.add_eager(event, calls * new)


def step_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Step | str:
    """Return a call for one token as a Step, or the reason why static buffers can't serve it."""
    cache = kwargs[name]
    if type(cache) is not Int8KVCache:
        return "cache"
    reason = unfit(cache)
    if reason:
        return reason
    seen = length_of(cache.layers[0])
    masks = [kwargs[key] for key in MASKS if kwargs.get(key) is not None]
    mask = masks[0] if masks else None
    if len(masks) > 1 or (mask is not None and (type(mask) is not torch.Tensor or mask.dim() != 2)):
        return "mask"
    if mask is not None and mask.shape[1] != seen + 1:
        return "mask"
    if mask is not None and bool(mask.all()):  # waits, as making a mask of padding does in an eager step
        mask = None
    if mask is not None and any(x.is_sliding for x in cache.layers):
        return "mask"
    others = {key: x for key, x in kwargs.items() if key != name and key not in MASKS}
    return Step(cache, name, (args, others), mask, seen)


def new_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how many tokens of each sequence a call brings; 0 if that is unknown."""
    names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
    found = [kwargs[name] for name in names if kwargs.get(name) is not None] or list(args[:1])
    return found[0].shape[1] if found and isinstance(found[0], torch.Tensor) and found[0].dim() > 1 else 0


def restore(layer: Any, fields: dict[str, Any]) -> None:
    """Give a cache layer the fields back that it had before an eager step of one token."""
    layer.__dict__.update(fields)
    if "_is_behind" in fields:  # the device's count was changed in place
        layer._is_behind = True


def summed(events: list[tuple[EventCounter, int, int]]) -> list[tuple[EventCounter, int, int]]:
    """Return (counter, event, calls) with equal events of a counter added up."""
    total: dict[tuple[int, int], tuple[EventCounter, int, int]] = {}
    for counter, event, calls in events:
        _, _, before = total.get((id(counter), event), (counter, event, 0))
        total[id(counter), event] = counter, event, before + calls
    return list(total.values())


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
