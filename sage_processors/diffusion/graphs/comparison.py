"""Compare a replay with an eager forward bit for bit, without waiting for the GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from sage_kernels.planning.skip_lists import SkipLists

from ...patching.nested import tensors_of
from ...reporting.event_counter import EventCounter


logger = logging.getLogger("sage_processors")

EVERY = 20  # runs from one comparison of a graph to the next


class StateCopy:
    """Copy of the state that a forward changes: statistics, plans, skip lists, counters, the generator."""

    def __init__(self, denoiser: Any):
        counters = list(_counters(denoiser))
        self._lists = lists_of(denoiser)
        self._counts_of_lists = () if self._lists is None else self._lists.counts()
        self._counts = [(counter, list(counter.eager)) for counter in counters]
        self.learnt = list(dict.fromkeys(_learnt(denoiser)))
        self._tensors = [*self.learnt, *(counter.traced for counter in counters)]
        self._copies = [x.clone() for x in self._tensors]
        device = denoiser.device
        self._generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]
        self._random = self._generator.get_state()

    def linear_calls(self) -> list[tuple[EventCounter, int, int]]:
        """Return (counter, event, number) of what was counted on the host since the copy."""
        return [
            (counter, event, now - then)
            for counter, numbers in self._counts
            for event, (then, now) in enumerate(zip(numbers, counter.eager, strict=True))
            if now > then
        ]

    def restore(self) -> None:
        """Make everything again as it was."""
        for x, copy in zip(self._tensors, self._copies, strict=True):
            x.copy_(copy)
        for counter, numbers in self._counts:
            counter.eager = list(numbers)
        if self._lists is not None:
            self._lists.restore(self._counts_of_lists)
        self._generator.set_state(self._random)


class Expected(NamedTuple):
    """Results of an eager call, and the statistics after it.

    Attributes: results, learnt: copies. state: StateCopy of the time before the call.
    """

    results: list[torch.Tensor]
    learnt: list[torch.Tensor]
    state: StateCopy

    def differs(self, results: Any) -> torch.Tensor:
        """Return, as bool [] on the device, if a replay's results, or the state after it, have other bits."""
        return bits_differ(
            [*zip(self.results, tensors_of(results), strict=True), *zip(self.learnt, self.state.learnt, strict=True)]
        )


def expected_of(denoiser: Any, run: Callable[[], Any]) -> Expected | None:
    """Run a forward eagerly, and leave the state as it was before.

    Returns None if that fails, mostly for want of memory: there is nothing to compare with then.
    """
    before = None
    try:
        before = StateCopy(denoiser)
        found = [x.clone() for x in tensors_of(run())]
        return Expected(found, [x.clone() for x in before.learnt], before)
    except Exception as error:  # the forward itself tells of errors that are the user's
        if denoiser.peers is not None:  # the other processes are somewhere within this forward
            raise
        logger.debug("graphs: a replay is not compared: %s", error)
        return None
    finally:
        if before is not None:
            before.restore()


def bits_differ(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return, as bool [] on the device, if any pair of tensors of one shape and dtype has different bits."""
    return torch.stack([(_bits(x) != _bits(y)).any() for x, y in pairs]).any()


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return (x if x.dim() else x[None]).view(torch.uint8)


class Verdicts:
    """Results of comparisons, which stay on the device until somebody settles them."""

    def __init__(self) -> None:
        self._new: list[tuple[torch.Tensor, Callable[[], None]]] = []
        self._sent: list[tuple[torch.Tensor, Any, list[Callable[[], None]]]] = []

    def add(self, differs: torch.Tensor, drop: Callable[[], None]) -> None:
        """Note a comparison. differs: bool [] on the device. drop(): called if it says so."""
        self._new.append((differs, drop))

    def send(self) -> None:
        """Copy new comparisons to the host. Does not wait for them."""
        new, self._new = self._new, []
        if not new:
            return
        flags, event = torch.stack([flag for flag, _ in new]), None
        if flags.is_cuda:
            host = torch.empty(flags.shape, dtype=torch.bool, device="cpu", pin_memory=True).copy_(
                flags, non_blocking=True
            )
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(flags.device))
            flags = host
        self._sent.append((flags, event, [drop for _, drop in new]))

    def settle(self, *, wait: bool) -> None:
        """Drop the graphs that differed.

        wait: wait for comparisons that are still under way. Without it they stay for later.
        """
        while self._sent:
            flags, event, drops = self._sent[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            del self._sent[0]
            for drop, is_other in zip(drops, flags.tolist(), strict=True):
                if is_other:
                    drop()


def _learnt(denoiser: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that attention layers and noise levels write to."""
    state = denoiser.state
    for owner in (state, None if state is None else state.rule, denoiser._reader):
        for value in () if owner is None else vars(owner).values():
            for x in value if isinstance(value, tuple) else (value,):
                if isinstance(x, torch.Tensor):
                    yield x
    lists = lists_of(denoiser)
    if lists is not None:
        yield from lists.tensors()


def lists_of(denoiser: Any) -> SkipLists | None:
    """Return the skip lists of a denoiser, if it has some."""
    found: SkipLists | None = None if denoiser.state is None else denoiser.state.kept.skip_lists
    return found


def _counters(denoiser: Any) -> Iterator[EventCounter]:
    yield from (layer.own.events for layer in denoiser.layers)
    yield from (guest._sage.events for guest in denoiser.guests.values())
    yield from (x for x in vars(denoiser.forwards).values() if isinstance(x, EventCounter))
    if denoiser.linears is not None:
        yield from (state.events for state in denoiser.linears.states())
