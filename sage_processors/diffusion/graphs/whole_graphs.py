"""Whole forwards of a denoiser from CUDA graphs: one launch instead of thousands, without a compiler.

Before a replay the host does all that it does before an eager forward, and compares the model with its state at the
capture (model_state.py). A forward that can't be replayed runs eagerly, counted with its reason.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sage_kernels.compat import nobody_looks_on

from ...patching.nested import UnknownValueError, kind_of, mapped, tensors_of
from .model_state import ModelState, obstacle, refresh_weights


logger = logging.getLogger("sage_processors")

WARM_UP = 5  # eager steps before a capture: kernels are compiled, scales planned, weights quantised
MOST_GRAPHS = 8  # of one model; the least recently used one is dropped
MOST_KINDS = 64  # kinds of calls with counted steps
Recorded = tuple[Any, Callable[[], None]]  # (results that each replay overwrites, the replay)


def can_replay(model: Any) -> bool:
    """True if a model's calls can come from CUDA graphs: not after `model.compile()`, which has its own."""
    taken = model._compiled_call_impl
    return taken is None or isinstance(taken, WholeGraphs)


class Graph(NamedTuple):
    """One captured forward.

    Attributes:
        places: the input tensors it reads, in the order of the call's tensors.
        results: the results it overwrites.
        replay: runs it.
        state: the model's state at the capture.
    """

    places: list[torch.Tensor]
    results: Any
    replay: Callable[[], None]
    state: ModelState


class WholeGraphs:
    """The CUDA graphs of one denoiser, one for each kind of call.

    A kind is made of the shapes and dtypes of tensors, the values of other arguments, and the layers that the options
    keep in 16 bit in the running step. Calls in several threads take turns. Recipes with 8-bit P keep no row maxima
    between steps here, and compute a running maximum.

    Args: handle: a Handle. denoiser: the Denoiser that is called.
    Attributes:
        replays: number of forwards from a graph so far.
        eager: {reason: number of forwards that ran eagerly}.
    """

    device_type = "cuda"  # the device type that `record` captures on

    def __init__(self, handle: Any, denoiser: Any):
        self._handle, self._denoiser = handle, denoiser
        self._graphs: dict[tuple[Any, ...], Graph] = {}
        self._steps: dict[tuple[Any, ...], list[Any]] = {}
        self._thread = threading.local()
        self._refused: set[tuple[Any, ...]] = set()
        self._stream: Any = None
        self._pool: Any = None
        self._can_capture = True
        self.replays, self.eager = 0, Counter[str]()

    def start(self) -> None:
        """Take over the model's calls, hooks included, as `model.compile()` does."""
        self._denoiser.model._compiled_call_impl = self

    def stop(self) -> None:
        """Give the model's calls back, so that they run eagerly, and drop all graphs."""
        if self._denoiser.model._compiled_call_impl is self:
            self._denoiser.model._compiled_call_impl = None
        self._run_short_calls(False)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs and counted steps; later calls are captured again."""
        self._graphs.clear()
        self._steps.clear()
        self._refused.clear()
        self._pool = self._stream = None  # no graph uses this memory any more

    def _run_short_calls(self, on: bool) -> None:
        """Let linear layers run short calls in 8 bit, too, which pays in a graph but not eagerly."""
        if self._denoiser.linears is not None:
            self._denoiser.linears.run_short_calls(on)

    @property
    def is_calling(self) -> bool:
        """True within a call of the model in this thread, once the handle was told of the call."""
        return getattr(self._thread, "is_calling", False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.is_calling:
            return self._denoiser.model._call_impl(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._denoiser.model._call_impl(*args, **kwargs)
        self._handle._before_forward(self._denoiser, args, kwargs)
        self._run_short_calls(True)  # in eager forwards too, so that results don't depend on which steps are replayed
        if self._denoiser.state is not None:  # replays don't tell which call left the row maxima
            self._denoiser.state.kept.row_maxima.stop()
        self._thread.is_calling = True
        try:
            with self._handle.lock:
                found = self._replayed(args, kwargs)
                if not isinstance(found, str):
                    return found[0]
                self.eager[found] += 1
            return self._denoiser.model._call_impl(*args, **kwargs)
        finally:
            self._thread.is_calling = False

    def _replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | str:
        """Return (the results,) of a replay, or the reason why the call has to run eagerly."""
        try:
            given, tensors = kind_of((args, kwargs)), list(tensors_of((args, kwargs)))
        except UnknownValueError:
            return "arguments"
        reason = self._reason_against(tensors)
        if reason:
            return reason
        plan = self._denoiser.state, self._denoiser.frozen
        kind = (self._handle.steps.precision, torch.is_inference_mode_enabled(), plan, given)
        if not self._can_capture:
            return "not_capturable"
        if kind in self._refused:
            return "results"
        graph = self._graphs.pop(kind, None)
        if graph is not None:
            refresh_weights(graph.state.in_8_bit)
        if graph is not None and not graph.state.holds():
            self.forget()
            return "changed"
        if graph is None:
            if not self._is_warm(kind):
                return "warm_up"
            reason = obstacle(self._denoiser.model, self._denoiser.device)
            if reason:
                return reason
            refresh_weights(self._denoiser.model.modules())
            graph = self._captured(args, kwargs)
            if graph is None:
                return "not_capturable"
            try:
                kind_of(graph.results)
            except UnknownValueError:  # can't be copied, so the next replay would overwrite the caller's results
                self._refuse(kind)
                return "results"
        self._graphs[kind] = graph  # the newest is the last
        while len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        for place, tensor in zip(graph.places, tensors, strict=True):
            place.copy_(tensor)
        graph.replay()
        self.replays += 1
        return (mapped(graph.results, torch.clone),)  # the next replay overwrites the originals

    def _reason_against(self, tensors: list[torch.Tensor]) -> str:
        device = self._denoiser.device
        if device.type != self.device_type:
            return "device"
        if torch.is_grad_enabled():
            return "gradient"
        if torch.is_autocast_enabled(device.type):
            return "autocast"
        if self._handle._probe is not None:
            return "probe"
        if self._denoiser.state is not None and self._denoiser.state.kept.skip_lists is not None:
            return "skip"  # the host decides which tiles are measured in which step
        if not nobody_looks_on():
            return "observed"
        if any(x.device != device for x in tensors):
            return "arguments"
        if device.type == "cuda" and self._stream not in (None, torch.cuda.current_stream(device)):
            return "stream"  # graphs share memory, so that replays in two streams would overwrite each other
        return ""

    def _is_warm(self, kind: tuple[Any, ...]) -> bool:
        """True if calls of a kind were seen in enough steps. Without a scheduler each call is a step."""
        followed = self._handle.following.active
        running = object() if followed is None else followed.progress.token
        steps = self._steps[kind] = self._steps.pop(kind, [])
        if len(self._steps) > MOST_KINDS:
            del self._steps[next(iter(self._steps))]
        if len(steps) <= WARM_UP and running not in steps:
            steps.append(running)
        return len(steps) > WARM_UP

    def _refuse(self, kind: tuple[Any, ...]) -> None:
        self._refused.add(kind)
        if not self._graphs:
            self._pool = None

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph | None:
        model = self._denoiser.model
        args, kwargs = mapped((args, kwargs), torch.clone)
        try:
            results, replay = self.record(lambda: model._call_impl(*args, **kwargs))
        except Exception as error:  # mostly a forward that waits for the GPU
            logger.warning(
                "graphs: forwards of %s run eagerly from now on, as capturing one failed: %s",
                type(model).__name__,
                error,
            )
            self.forget()
            self._can_capture = False
            return None
        return Graph(list(tensors_of((args, kwargs))), results, replay, ModelState(model))

    def record(self, run: Callable[[], Any]) -> Recorded:
        """Capture the launches of a function. Returns (its results, the replay)."""
        self._stream = self._stream or torch.cuda.current_stream(self._denoiser.device)
        graph = torch.cuda.CUDAGraph()
        shared = {"pool": self._pool, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self._denoiser.device), torch.cuda.graph(graph, **shared):
            results = run()
        self._pool = graph.pool()
        return results, graph.replay
