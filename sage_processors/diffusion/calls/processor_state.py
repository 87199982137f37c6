"""State of a Sage processor beside the attributes of its original: one object, `processor._sage`."""

from __future__ import annotations

import threading
from typing import Any

import torch

import sage_kernels

from ...options import SageAttnProcessor
from ...reporting.event_counter import EventCounter
from ..heads.postponed_heads import HeadSource
from ..host.dispatcher import without_ours
from ..host.patches import Patches
from ..steps.windows import Window
from .short_calls import ShortCalls


class CallSite:
    """One call site of attention in a processor's code: its plan, and facts about its latest call.

    Attributes:
        state: sage_kernels.HeadState with the plan. None: scales are computed from the inputs of each call.
        kv_heads, head_dim: layout that `state` was made for.
        keeps_rows: calls keep row maxima for the next step, in the place registered with
            `row_maxima_op.keep_rows_of`.
        skip_lists: the SkipLists (sage_kernels.planning.skip_lists) with the key tiles to visit, or None.
        skip_site: index of this call site in `skip_lists`.
        seen_kv_heads, seen_head_dim, seen_batch, seen_seq_q, seen_seq_kv, elements: of the latest call; elements =
            numel(Q) + numel(K). The forward writes them and never reads them: a read would make Dynamo guard on the
            value, and recompile.
        blocks: of the latest call of the recipe "mixed", with Mixed.keep_blocks: int8 [B, H, row blocks, key blocks].
        seen_kind: (dtype of Q, `causal` as the op takes it, dtype of the mask of keys or None) of the latest call;
            None before the first.
    """

    def __init__(self, state: sage_kernels.HeadState | None = None, kv_heads: int = 0, head_dim: int = 0) -> None:
        self.state, self.kv_heads, self.head_dim = state, kv_heads, head_dim
        self.keeps_rows = False
        self.skip_lists: Any = None
        self.skip_site = 0
        self.seen_kv_heads, self.seen_head_dim, self.elements = 0, 0, 0
        self.seen_batch, self.seen_seq_q, self.seen_seq_kv = 0, 0, 0
        self.seen_kind: tuple[torch.dtype, str, torch.dtype | None] | None = None
        self.blocks: torch.Tensor | None = None
        self._states: dict[int, tuple[sage_kernels.HeadState, sage_kernels.HeadState]] = {}

    def state_of(self, head: int) -> sage_kernels.HeadState:
        """Return the state of this device's heads, which begin at key/value head `head` of the model."""
        state = self.state
        if state is None:
            raise ValueError("state: got a call site without a state, expected one with planned scales")
        if torch.compiler.is_compiling():
            return state._replace(row=state.row + head)
        known, found = self._states.get(head, (None, state))
        if known is not state:
            found = state._replace(row=state.row + head)
            self._states[head] = state, found
        return found


class ProcessorState:
    """Options and counters of one Sage processor. Copies of the processor get a new one, without a handle.

    Attributes:
        config: the layer's options. None: the processor behaves as its base class, as after `remove`.
        layer: its name in the report, in messages and in probes.
        kept: all its calls run in 16 bit, at every step.
        rotated: its INT8 calls run with the Hadamard rotation. Changes only between steps.
        window: windows.Window of the handle, shared by layers with the same range of noise levels; None without one.
        lock: of the handle, held while a call counts in a plan's statistics; None without a handle.
        patches: tells if attention was replaced since the swap; shared by a handle's layers of the same class.
        waiting: source of the postponed results of norms and rotary embedding in front of attention.
        short: kinds of calls whose attention is all short.
        events: counts of processors.EVENTS, calls and reasons for 16 bit.
        sites: one CallSite for each attention call in the processor's code.
        backend: name of diffusers' attention back end for 16-bit calls. One that is set later wins over INT8.
        probe: probe.LayerProbe while a probe is on, else None.
        is_compared: a CUDA graph is replayed only while these attributes are as they were at its capture.
    """

    is_compared = True

    def __init__(
        self, config: SageAttnProcessor | None, layer: str, patches: Patches, sites: int, events: EventCounter, *,
        kept: bool = False, window: Window | None = None, lock: threading.RLock | None = None,
    ) -> None:  # fmt: skip
        """Start counting from zero, without planned scales. sites: number of attention calls in the code."""
        self.config: Any = config
        self.layer, self.kept = layer, kept
        self.rotated = config is not None and config.rotation == "hadamard"
        self.window, self.patches = window, patches
        self.lock: Any = lock
        self.waiting = HeadSource(layer)
        self.short = ShortCalls()
        self.events = events
        self.sites = tuple(CallSite() for _ in range(sites))
        self.backend: Any = None
        self.probe: Any = None

    def accept_backend(self, processor: Any) -> None:
        """Take the processor's current attention back end as the one for 16-bit calls."""
        self.backend = without_ours(getattr(processor, "_attention_backend", None))
