"""What a swapped linear layer knows: its format, its 8-bit weight, and whether the 16-bit one was written to since."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import torch
from torch import nn

from sage_kernels import QuantizedRows, quantize_weight
from sage_kernels.compat import SEES_DISPATCH, are_ordinary, is_traced

from ...inference_mode import counts_writes
from ...patching.owner import Owner
from ...reporting.event_counter import EventCounter
from ...unsupported import UnsupportedLinearError
from ..compiled.compiled_parts import has_compiled_parts
from .captured import is_captured
from .layers import WEIGHT_ONLY
from .replays import Replays
from .samples import sample_of
from .storage import Storage


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
    "short",
    "patched",
    "other",
)
_EVENT = {name: i for i, name in enumerate(EVENTS)}
SHORT = _EVENT["short"]
CHOSEN = ("empty", "short")  # nothing is lost by these
# Multiply-adds of a call on a GPU below which the 16-bit layer is called: what 8 bit saves there on the GPU is less
# than what they take on the host (SDXL: kernels/NOTES.md). Not while a CUDA graph is captured, which has no host.
LEAST_WORK = 2**35
REMEDIES = {
    "training": "the module is in training mode: call model.eval()",
    "gradient": "8-bit linear layers have no backward: call the model under torch.no_grad()",
    "dtype": "float16, bfloat16 and float32 only: cast the model",
    "autocast": "autocast to float16 or bfloat16 only",
    "weight": "its weight holds NaN or inf",
    "patched": "torch.nn.Linear.forward or F.linear was replaced: it runs in 8 bit with torch's own again",
    "short": "too little work for 8 bit to pay: Linears(min_features=1024) runs it in 8 bit all the same",
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What diffusers' casting by layer keeps weights in between calls, which 16 bit hold exactly
AT_REST = (torch.float8_e4m3fn, torch.float8_e5m2)

_logged: set[tuple[str, str]] = set()


def checksum(weight: torch.Tensor) -> tuple[int, int]:
    """Two numbers that change with any of the weight's bits, and with their places. Syncs."""
    size = weight.element_size()
    bits = weight.detach().contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size])
    rows, columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    place = torch.arange(1, max(bits.shape) + 1, device=weight.device)
    found = torch.stack([(rows * place[: len(rows)]).sum(), (columns * place[: len(columns)]).sum()])
    return tuple(found.tolist())


def in_16_bit(x: torch.Tensor) -> torch.Tensor:
    """What casting by layer makes of a parameter at rest; any other one as it is."""
    return x.to(torch.bfloat16) if x.dtype in AT_REST else x


def is_timed(device: torch.device) -> bool:
    """Whether anybody cares how long a call takes there. On a CPU everything runs in 8 bit, to look at numbers."""
    return device.type != "cpu"


NOT_COPIED = ("lock", "replays")


class Shared:
    """What the linear layers of one model have in common.

    Attributes: least_work: multiply-adds of a call on a GPU that is worth 8 bit. was_called: a layer was, from Python,
        since the last forward of the model began. had_work: one was that did not find its call short. all_short: no
        call of this forward has work for 8 bit (short_forwards.py). is_taken_in: code around the model was compiled
        with it, and runs no hook. forwards: of the model, so far. lock: held while a
        weight in 8 bit is made, laid out anew or taken for a call: forwards of several threads may do so at once.
        Nobody takes a lock of attention's meanwhile. replays: of CUDA graphs of the whole model. owner: of the swap
        that will take its layers out; one who is not there in a copy.
    """

    def __init__(self, least_work: int = 0, model: nn.Module | None = None, owner: Owner | None = None):
        self.owner = owner
        self.least_work, self._model = least_work, _nothing if model is None else weakref.ref(model)
        self.was_called = self.had_work = self.all_short = self.is_taken_in = False
        self.forwards = 0
        self.lock = threading.RLock()
        self.replays = Replays()

    def __getstate__(self) -> dict[str, Any]:  # the layers of a copy learn whose they are when its forward begins
        kept = {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}
        return kept | {"_model": _nothing, "all_short": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"lock": threading.RLock(), "replays": Replays()}

    def look_anew(self, copied: nn.Module | None = None) -> None:
        """A forward of the model, or of its copy, begins."""
        if copied is not None and self._model() is not copied:
            self._model = weakref.ref(copied)
        model = self._model()  # a layer alone is a part of what calls it
        if model is not None and "_sage_linear" not in model.__dict__:
            self.replays.begin(_device_of(model), is_captured())
        self.forwards += 1

    @property
    def has_compiled_parts(self) -> bool:
        """True if a part of the model is compiled by itself: calls of its layers are not made from Python."""
        model = self._model()
        return model is not None and has_compiled_parts(model)


class LinearState:
    """Of one swapped linear layer.

    Attributes:
        label: its name in the report. format: "int8", "fp8" or layers.WEIGHT_ONLY.
        on_unsupported: "fallback" or "raise".
        shared: Shared.
        events: EventCounter of EVENTS.
        storage, index: where its 8-bit weight is.
        bias: the bias [N] as the latest call found it, or None: offloading takes the module's own away, and casting
            by layer casts it, before a result that waits is computed.
        run: qkv.Run, where it is multiplied together with others of the same input; None alone.
        balance: balance.Balance of its input's channels, shared with layers that read the same; None where there is
            nothing to balance. is_balanced: that was decided.
        neighbours: balance.Neighbours, which decide; None in a copy.
        version: how often its 8-bit weight was made.
        touched: the 16-bit weight was handed out since it was last compared, or gradients were wanted, and it may have
            been written to in ways that no counter of PyTorch's tells: through `.data`, or by a fused optimizer.
            bias_touched: the bias was.
        dropped: the 16-bit weight is gone.
        failed: its weight can't be quantised.
        short_below: calls with so many numbers or more are worth 8 bit; 0: all are.
        is_short_compiled: a compiled call was short.
        is_resting: it runs in 16 bit for now, and nobody counts that: what others do is measured.
        probe: probe.LinearProbe that compares it with the 16-bit layer, or None.
    """

    def __init__(self, label: str, format: str, on_unsupported: str, shared: Shared):
        self.label, self.format, self.on_unsupported, self.shared = label, format, on_unsupported, shared
        self.events = EventCounter(len(EVENTS))
        self.storage: Any = None
        self.index = 0
        self.bias: Any = None
        self.run: Any = None
        self.balance: Any = None
        self.neighbours: Any = None
        self.probe: Any = None
        self.short_below, self.is_short_compiled = 0, False
        self.is_resting = False
        self.is_balanced = False
        self.version = 0
        self.touched = self.bias_touched = self.dropped = self.failed = False
        self._weight: Any = _nothing
        self._weight_version: int | None = None
        self._checksum: tuple | None = None
        self.sample: torch.Tensor | None = None  # of the weight, when it was last compared
        self._bias: Any = _nothing
        self._bias_version: int | None = None

    def __getstate__(self):  # weak references are no state
        return self.__dict__ | {"_weight": _nothing, "_bias": _nothing, "neighbours": None, "probe": None}

    @property
    def is_weight_only(self) -> bool:
        """Whether its activation stays as it is."""
        return self.format == WEIGHT_ONLY

    @property
    def is_filled(self) -> bool:
        """Whether the 8-bit weight is there."""
        return self.storage.filled[self.index]

    def is_fresh(self, weight) -> bool:
        """True if nothing speaks for a weight that was written to or exchanged since it was quantised."""
        return not self.touched and _is_same(weight, self._weight, self._weight_version)

    def samples(self, module) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers of the weight as they are, and as they were when it was compared; None where something else tells
        whether it was written to."""
        weight = module._parameters.get("weight")
        if self.sample is None or self.dropped or self.failed or weight is None or not self.is_fresh(weight):
            return None
        return None if weight.is_meta else (sample_of(weight), self.sample)

    def _is_another(self, weight) -> bool:
        return weight is not self._weight() or _version(weight) != self._weight_version

    def is_ready(self, module, device: torch.device) -> bool:
        """Whether a call there needs nothing made first."""
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        at_hand = self.is_filled and not self.failed and self.storage.device == device
        is_balanced = self.balance is None or self.balance.vector.device == device
        has_bias = bias is None or (self._has_same_bias(bias) and not self.bias_touched)
        return at_hand and is_balanced and has_bias and (self.dropped or self.is_fresh(weight))

    def prepare(self, module) -> bool:
        """Have the 8-bit weight be that of the 16-bit one; whether there is one. Syncs where it looks at numbers."""
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        is_fresh = weight is not None and self.is_fresh(weight)
        if is_fresh and bias is self.bias is None:
            return not self.failed
        has_same_bias = bias is not None and self._has_same_bias(bias)
        if is_fresh and has_same_bias and not self.bias_touched:
            return not self.failed
        if _is_wrapped(weight, self._weight) or _is_wrapped(bias, self._bias):
            return False
        if not (self.dropped or is_fresh):
            if weight is None:
                return False
            if weight.is_meta or weight.dtype not in (*DTYPES, *AT_REST):  # offloaded
                return self.is_filled and not self.failed
            if weight.shape != (module.out_features, module.in_features):
                return False
            if _is_recorded(weight.device):  # whoever records has run it before, and only looked at it since
                if not self.is_filled or self._is_another(weight):
                    return False
            else:
                if self.neighbours is not None and not self.is_balanced:
                    self.neighbours.decide(module)
                self._compare(weight)
        if bias is None:
            self.bias = None
        elif _is_recorded(bias.device):
            if not has_same_bias:
                return False
        elif self.bias_touched or not has_same_bias:
            self._take_bias(bias)
        return not self.failed

    def _has_same_bias(self, bias) -> bool:
        return _is_same(bias, self._bias, self._bias_version) and self.bias.device == bias.device

    def _take_bias(self, bias) -> None:
        if bias.is_meta or bias.dtype not in (*DTYPES, *AT_REST):
            return
        self._bias = _nothing
        counts_writes(bias)
        with torch.inference_mode(False), torch.no_grad():
            self.bias = self.storage.renewed(self.bias, in_16_bit(bias.detach()).clone())
        self._bias, self._bias_version, self.bias_touched = weakref.ref(bias), _version(bias), False

    def _compare(self, weight) -> None:
        self._weight = _nothing  # a weak reference would keep it from getting a counter of writes
        counts_writes(weight)
        with torch.inference_mode(False), torch.no_grad():
            is_slow = weight.device.type == "cpu" and weight.numel() >= 2**20 and torch.cuda.is_available()
            near = weight.detach().cuda() if is_slow else weight  # on a CPU a model takes minutes
            known = checksum(near)
            if known != self._checksum or not (self.is_filled or self.failed):
                self._quantize(near, weight.device)
            self.sample = sample_of(weight).clone()
        self._weight, self._weight_version, self._checksum = weakref.ref(weight), _version(weight), known
        self.touched = False

    def let_go(self) -> None:
        """Have no weak references to the weight and the bias: PyTorch exchanges no tensors that have any."""
        self._weight = self._bias = _nothing

    def may_be_trained(self, module) -> None:
        """Gradients were wanted: an optimizer's step may follow, which need not count its writes."""
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        self.touched = self.touched or (weight is not None and weight.requires_grad)
        self.bias_touched = self.bias_touched or (bias is not None and bias.requires_grad)

    def _quantize(self, weight, device) -> None:
        self.keep(self.rows_from(weight, None if self.balance is None else self.balance.vector), device)

    def rows_from(self, weight, balance) -> QuantizedRows | None:
        """What the weight is in 8 bit, with its columns divided by `balance`; None where it can't be."""
        try:
            balance = None if balance is None else balance.to(weight.device)
            format = "int8" if self.is_weight_only else self.format
            return quantize_weight(in_16_bit(weight), format=format, balance=balance)
        except ValueError as error:
            logger.warning("linear layer %s stays in 16 bit: %s", self.label, error)
            return None

    def keep(self, rows: QuantizedRows | None, device) -> None:
        """Take what `rows_from` gave."""
        self.version += 1
        self.failed = rows is None
        if rows is not None:
            self.storage.write(self.index, QuantizedRows(*(part.to(device) for part in rows)))

    def find_short(self) -> None:
        """Find `short_below` anew: the layer has others beside it now, or no longer, or was dropped.

        Of what is named side by side all columns count, whether it turns out to have one input or not: the first call
        would be in 8 bit and later ones in 16.
        """
        storage = self.storage
        columns = storage.starts[-1] if storage.is_joined else storage.modules[self.index].out_features
        has_16_bit = not (self.dropped or self.is_weight_only)
        self.short_below = -(-self.shared.least_work // columns) if has_16_bit else 0

    def leave_storage(self) -> None:
        """All of the modules that share a matrix get one of their own."""
        shared = self.storage
        if len(shared.modules) == 1:
            return
        ready = enumerate(shared.filled)
        kept = [[part.clone() for part in shared.rows_of(i, i)] if filled else None for i, filled in ready]
        shared.clear()
        for other, part in zip(shared.modules, kept, strict=True):
            state = other._sage_linear
            state.storage, state.index, state.run = Storage([other]), 0, None
            state.find_short()
            if part is not None:
                state.storage.write(0, QuantizedRows(*part))

    def stay_exact(self, reason: str) -> None:
        """Count a call in 16 bit; or raise with on_unsupported="raise"."""
        if self.on_unsupported == "raise" and reason not in CHOSEN:
            raise UnsupportedLinearError(self.label, reason, REMEDIES.get(reason, ""))
        self.events.add(_EVENT.get(reason, _EVENT["other"]))
        if reason not in CHOSEN and not torch.compiler.is_compiling() and (self.label, reason) not in _logged:
            first = all(seen != reason for _, seen in _logged)
            _logged.add((self.label, reason))
            remedy = f"; {REMEDIES[reason]}" if reason in REMEDIES else ""
            level = logging.WARNING if first else logging.DEBUG
            logger.log(level, "linear layer %s runs in 16 bit (reason: %s%s)", self.label, reason, remedy)


def _device_of(model: Any) -> torch.device:
    """Where the model runs, if one GPU holds it; parameters that are offloaded may be nowhere."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def _is_recorded(device: torch.device) -> bool:
    """True while a CUDA graph is captured, or torch.jit.trace records operations: with the weights as they are."""
    return is_traced() or is_captured(device)


def _nothing():
    """A weak reference to nothing."""


def _is_wrapped(parameter, known) -> bool:
    """Whether it is another one than `known` refers to, of a transform of torch.func: nobody may keep its numbers."""
    if parameter is None or parameter is known() or parameter.is_meta:
        return False
    return SEES_DISPATCH and not are_ordinary((parameter,))


def _is_same(parameter, known, version: int | None) -> bool:
    """True if a parameter is the object that `known` refers to, and nothing speaks for a write since that version.

    An optimizer may write to one with a gradient before the next call.
    """
    return (
        parameter is known()
        and not parameter.is_inference()
        and parameter._version == version
        and not (parameter.requires_grad and parameter.grad is not None)
    )


def _version(weight) -> int:
    try:
        return weight._version
    except RuntimeError:  # an inference tensor has none
        return -1
