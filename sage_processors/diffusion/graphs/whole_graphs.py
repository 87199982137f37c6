"""Forwards of a denoiser from CUDA graphs: one launch a step in the place of thousands, without a compiler.

Before a replay everything happens on the host that happens before an eager forward, and the model is compared with
what was captured (model_state.py). What can't be replayed runs eagerly, counted with its reason.
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

WARM_UP = 5  # steps before a capture: kernels are compiled, scales planned, weights laid out
MOST_GRAPHS = 8  # of one model; the one that was not used for longest goes
MOST_KINDS = 64  # whose steps are counted before they are captured
Recorded = tuple[Any, Callable[[], None]]  # where each replay leaves its results, and what replays


def can_replay(model: Any) -> bool:
    """Whether a model's calls can come from CUDA graphs: not after `model.compile()`, which has its own."""
    taken = model._compiled_call_impl
    return taken is None or isinstance(taken, WholeGraphs)


class Graph(NamedTuple):
    """places: the tensors that it reads. state: of the model when it was captured."""

    places: list[torch.Tensor]
    results: Any
    replay: Callable[[], None]
    state: ModelState


class WholeGraphs:
    """The graphs of one part of a handle, one for each kind of call.

    What makes a kind: shapes and types of tensors, values of other arguments, and which layers the options keep in 16
    bit in the running step. Calls in several threads take turns. Recipes with 8-bit P keep no row maxima from step to
    step, and run with a running maximum.

    Args: handle, part (denoiser.Part).
    Attributes: replays: forwards from a graph so far. eager: {reason: forwards that ran eagerly}. is_calling: within a
        call that the handle has seen begin, in this thread.
    """

    device_type = "cuda"  # of what `record` captures

    def __init__(self, handle: Any, part: Any):
        self._handle, self._part = handle, part
        self._graphs: dict[tuple[Any, ...], Graph] = {}
        self._steps: dict[tuple[Any, ...], list[Any]] = {}
        self._thread = threading.local()
        self._refused: set[tuple[Any, ...]] = set()
        self._stream: Any = None
        self._pool: Any = None
        self._can_capture = True
        self.replays, self.eager = 0, Counter[str]()

    def start(self) -> None:
        """Take the calls of the model, as `model.compile()` does: hooks and forward are one thing."""
        self._part.model._compiled_call_impl = self

    def stop(self) -> None:
        """Calls are eager again."""
        if self._part.model._compiled_call_impl is self:
            self._part.model._compiled_call_impl = None
        self._run_short_calls(False)
        self.forget()

    def forget(self) -> None:
        """Capture anew whatever is called next."""
        self._graphs.clear()
        self._steps.clear()
        self._refused.clear()
        self._pool = self._stream = None  # memory that no graph has any more

    def _run_short_calls(self, on: bool) -> None:
        """In a graph linear layers run in 8 bit whose calls are too short for an eager forward."""
        if self._part.linears is not None:
            self._part.linears.run_short_calls(on)

    @property
    def is_calling(self) -> bool:
        return getattr(self._thread, "is_calling", False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.is_calling:
            return self._part.model._call_impl(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._part.model._call_impl(*args, **kwargs)
        self._handle._before_forward(self._part, args, kwargs)
        self._run_short_calls(True)  # eager ones, too: else a picture would hang on which of its steps were replayed
        if self._part.state is not None:  # replays would not tell whose row maxima the next call meets
            self._part.state.kept.row_maxima.stop()
        self._thread.is_calling = True
        try:
            with self._handle.lock:
                found = self._replayed(args, kwargs)
                if not isinstance(found, str):
                    return found[0]
                self.eager[found] += 1
            return self._part.model._call_impl(*args, **kwargs)
        finally:
            self._thread.is_calling = False

    def _replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | str:
        """(the results,), or why the call is to run eagerly."""
        try:
            given, tensors = kind_of((args, kwargs)), list(tensors_of((args, kwargs)))
        except UnknownValueError:
            return "arguments"
        reason = self._reason_against(tensors)
        if reason:
            return reason
        plan = self._part.state, self._part.frozen
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
            reason = obstacle(self._part.model, self._part.device)
            if reason:
                return reason
            refresh_weights(self._part.model.modules())
            graph = self._captured(args, kwargs)
            if graph is None:
                return "not_capturable"
            try:
                kind_of(graph.results)
            except UnknownValueError:  # the next replay would write to what the caller holds
                self._refuse(kind)
                return "results"
        self._graphs[kind] = graph  # the newest is the last
        while len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        for place, tensor in zip(graph.places, tensors, strict=True):
            place.copy_(tensor)
        graph.replay()
        self.replays += 1
        return (mapped(graph.results, torch.clone),)  # the next replay writes there

    def _reason_against(self, tensors: list[torch.Tensor]) -> str:
        device = self._part.device
        if device.type != self.device_type:
            return "device"
        if torch.is_grad_enabled():
            return "gradient"
        if torch.is_autocast_enabled(device.type):
            return "autocast"
        if self._handle._probe is not None:
            return "probe"
        if self._part.state is not None and self._part.state.kept.skip_lists is not None:
            return "skip"  # which tiles are measured, and when, is decided on the host
        if not nobody_looks_on():
            return "observed"
        if any(x.device != device for x in tensors):
            return "arguments"
        if device.type == "cuda" and self._stream not in (None, torch.cuda.current_stream(device)):
            return "stream"  # replays have their memory in one place, and would meet there
        return ""

    def _is_warm(self, kind: tuple[Any, ...]) -> bool:
        """Whether calls of a kind were seen in enough steps; without a scheduler each call is one."""
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
        model = self._part.model
        args, kwargs = mapped((args, kwargs), torch.clone)
        try:
            results, replay = self.record(lambda: model._call_impl(*args, **kwargs))
        except Exception as error:  # mostly of a forward that waits for the GPU
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
        """Capture what a function launches."""
        self._stream = self._stream or torch.cuda.current_stream(self._part.device)
        graph = torch.cuda.CUDAGraph()
        shared = {"pool": self._pool, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self._part.device), torch.cuda.graph(graph, **shared):
            results = run()
        self._pool = graph.pool()
        return results, graph.replay
