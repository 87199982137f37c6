"""Forwards of a denoiser from CUDA graphs: few launches instead of thousands, without a compiler.

The whole forward is one graph where that works. Where it does not, because the forward waits for the GPU or has hooks
of others, each repeated block has a graph, and the code around the blocks stays eager. Before a replay the host does
all that it does before an eager forward. What can't be replayed runs eagerly, counted with its reason.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sage_kernels.compat import is_unobserved
from sage_kernels.planning.row_maxima import MOST_CALLS
from sage_kernels.planning.skip_lists import SkipLists

from ...patching.nested import UnknownValueError, kind_of, mapped, tensors_of
from ..host.innermost import own_forward
from ..host.valid_tokens import Counts, MaskCounts
from .agreement import CAPTURE, EAGER, Agreement, forget_before_the_end
from .blocks import BlockCall, repeated_blocks
from .call_graphs import CallGraphs, Graph
from .capture import CaptureError, Captures, Recorded, tidy
from .comparison import EVERY, Verdicts, expected_of, lists_of
from .failures import Failures
from .places import Places


logger = logging.getLogger("sage_processors")

WARM_UP = 5  # eager steps before a capture: kernels are compiled, scales planned, weights quantised
BLOCK_WARM_UP = 1  # of a block, once whole forwards were seen in as many steps as above
# reasons against a graph of the whole forward that say nothing of its blocks
NOT_OF_BLOCKS = {"hooks", "compiled", "offload", "arguments", "results", "not_capturable", "memory", "differs"}


def can_replay(model: Any) -> bool:
    """True if a model's calls can come from CUDA graphs: not after `model.compile()`, which has its own."""
    taken = model._compiled_call_impl
    return taken is None or isinstance(taken, ModelGraphs)


class ModelGraphs:
    """The CUDA graphs of one denoiser.

    Calls in several threads take turns. Recipes with 8-bit P keep no row maxima between steps here, and compute a
    running maximum.

    Args: handle: a Handle. denoiser: the Denoiser that is called.
    Attributes:
        replays: number of forwards from a graph of the whole so far.
        partly: number of forwards in which only blocks came from graphs.
        eager: {reason: number of forwards that ran eagerly}.
        block_replays: number of blocks' calls from graphs, in `partly`.
        differing: number of graphs that were dropped, as a replay gave other bits than an eager call.
        block_eager: {reason: number of blocks' calls that ran eagerly}, in forwards that tried blocks.
        failures: captures that failed, with the lines of code that made them fail.
    """

    device_type = "cuda"  # the device type that `record` captures on

    def __init__(self, handle: Any, denoiser: Any):
        self._handle, self.denoiser, self.model = handle, denoiser, denoiser.model
        self.whole = CallGraphs(self, self.model, self.model._call_impl, WARM_UP)
        self.blocks: dict[BlockCall, CallGraphs] = {}
        self._thread = threading.local()
        self._captures: Captures | None = None
        self.places, self._masks, self._reads_masks = Places(), MaskCounts(), False
        self.failures = Failures(type(self.model))
        self._shape: Any = None  # kind of the running forward
        self._shapes: set[Any] = set()  # with graphs
        self._without_room: set[Any] = set()
        self._verdicts, self.agreement = Verdicts(), Agreement()
        self._run, self._begun, self._is_first, self._is_tidy = 0, None, False, False
        self._step, self._call = object(), 0  # the running step, and the number of this forward in it
        self.replays = self.partly = self.block_replays = self.differing = 0
        self.eager, self.block_eager = Counter[str](), Counter[str]()

    @property
    def device(self) -> torch.device:
        """The model's device."""
        found: torch.device = self.denoiser.device
        return found

    @property
    def memory(self) -> int:
        """Bytes of GPU memory that graphs take."""
        return self.places.memory + (0 if self._captures is None else self._captures.memory)

    def start(self) -> None:
        """Take over the model's calls, hooks included, as `model.compile()` does."""
        self.model._compiled_call_impl = self

    def stop(self) -> None:
        """Give the model's calls back, so that they run eagerly, and drop all graphs."""
        if self.model._compiled_call_impl is self:
            self.model._compiled_call_impl = None
        for call in self.blocks:
            call.take_out()
        self._run_short_calls(False)
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, counted steps and refusals; later calls are captured again."""
        self.settle()  # comparisons under way hold their graphs
        self._leave_blocks()
        self.whole = CallGraphs(self, self.model, self.model._call_impl, WARM_UP)
        self.failures.forget()
        self._without_room.clear()
        self._masks.forget()
        self._let_go()

    def _let_go(self, *, is_warm: bool = False) -> None:
        """Drop all graphs and their memory.

        is_warm: capture again at the next call, without eager steps before.
        """
        for graphs in (self.whole, *self.blocks.values()):
            graphs.graphs.clear() if is_warm else graphs.forget()
        self.places = Places()
        self._shapes.clear()
        self._captures = None

    def settle(self) -> None:
        """Wait for the comparisons so far, and drop graphs that differed."""
        self._verdicts.settle(wait=True)

    def _run_short_calls(self, on: bool) -> None:
        """Let linear layers run short calls in 8 bit, too, which pays in a graph but not eagerly."""
        if self.denoiser.linears is not None:
            self.denoiser.linears.run_short_calls(on)

    @property
    def is_calling(self) -> bool:
        """True within a call of the model in this thread, once the handle was told of the call."""
        return getattr(self._thread, "is_calling", False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.is_calling:
            return self.model._call_impl(*args, **kwargs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self.model._call_impl(*args, **kwargs)
        self._handle._before_forward(self.denoiser, args, kwargs)
        if self.denoiser.linears is not None:
            self.denoiser.linears.check_weights()
        self._run_short_calls(True)  # in eager forwards too, so that results don't depend on which steps are replayed
        if self.denoiser.state is not None:  # replays don't tell which call left the row maxima
            self.denoiser.state.kept.row_maxima.stop()
        self._thread.is_calling = True
        self.agreement.begin(self.denoiser.peers)
        try:
            with self._handle.lock:
                self._note_run()
                if self.denoiser.peers is not None:
                    self._leave_blocks()  # processes agree about graphs once in a forward, not at each block
                elif self.whole.is_warm(None):
                    self._take_blocks()
                found = self._reason_against() or self._answer(self.whole, args, kwargs)
                if not self.agreement.is_made and not self.agreement.wish(EAGER):
                    self._let_go(is_warm=True)
                if not isinstance(found, str):
                    self.replays += 1
                    return found[0]
                if found not in NOT_OF_BLOCKS or not self.blocks:
                    self.eager[found] += 1
                    return self.model._call_impl(*args, **kwargs)
            return self._in_blocks(found, args, kwargs)
        finally:
            self._thread.is_calling = False
            self.places.end_forward()
            self._verdicts.send()

    def _in_blocks(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward whose blocks may come from graphs. reason: against a graph of the whole."""
        counts = self._thread.blocks = Counter[str]()
        try:
            return self.model._call_impl(*args, **kwargs)
        finally:
            self._thread.blocks = None
            replays = counts.pop("", 0)
            self.block_replays += replays
            self.block_eager.update(counts)
            if replays:
                self.partly += 1
            else:
                self.eager[reason] += 1

    def _leave_blocks(self) -> None:
        """Give the blocks' calls back."""
        for call in self.blocks:
            call.take_out()
        self.blocks.clear()

    def _take_blocks(self) -> None:
        """Take over the blocks' calls, before any capture, as this changes the blocks; except compiled ones."""
        for call in self.blocks:
            call.leave_if_compiled()
        for block in () if self.blocks else repeated_blocks(self.model):
            call = BlockCall(block)
            if call.put():
                graphs = CallGraphs(self, block, functools.partial(_own_forward, block), BLOCK_WARM_UP)
                call.answer = functools.partial(self._block_called, graphs)
                self.blocks[call] = graphs

    def _block_called(self, graphs: CallGraphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts = getattr(self._thread, "blocks", None)
        if counts is None:
            return graphs.call(*args, **kwargs)
        with self._handle.lock:
            found = self._answer(graphs, args, kwargs)
        if isinstance(found, str):
            counts[found] += 1
            return graphs.call(*args, **kwargs)
        counts[""] += 1
        return found[0]

    def _answer(self, graphs: CallGraphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | str:
        """Return (the results,) of a replay, or the reason why the call has to run eagerly."""
        if graphs is self.whole:
            self._shape, self._is_tidy = self._kind_of_forward(args, kwargs), False
        if self._shape in self._without_room:
            return "memory"
        compared = None
        try:
            found = graphs.find(args, kwargs)
            if isinstance(found, str):
                return found
            kind, graph = found
            self._shapes.add(self._shape)
            if self.agreement.compares:
                graph.compared = self._run
                compared = expected_of(self.denoiser, lambda: graphs.call(*args, **kwargs))
            self.places.fill(graph.places, list(tensors_of((args, kwargs))))
        except Exception as error:  # what only helps must not end the run
            if self.agreement.binds:
                raise
            self.note_failure(type(graphs.module), (), CaptureError(error))
            return "not_capturable"
        graph.replay()
        graph.replays += 1
        if self.lists is not None and graph.lists is not None:
            self.lists.replayed(graph.lists)
        for counter, event, calls in graph.calls:
            counter.add_eager(event, calls)
        results = mapped(graph.results, torch.clone)  # the next replay overwrites the originals
        if compared is not None:
            try:
                self._verdicts.add(compared.differs(results), functools.partial(self._drop, graphs, kind, graph))
            except RuntimeError as error:  # no memory for it
                logger.debug("graphs: a replay is not compared: %s", error)
        return (results,)

    def _is_due(self, graph: Graph | None) -> bool:
        """True if a graph, or one that is captured now, is to be compared with an eager call in this forward."""
        is_due = graph is None or graph.compared is None or self._run - graph.compared >= EVERY
        return is_due and not self._is_first

    def agrees(self, graph: Graph | None) -> bool:
        """True if all processes would replay this graph, or capture one if it is None.

        If they do not agree, all drop their graphs, so that the next ones are captured together.
        """
        if self.agreement.wish(CAPTURE if graph is None else graph.number, self._is_due(graph)):
            return True
        self._let_go(is_warm=True)
        return False

    def _drop(self, graphs: CallGraphs, kind: tuple[Any, ...], graph: Graph) -> None:
        """Give up a graph whose replay gave other bits than an eager call. Logs the first."""
        graphs.give_up(kind, graph, "differs")
        if not self.differing:
            name = getattr(type(graphs.module), "_sage_base", type(graphs.module)).__name__
            logger.warning("graphs: a replay of %s gave other bits than an eager call; it is dropped", name)
        self.differing += 1

    def _kind_of_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return kind_of((args, kwargs))
        except UnknownValueError:
            return None

    def _note_run(self) -> None:
        """Notice that a run began. The comparisons of the one before it take effect then."""
        self._reads_masks = any(layer.sage._sage_binding.reads_masks for layer in self.denoiser.layers)
        followed = self._handle.following.active if self.denoiser.follows_scheduler else None
        step = None if followed is None else followed.progress.token
        self._step, self._call = step, self._call + 1 if step is self._step else 0
        if followed is None:
            self._verdicts.settle(wait=False)
            return
        self._is_first = followed.progress.taken == 0
        if self._is_first and followed.progress.token is not self._begun:
            self._begun = followed.progress.token
            self._run += 1
            self._verdicts.settle(wait=True)

    def _reason_against(self) -> str:
        device = self.device
        if device.type != self.device_type:
            return "device"
        if torch.is_grad_enabled():
            return "gradient"
        if self._handle._probe is not None:
            return "probe"
        if not is_unobserved():
            return "observed"
        captures = self._captures
        if captures is not None and captures.stream != torch.cuda.current_stream(device):
            return "stream"  # graphs share memory, so that replays in two streams would overwrite each other
        return ""

    # --- what CallGraphs asks for ---

    @property
    def lists(self) -> SkipLists | None:
        """The denoiser's skip lists, if it has some."""
        return lists_of(self.denoiser)

    def precision(self) -> tuple[Any, ...]:
        """Return what results depend on beside model and arguments, for the kind of a call."""
        plan = self.denoiser.state, self.denoiser.frozen
        autocast = torch.is_autocast_enabled(self.device_type) and torch.get_autocast_dtype(self.device_type)
        return self._handle.steps.precision, torch.is_inference_mode_enabled(), autocast, plan

    def kind_of_lists(self) -> tuple[str, int] | None:
        """Return the kind of step, and the call's number in it, as each has skip lists of its own; or None."""
        if self.lists is None or not self.lists.kind_of_step:
            return None
        return self.lists.kind_of_step, min(self._call, MOST_CALLS)

    def mask_counts(self, tensors: Iterator[torch.Tensor]) -> Counts:
        """Return the numbers of valid tokens of a call's masks; () if no processor asks for them."""
        return self._masks.of(tensors) if self._reads_masks else ()

    def running_step(self) -> object:
        """Return an object that identifies the running step; a new one without a scheduler."""
        followed = self._handle.following.active
        return object() if followed is None else followed.progress.token

    def has_changed(self, graphs: CallGraphs) -> None:
        """Drop the graphs of a module that changed since its capture."""
        if graphs.is_block:
            graphs.graphs.clear()
        else:
            self._let_go()

    def note_failure(self, kind_of_module: type, kind: tuple[Any, ...], error: CaptureError) -> None:
        """Remember and log a failed capture. One without memory drops all graphs."""
        if error.reason == "memory":
            self._let_go()
        self.failures.note(kind_of_module, kind, error)

    def prepare_capture(self) -> None:
        """Make memory available, once in a forward."""
        if self.device.type == "cuda":
            if not self._is_tidy:
                tidy(self.device)
            self._is_tidy = True

    def record(self, run: Callable[[], Any]) -> Recorded:
        """Capture the launches of a function. Returns (its results, the replay). Raises: CaptureError."""
        if self._captures is None:
            self._captures = Captures(self.device)
        if self.denoiser.peers is not None:
            forget_before_the_end(self)
        return self._captures.record(run)

    def room(self) -> int | None:
        """Return how many bytes graphs may take; None if that is unknown."""
        return None if self._captures is None else self._captures.most()

    def has_room(self) -> bool:
        """Return True if graphs take no more memory than they may.

        Else all are dropped, and captured again as they are needed; but if they were all for one kind of forward,
        this kind runs eagerly from now on.
        """
        room = self.room()
        if room is None or self.memory <= room:
            return True
        if not self._shapes - {self._shape}:
            self._without_room.add(self._shape)
        self._let_go(is_warm=True)
        return False


def _own_forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    return own_forward(block)(*args, **kwargs)
