"""What a swapped linear layer knows: its format, its 8-bit weight, and whether the 16-bit one was written to since."""

from __future__ import annotations

import logging
import weakref

import torch

from ..event_counter import EventCounter
from ..options import UnsupportedLinearError
from .storage import Storage, is_ready_for


logger = logging.getLogger("sage_processors")

CALLED = "called"
# Slots of a layer's counter: 8-bit calls, then the reasons for exact ones.
EVENTS = (
    CALLED,
    "training",
    "gradient",
    "autocast",
    "dtype",
    "rank",
    "empty",
    "subclass",
    "device",
    "weight",
    "other",
)
_EVENT = {name: i for i, name in enumerate(EVENTS)}
CHOSEN = ("empty",)  # nothing is lost by these
REMEDIES = {
    "training": "the module is in training mode: call model.eval()",
    "gradient": "8-bit linear layers have no backward: call the model under torch.no_grad()",
    "dtype": "float16, bfloat16 and float32 only: cast the model",
    "autocast": "autocast to float16 or bfloat16 only",
    "weight": "its weight holds NaN or inf",
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_logged: set[tuple[str, str]] = set()


def checksum(weight: torch.Tensor) -> tuple[int, int]:
    """Two numbers that change with any of the weight's bits, and with their places. Syncs."""
    size = weight.element_size()
    bits = weight.detach().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])
    rows, columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    place = torch.arange(1, max(bits.shape) + 1, device=weight.device)
    found = torch.stack([(rows * place[: len(rows)]).sum(), (columns * place[: len(columns)]).sum()])
    return tuple(found.tolist())


class LinearState:
    """Of one swapped linear layer.

    Attributes:
        label: its name in the report. format: "int8" or "fp8". policy: "fallback" or "strict".
        events: EventCounter of EVENTS.
        storage, index: where its 8-bit weight is.
        run: qkv.Run, where it is multiplied together with others of the same input; None alone.
        touched: the 16-bit weight was handed out since it was last compared, and may have been written to through
            `.data`, which no counter of PyTorch's tells.
        dropped: the 16-bit weight is gone.
        failed: its weight can't be quantised.
        saved_per_call: bytes, of the weight, that a call reads less.
    """

    def __init__(self, label: str, format: str, policy: str):
        self.label, self.format, self.policy = label, format, policy
        self.events = EventCounter(len(EVENTS))
        self.storage, self.index = None, 0
        self.run = None
        self.touched = self.dropped = self.failed = False
        self._seen, self._version, self._checksum = lambda: None, None, None

    def __getstate__(self):
        return self.__dict__ | {"_seen": None}

    def __setstate__(self, state):
        self.__dict__.update(state | {"_seen": lambda: None})

    def is_fresh(self, weight) -> bool:
        """Whether nothing speaks for a weight that was written to or exchanged since it was quantised."""
        return weight is self._seen() and not self.touched and _version(weight) == self._version

    def prepare(self, module) -> bool:
        """Have the 8-bit weight be that of the 16-bit one; whether there is one. Syncs where it looks at numbers."""
        if self.dropped:
            return True
        weight = module._parameters.get("weight")
        if weight is None or weight.is_meta:
            return False
        if self.is_fresh(weight):
            return not self.failed
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return self.storage.is_filled and not self.failed  # whoever captures has run it before
        with torch.no_grad(), torch.inference_mode(False):
            known = checksum(weight)
            if known != self._checksum or not self.storage.is_filled:
                self._quantize(module, weight)
        self._look(weight, known)
        return not self.failed

    def _look(self, weight, known) -> None:
        self._seen, self._version, self._checksum = weakref.ref(weight), _version(weight), known
        self.touched = False

    def _quantize(self, module, weight) -> None:
        together = self.storage.modules
        if not self.storage.is_filled and not all(is_ready_for(other, weight.device) for other in together):
            self.leave_storage(module)
        self.failed = False
        try:
            if self.storage.is_filled:
                self.storage.write(self.index, self.format)
            else:
                self.storage.fill(self.format)
                for other in together:
                    state, own = other._sage_linear, other._parameters["weight"]
                    if state is not self and state.storage is self.storage:
                        state._look(own, checksum(own))
        except ValueError as error:
            if len(together) > 1:  # which of them is it?
                self.leave_storage(module)
                return self._quantize(module, weight)
            self.failed = True
            logger.warning("linear layer %s stays in 16 bit: %s", self.label, error)
        return None

    def leave_storage(self, module) -> None:
        """All of the modules that share a matrix get one of their own."""
        shared = self.storage
        parts = [shared.rows_of(i, i) if shared.is_filled else None for i in range(len(shared.modules))]
        if len(shared.modules) == 1:
            return
        kept = [None if part is None else [x.clone() for x in part] for part in parts]
        shared.clear()
        for other, part in zip(shared.modules, kept, strict=True):
            state = other._sage_linear
            state.storage, state.index, state.run = Storage([other]), 0, None
            if part is not None:
                state.storage.take([part])

    def stay_exact(self, reason: str) -> None:
        """Count a call in 16 bit; raise under policy="strict"."""
        if self.policy == "strict" and reason not in CHOSEN:
            raise UnsupportedLinearError(self.label, reason, REMEDIES.get(reason, ""))
        self.events.add(_EVENT.get(reason, _EVENT["other"]))
        if not torch.compiler.is_compiling() and reason not in CHOSEN and (self.label, reason) not in _logged:
            first = all(seen != reason for _, seen in _logged)
            _logged.add((self.label, reason))
            remedy = f"; {REMEDIES[reason]}" if reason in REMEDIES else ""
            level = logging.WARNING if first else logging.DEBUG
            logger.log(level, "linear layer %s runs in 16 bit (reason: %s%s)", self.label, reason, remedy)


def _version(weight) -> int:
    return -1 if weight.is_inference() else weight._version
