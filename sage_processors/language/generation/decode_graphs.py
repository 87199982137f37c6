"""Decode steps of a transformers model from CUDA graphs, without a compiler.

A step is a call of the model for one new token of each sequence, with an Int8KVCache. It runs over static buffers
(step_cache.py): eagerly at first, and from the third equal step on from a graph. Whatever speaks against that is a
reason; the call then runs as if there were no graphs, and is counted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

import torch

from sage_kernels.compat import is_unobserved

from ...diffusion.graphs.comparison import Verdicts, bits_differ
from ...diffusion.graphs.model_state import ModelState, is_collecting, obstacle, refresh_weights
from ...patching.nested import UnknownValueError, kind_of, mapped, tensors_of
from ...reporting.event_counter import collected, settle_with
from ..kv_cache import Int8KVCache
from ..masks import adds_masks, mask_of_step
from .comparing import agree
from .step_cache import Buffers, StepCache, count_token
from .steps import MASKS, Graph, Step, first_line, new_tokens, restore, step_of, summed


logger = logging.getLogger("sage_processors")

WARM_UP = 2  # equal steps before a capture; the first is compared with a step over the cache alone
MOST_GRAPHS = 8  # over one set of buffers
MOST_KINDS = 64  # kinds of steps that are remembered
# Replays that are compared with an eager step, bit for bit. The second one, at another length than the first, shows a
# length that the capture took for a constant. After these, every power of two.
COMPARED, THEN = (0, 1), 256
MOST_FIRST = 16  # new kinds of steps in a row, beyond which arguments differ from step to step
FEW_REPLAYS, MOST_CHANGES = 8, 3  # a model that changes so soon, so often, is not captured any more


class DecodeGraphs:
    """The CUDA graphs of a model's decode steps, in the place that `model.compile()` would take.

    Args: model: a transformers model.
    Attributes:
        replays: number of steps from a graph.
        eager: {reason: number of steps that ran eagerly}.
        captures: number of graphs captured.
    """

    device_type = "cuda"

    def __init__(self, model: Any):
        self.model = model
        self.buffers, self.verdicts = Buffers(), Verdicts()
        self._steps, self._refused = dict[Any, int](), dict[Any, str]()
        self._lock, self._thread = threading.RLock(), threading.local()
        self._captures: Any = None
        self._first_steps = self._early_changes = 0  # in a row
        self.replays, self.captures, self.eager = 0, 0, Counter[str]()
        settle_with(self)

    def start(self) -> None:
        """Take over the model's calls, hooks included."""
        self.model._compiled_call_impl = self

    def stop(self) -> None:
        """Give the model's calls back, and free all buffers and graphs."""
        if self.model._compiled_call_impl is self:
            self.model._compiled_call_impl = None
        self.forget()

    def forget(self) -> None:
        """Drop all graphs and buffers. Living caches keep the buffers that they hold."""
        self.settle()
        self.buffers, self._captures = Buffers(), None
        self._steps.clear()
        self._refused.clear()
        self._first_steps = self._early_changes = 0

    def settle(self) -> None:
        """Add all replays to the counters of layers, so that reports show them."""
        for one in self.buffers.sets:
            for graph in one.graphs.values():
                graph.settle()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if torch.compiler.is_compiling() or getattr(self._thread, "is_calling", False):
            return model._call_impl(*args, **kwargs)
        name = next((name for name, x in kwargs.items() if isinstance(x, Int8KVCache)), None)
        if name is None or new_tokens(args, kwargs) != 1:
            if name is not None:
                with self._lock:
                    self.buffers.offer(kwargs[name])
            return model._call_impl(*args, **kwargs)
        with self._lock:
            self._thread.is_calling = True
            try:
                found = self._attempt(args, kwargs, name)
            except Exception as error:  # the eager call below tells the caller of errors that are his
                found = "memory" if isinstance(error, torch.OutOfMemoryError) else "failed"
                logger.warning("graphs: a decode step runs eagerly, as its graph failed: %s", first_line(error))
            finally:
                self._thread.is_calling = False
            if isinstance(found, str):
                self.eager[found] += 1
                return model._call_impl(*args, **kwargs)
            return found[0]

    def _attempt(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[Any] | str:
        """Return (the results,) of a step over static buffers, or the reason to run it eagerly.

        The cache counts the token only at the end. Until then whatever was written lies behind its tokens.
        """
        self.verdicts.settle(wait=False)
        cache = kwargs[name]
        step = step_of(args, kwargs, name)
        reason = step if isinstance(step, str) else self._reason_against(step)
        if isinstance(step, str) or reason:
            return reason
        try:
            given = kind_of(step.given)
        except UnknownValueError:
            return "arguments"
        held = self.buffers.borrow(cache)
        if held is None:
            return "buffers"
        kind = held.kind, step.mask is not None, given
        if kind in self._refused:
            return self._refused[kind]
        graph = held.graphs.pop(kind, None)
        if graph is not None and (graph.state.has_moved() or not held.is_checked):
            if not self._is_current(graph, held):
                return "changed"
        if graph is None:
            found = self._without_graph(step, held, kind)
        else:
            held.graphs[kind] = graph  # the newest is the last
            found = self._with_graph(step, held, kind, graph)
        if isinstance(found, tuple):
            count_token(cache, step.seen)
        return found

    def _reason_against(self, step: Step) -> str:
        device = step.cache.layers[0].device
        if device.type != self.device_type or any(x.device != device for x in step.cache.layers):
            return "device"
        if torch.is_grad_enabled():
            return "gradient"
        if torch.is_autocast_enabled(device.type):
            return "autocast"
        if self.model.training or not is_unobserved():
            return "training" if self.model.training else "observed"
        if len(step.given[0]) > 1:  # a mask may be among them
            return "arguments"
        if is_collecting():  # for a larger model that this one is a part of
            return "hooks"
        config = self.model.config
        if step.mask is not None and any(adds_masks(type(x)) for x in (config, config.get_text_config(decoder=True))):
            return "mask"
        if self._captures is not None and self._captures.stream != torch.cuda.current_stream(device):
            return "stream"  # graphs share memory, so that replays in two streams would overwrite each other
        try:
            if any(x.device != device for x in tensors_of(step.given)):
                return "arguments"
        except UnknownValueError:
            return "arguments"
        return ""

    def _without_graph(self, step: Step, held: StepCache, kind: Any) -> tuple[Any] | str:
        """Run a step over the buffers eagerly, or capture it if enough equal ones were seen."""
        number = self._steps.pop(kind, 0)
        if not number:
            return self._first_step(step, held, kind)
        self._steps[kind], self._first_steps = number + 1, 0
        if number >= WARM_UP:
            reason = self._capture(step, held, kind)
            if not reason:
                return self._with_graph(step, held, kind, held.graphs[kind])
            return self._refuse(kind, reason)
        return (self._given_back(step, self._over(step, held)),)

    def _first_step(self, step: Step, held: StepCache, kind: Any) -> tuple[Any] | str:
        """Compare a step over the cache alone with one over the buffers.

        Waits for the device, once for each kind of step.
        """
        reason = obstacle(self.model, held.seen.device)
        if reason or self._first_steps >= MOST_FIRST:
            return reason or "arguments"
        self._first_steps += 1
        before = [dict(vars(layer)) for layer in step.cache.layers]
        args, kwargs = step.given
        masked = {} if step.mask is None else {MASKS[0]: step.mask}
        try:
            with collected():
                usual = self.model._call_impl(*args, **kwargs, **masked, **{step.name: step.cache})
        finally:
            for layer, fields in zip(step.cache.layers, before, strict=True):
                restore(layer, fields)
        wanted = self._taken_apart(step.cache, usual)
        with collected() as events:
            found = self._over(step, held)
        if wanted is None or found is None or not agree(wanted[1], found[1]):
            return self._refuse(kind, "results")
        for counter, event, calls in events:
            counter.add_eager(event, calls)
        self._steps[kind] = 1
        while len(self._steps) > MOST_KINDS:
            del self._steps[next(iter(self._steps))]
        return (self._given_back(step, found),)

    def _with_graph(self, step: Step, held: StepCache, kind: Any, graph: Graph) -> tuple[Any] | str:
        """Replay a step. In compared steps the caller gets the eager step's results and tokens."""
        number, wanted, ends = graph.replays, None, list[torch.Tensor]()
        if number in COMPARED or (number >= THEN and not number & (number - 1)):
            with collected():
                wanted = self._over(step, held)
            ends = [x.clone() for x in held.ends(step.seen)]
        self._fill(step, held)
        for place, tensor in zip(graph.places, tensors_of(step.given), strict=True):
            place.copy_(tensor)
        graph.replay()
        if not self._is_current(graph, held):  # the GPU is busy meanwhile
            return "changed"
        graph.replays += 1
        self.replays += 1
        found = graph.form, mapped(graph.results, torch.clone)
        if wanted is not None:
            pairs = [
                *zip(tensors_of(wanted[1]), tensors_of(found[1]), strict=True),
                *zip(ends, held.ends(step.seen), strict=True),
            ]
            self.verdicts.add(bits_differ(pairs), lambda: self._drop(held, kind, graph))
            self.verdicts.send()
            for place, x in zip(held.ends(step.seen), ends, strict=True):
                place.copy_(x)
            found = wanted
            if number == COMPARED[-1]:  # from here on replays alone make results
                self.verdicts.settle(wait=True)
        return (self._given_back(step, found),)

    def _is_current(self, graph: Graph, held: StepCache) -> bool:
        """True if the model is as it was at the capture. Else all graphs are dropped."""
        refresh_weights(graph.state.in_8_bit)
        if graph.state.holds():
            held.is_checked = True
            return True
        for one in self.buffers.sets:
            for other in one.graphs.values():
                other.settle()
            one.graphs.clear()
        graph.settle()
        self._early_changes += graph.replays < FEW_REPLAYS
        self._steps.clear()
        self._refused.clear()
        return False

    def _drop(self, held: StepCache, kind: Any, graph: Graph) -> None:
        if held.graphs.get(kind) is graph:
            del held.graphs[kind]
        graph.settle()
        self._refuse(kind, "differs")

    def _refuse(self, kind: Any, reason: str) -> str:
        self._refused[kind] = reason
        while len(self._refused) > MOST_KINDS:
            del self._refused[next(iter(self._refused))]
        return reason

    def _fill(self, step: Step, held: StepCache) -> None:
        held.seen.fill_(step.seen)
        if step.mask is not None:
            held.padding[:, : step.seen + 1].copy_(step.mask)

    def _over(self, step: Step, held: StepCache) -> Any:
        """Run a step eagerly over the buffers. Returns `_taken_apart` results."""
        self._fill(step, held)
        return self._forward(step.given, step.name, held, padded=step.mask is not None)

    def _forward(self, given: Any, name: str, held: StepCache, *, padded: bool) -> Any:
        args, kwargs = given
        torch.add(held.seen, 1, out=held.after)
        with mask_of_step(held.padding[:, None, None] if padded else None):
            found = self.model._call_impl(*args, **kwargs, **{name: held})
        return self._taken_apart(held, found)

    def _taken_apart(self, cache: Any, results: Any) -> Any:
        """Return (how to put results together, {name: value}); None for results of an unknown class.

        Values that are the cache are left out.
        """
        if not (isinstance(results, dict) and hasattr(type(results), "to_tuple")):
            return None
        return (
            (type(results), [(name, x is cache) for name, x in results.items()]),
            {name: x for name, x in results.items() if x is not cache},
        )

    def _given_back(self, step: Step, found: Any) -> Any:
        """Put results together again, with the caller's cache in the place of the buffers."""
        (kind, names), values = found
        return kind(**{name: step.cache if is_cache else values[name] for name, is_cache in names})

    def _capture(self, step: Step, held: StepCache, kind: Any) -> str:
        """Capture a step over the buffers. Returns the reason if that fails."""
        reason = "changed" if self._early_changes >= MOST_CHANGES else obstacle(self.model, held.seen.device)
        if reason:
            return reason
        forms: list[Any] = []
        name, padded = step.name, step.mask is not None  # `step` has the cache, which may die

        def run() -> Any:
            form, results = self._forward(given, name, held, padded=padded)
            forms.append(form)
            return results

        try:
            refresh_weights(self.model.modules())
            given = mapped(step.given, torch.clone)
            self._fill(step, held)
            with collected() as events:
                results, replay = self.record(run, held.seen.device)
            kind_of(results)
            places = list(tensors_of(given))
            graph = Graph(places, forms[0], results, replay, ModelState(self.model), summed(events))
        except UnknownValueError:
            return "results"
        except Exception as error:  # mostly a forward that waits for the GPU
            logger.warning("graphs: decode steps of %s run eagerly: %s", type(self.model).__name__, first_line(error))
            return str(getattr(error, "reason", "not_capturable"))
        self.captures += 1
        held.graphs[kind] = graph
        held.is_checked = True
        while len(held.graphs) > MOST_GRAPHS:
            held.graphs.pop(next(iter(held.graphs))).settle()
        return ""

    def record(self, run: Any, device: torch.device) -> tuple[Any, Any]:
        """Capture the launches of a function. Returns (its results, the replay). Raises: CaptureError."""
        from ...diffusion.graphs.capture import Captures

        if self._captures is None:
            self._captures = Captures(device)
        return self._captures.record(run)


def start_graphs(model: Any) -> DecodeGraphs | None:
    """Return the graphs of a model's decode steps, started if need be; None after `model.compile()`."""
    taken = model._compiled_call_impl
    if taken is None:
        taken = DecodeGraphs(model)
        taken.start()
    return taken if isinstance(taken, DecodeGraphs) else None


def stop_graphs(model: Any) -> None:
    """Stop the graphs of a model's decode steps, if there are any, and free their buffers."""
    taken = model._compiled_call_impl
    if isinstance(taken, DecodeGraphs):
        taken.stop()
