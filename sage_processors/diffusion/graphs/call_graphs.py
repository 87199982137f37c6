"""CUDA graphs of one function: a model's whole forward, or that of one of its blocks.

Before a replay the module is compared with its state at the capture (model_state.py). Whatever speaks against a replay
is a reason, and the call runs eagerly.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sage_kernels.planning.skip_lists import CapturedLists

from ...patching.nested import UnknownValueError, kind_of, mapped, tensors_of
from ...reporting.event_counter import EventCounter
from ..host.valid_tokens import Counts, run_with_known_rows
from .capture import CaptureError
from .comparison import StateCopy
from .model_state import ModelState, obstacle, refresh_weights


logger = logging.getLogger("sage_processors")

MOST_GRAPHS = 8  # of one function; the least recently used one is dropped
MOST_KINDS = 64  # kinds of calls with counted steps
SHORT_WARM_UP = 1  # eager steps of a kind that differs from warm ones by its masks or skip lists alone
FEW_REPLAYS, MOST_CHANGES = 8, 3  # a module that changes so soon, so often, is not captured any more


@dataclass
class Graph:
    """One captured call.

    Attributes:
        places: the input tensors it reads, in the order of the call's tensors.
        results: the results it overwrites.
        replay: runs it.
        state: the module's state at the capture.
        calls: (counter of a linear layer, event, number of calls) that a replay has to count on the host.
        lists: the skip lists it reads and writes; None without the option.
        compared: the run in which it was last compared with an eager call; None before the first time.
        replays: number of replays so far.
        number: among the graphs of all processes of context parallelism.
    """

    places: list[torch.Tensor]
    results: Any
    replay: Callable[[], None]
    state: ModelState
    calls: list[tuple[EventCounter, int, int]]
    lists: CapturedLists | None = None
    compared: int | None = None
    replays: int = 0
    number: int = 0


class CallGraphs:
    """The CUDA graphs of one function, one for each kind of call.

    A kind is made of the shapes and dtypes of tensors, the values of other arguments, what `owner.precision` says, and
    the numbers of valid tokens of masks where lengths inside of the model follow from them.

    Args:
        owner: the ModelGraphs. module: the model or block. call: its eager forward.
        warm_up: eager steps of a kind before a capture.
    """

    def __init__(self, owner: Any, module: nn.Module, call: Callable[..., Any], warm_up: int):
        self._owner, self.module, self.call, self._warm_up = owner, module, call, warm_up
        self.is_block = module is not owner.model
        self.graphs: dict[tuple[Any, ...], Graph] = {}
        self._steps: dict[Any, list[Any]] = {}
        self._refused: dict[tuple[Any, ...], str] = {}
        self._early_changes = 0

    def forget(self) -> None:
        """Drop all graphs, counted steps and refusals."""
        self.graphs.clear()
        self._steps.clear()
        self._refused.clear()

    def give_up(self, kind: tuple[Any, ...], graph: Graph, reason: str) -> None:
        """Drop a graph, and run calls of its kind eagerly from now on."""
        if self.graphs.get(kind) is graph:
            del self.graphs[kind]
        self._refuse(kind, reason)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Graph] | str:
        """Return the kind of a call and its graph, captured if need be; or the reason against it."""
        try:
            given, tensors = kind_of((args, kwargs)), list(tensors_of((args, kwargs)))
        except UnknownValueError:
            return "arguments"
        if any(x.device != self._owner.device for x in tensors):
            return "arguments"
        like = (*self._owner.precision(), given)
        counts, lists_of_step = self._owner.mask_counts(iter(tensors)), self._owner.kind_of_lists()
        kind = (*like, counts, lists_of_step)
        if kind in self._refused:
            return self._refused[kind]
        graph = self.graphs.pop(kind, None)
        lists = self._owner.lists
        if graph is not None and lists is not None and graph.lists is not None:
            if not lists.hold(graph.lists):
                graph = None  # eager calls have made others since
            elif not lists.are_next(graph.lists):
                self.graphs[kind] = graph
                return "skip"
        if graph is not None:
            refresh_weights(graph.state.in_8_bit)
            if not graph.state.holds():
                self._early_changes += graph.replays < FEW_REPLAYS
                self._owner.has_changed(self)
                return "changed"
        else:
            has_like = bool(counts) or lists_of_step is not None
            enough = SHORT_WARM_UP if has_like and self.is_warm(like) else self._warm_up
            if not self.is_warm(kind, enough):
                return "warm_up"
            if self._early_changes >= MOST_CHANGES:
                return "changed"
            parallel = self._owner.denoiser.peers is not None
            reason = obstacle(self.module, self._owner.device, is_block=self.is_block, parallel=parallel)
            if reason:
                return reason
            reason = self._owner.failures.reason(type(self.module), kind)
            if reason:
                return self._refuse(kind, reason)
        if not self._owner.agrees(graph):
            return "peers"
        if graph is None:
            found = self._captured(kind, args, kwargs, counts)
            number = self._owner.agreement.number(not isinstance(found, str))
            if isinstance(found, str):
                return found
            if not number:
                return "peers"
            found.number, graph = number, found
        self.graphs[kind] = graph  # the newest is the last
        while len(self.graphs) > MOST_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        return kind, graph

    def is_warm(self, kind: Any, enough: int | None = None) -> bool:
        """True if calls of a kind were seen in enough steps. Without a scheduler each call is a step."""
        enough = self._warm_up if enough is None else enough
        running = self._owner.running_step()
        steps = self._steps[kind] = self._steps.pop(kind, [])
        if len(self._steps) > MOST_KINDS:
            del self._steps[next(iter(self._steps))]
        if len(steps) <= self._warm_up and running not in steps:
            steps.append(running)
        return len(steps) > enough

    def _refuse(self, kind: tuple[Any, ...], reason: str) -> str:
        self._refused[kind] = reason
        while len(self._refused) > MOST_KINDS:
            del self._refused[next(iter(self._refused))]
        return reason

    def _captured(
        self, kind: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], counts: Counts
    ) -> Graph | str:
        """Capture a call. Returns the reason if that fails; all state is as before then."""
        owner, before = self._owner, None
        try:
            refresh_weights(self.module.modules())
            owner.prepare_capture()
            before = StateCopy(owner.denoiser)
            places = owner.places.of_a_call() if self.is_block else torch.clone
            given = list(tensors_of((args, kwargs)))
            args, kwargs = mapped((args, kwargs), places)
            inputs = list(tensors_of((args, kwargs)))
            owner.places.fill(inputs, given)
            writes = [x._version for x in inputs if not x.is_inference()]
            call = run_with_known_rows(
                functools.partial(self.call, *args, **kwargs), [(inputs[place], rows) for place, rows in counts]
            )
            noted: list[CapturedLists] = []

            def run() -> Any:
                if owner.lists is None:
                    return call()
                with owner.lists.captured() as lists:
                    noted.append(lists)
                    return call()

            with _without_kept_casts(owner.device.type):
                results, replay = owner.record(run)
            calls = before.linear_calls() if self.is_block and owner.device.type == "cuda" else []
            before.restore()  # a capture runs nothing
            lists = noted[0] if noted else None
            if lists is not None and lists.missing:
                return "warm_up"  # this eager call makes them
            if lists is not None and any(reason == "memory" for _, reason in lists.reasons):
                return self._refuse(kind, "skip")  # room for lists may come
            if writes != [x._version for x in inputs if not x.is_inference()]:
                return self._refuse(kind, "arguments")  # a replay would write to its own inputs, not to the caller's
            kind_of(results)
            state = ModelState(self.module)
        except UnknownValueError:  # can't be copied, so the next replay would overwrite the caller's results
            return self._refuse(kind, "results")
        except Exception as error:  # mostly a forward that waits for the GPU
            if before is not None:
                before.restore()
            return self._refuse(kind, self._failed(kind, error))
        if not owner.has_room():
            return "memory"
        return Graph(inputs, results, replay, state, calls, lists)

    def _failed(self, kind: tuple[Any, ...], error: Exception) -> str:
        """Log a failed capture. Returns the reason."""
        error = error if isinstance(error, CaptureError) else CaptureError(error)
        self._owner.note_failure(type(self.module), kind, error)
        return error.reason


def _without_kept_casts(device: str) -> Any:
    """Let autocast cast each weight anew within the block.

    The copy that it keeps is freed at the end of its block, while the graph still reads it.
    """
    dtype, is_on = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype, enabled=is_on, cache_enabled=False)
