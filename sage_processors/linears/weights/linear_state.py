"""State of a swapped linear layer: its format, its 8-bit weight, and changes of the 16-bit weight."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import torch
from torch import nn

from sage_kernels import QuantizedRows, quantize_weight
from sage_kernels.compat import SEES_DISPATCH, are_ordinary, is_traced
from sage_kernels.facts.few_rows import WEIGHT_ONLY

from ...patching.patched import Owner
from ...reporting.event_counter import EventCounter
from ...reporting.fallbacks import Fallbacks
from ...torch_modes import counts_writes
from ...unsupported import UnsupportedLinearError
from .fingerprints import WeightCheck, checksum, sample_of
from .replays import Replays
from .room import Room
from .storage import Storage, is_captured


logger = logging.getLogger("sage_processors")

CALLED = "called"
# Slots of a layer's counter: calls in 8 bit, calls of few rows in 16 bit with the 8-bit weight, then reasons for calls
# with the 16-bit weight.
EVENTS = (
    CALLED, "few rows", "training", "gradient", "autocast", "dtype", "rank", "empty", "subclass", "device", "weight",
    "memory", "short", "gated", "rows", "patched", "other",
)  # fmt: skip
SHORT, FEW_ROWS = EVENTS.index("short"), EVENTS.index("few rows")
CHOSEN = ("empty", "short", "gated", "rows")  # reasons that are on purpose: neither logged nor an error
# Calls on a GPU with fewer multiply-adds run in 16 bit: 8 bit would save less time on the GPU than it takes on the
# host (SDXL: kernels/NOTES.md). Calls that a CUDA graph captures take no time on the host and are not short.
LEAST_WORK = 2**35
REMEDIES = {
    "training": "the module is in training mode: call model.eval()",
    "gradient": "8-bit linear layers have no backward: call the model under torch.no_grad()",
    "dtype": "float16, bfloat16 and float32 only: cast the model",
    "autocast": "autocast to float16 or bfloat16 only",
    "weight": "its weight holds NaN or inf",
    "memory": 'the GPU has no room for its 8-bit weight beside the 16-bit one: preset "small" drops the latter',
    "patched": "torch.nn.Linear.forward or F.linear was replaced: it runs in 8 bit with torch's own again",
    "gated": "behind a gated activation 8 bit is not exact enough for prompts; a rule in layers runs it in 8 bit",
    "rows": "so many rows are multiplied by the dequantised weight: the kernel for few is slower then",
    "short": "too little work for 8 bit to pay: Linears(min_features=1024) runs it in 8 bit all the same",
}
_fallbacks = Fallbacks(EVENTS, "linear layer %s runs in 16 bit (reason: %s%s)", REMEDIES)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Dtypes in which diffusers' layerwise casting stores weights between calls. bf16 holds their numbers exactly.
AT_REST = (torch.float8_e4m3fn, torch.float8_e5m2)


def in_16_bit(x: torch.Tensor) -> torch.Tensor:
    """Return a parameter that layerwise casting stores in FP8 as bf16; any other one as it is."""
    return x.to(torch.bfloat16) if x.dtype in AT_REST else x


def is_timed(device: torch.device) -> bool:
    """Return True if speed matters on a device. A CPU runs short calls in 8 bit too, to check numbers."""
    return device.type != "cpu"


NOT_COPIED = ("lock", "replays", "check")


class Shared:
    """State that all swapped linear layers of one model share.

    A call is short if it has too little work for 8 bit to pay.

    Attributes:
        least_work: calls on a GPU with fewer multiply-adds are short.
        was_called: a layer was called from Python since the latest forward of the model began.
        is_taken_in: the model was compiled as a part of code around it, in which its hooks do not run.
        forwards: number of forwards of the model so far.
        lock: held while an 8-bit weight is made, put into another order or read by a call, as several threads may
            run forwards. No lock of attention is taken meanwhile.
        replays: Replays, of CUDA graphs of the whole model. check: WeightCheck.
        room: Room for 8-bit weights beside the 16-bit ones; None: they take their place.
        owner: Owner of the swap that will undo this; in a copy, one that is gone.
        saving: what state_dict has for a dropped weight: "codes", a "placeholder", or it is "refused".
    """

    def __init__(self, least_work: int = 0, model: nn.Module | None = None, owner: Owner | None = None):
        self.owner, self.saving = owner, "refused"
        self.least_work, self._model = least_work, _nothing if model is None else weakref.ref(model)
        self.was_called = self.is_taken_in = False
        self.forwards = 0
        self.lock = threading.RLock()
        self.replays, self.check = Replays(), WeightCheck()
        self.room: Room | None = None

    def __getstate__(self) -> dict[str, Any]:  # a copy's layers learn their model when its first forward begins
        kept = {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}
        return kept | {"_model": _nothing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"lock": threading.RLock(), "replays": Replays(), "check": WeightCheck()}

    def begin_forward(self, copied: nn.Module | None = None) -> None:
        """Note that a forward of the model begins. copied: the model, if it is a copy of a swapped one."""
        if copied is not None and self._model() is not copied:
            self._model = weakref.ref(copied)
        model = self._model()  # a layer that was swapped alone is a part of what calls it
        if model is not None and linear_state(model) is None:
            self.replays.begin(_device_of(model), is_captured())
        self.forwards += 1


class LinearState:
    """State of one swapped linear layer.

    Attributes:
        label: its name in the report. format: "int8", "fp8" or WEIGHT_ONLY.
        is_weight_only: only the weight is in 8 bit, and the activation in 16.
        on_unsupported: "fallback" or "raise".
        shared: Shared.
        events: EventCounter of EVENTS.
        storage, index: Storage of its 8-bit weight, and its place in there.
        bias: copy of the bias [N] at the latest call, or None. Offloading removes the module's own bias, or layerwise
            casting casts it, before a postponed result is computed.
        run: qkv.Run of the layers that are multiplied together with this one; None if it is alone.
        balance: balance.Balance of its input, shared by all layers that read this; None if it has no outliers.
        is_balanced: the balance was decided. neighbours: balance.Neighbours that decide it; None in a copy.
        version: number of times that its 8-bit weight was made.
        touched: the 16-bit weight was handed out since it was last compared, or gradients were enabled. Then it may
            have changed without a counted write: through `.data`, or by a fused optimizer. bias_touched: of the bias.
        dropped: the 16-bit weight is gone. is_gated: calls of many rows run in 16 bit until then.
        failed: its weight can't be quantised. failure: the reason, "weight" or "memory".
        short_below: calls with fewer numbers in their input are short; 0 if no call is.
        is_short_compiled: a compiled call was short.
        sums_wait: sums of a residual and its output may be postponed: False before the first one, None for never.
        is_resting: it runs in 16 bit for now, without counting that, while others are measured (calibration).
        probe: probe.LinearProbe that compares it with the 16-bit layer, or None.
    """

    def __init__(self, label: str, format: str, on_unsupported: str, shared: Shared):
        self.label, self.format, self.on_unsupported, self.shared = label, format, on_unsupported, shared
        self.is_weight_only = format == WEIGHT_ONLY
        self.events = EventCounter(len(EVENTS))
        self.storage: Any = None
        self.index = self.version = 0
        self.bias: Any = None
        self.run: Any = None
        self.balance: Any = None
        self.neighbours: Any = None
        self.probe: Any = None
        self.short_below, self.is_short_compiled = 0, False
        self.sums_wait: bool | None = False
        self.is_resting = self.is_gated = self.is_balanced = False
        self.touched = self.bias_touched = self.dropped = self.failed = False
        self.failure = "weight"
        self._weight: Any = _nothing
        self._weight_version: int | None = None
        self._checksum: tuple | None = None
        self.sample: torch.Tensor | None = None  # of the weight, when it was last compared
        self._bias: Any = _nothing
        self._bias_version: int | None = None

    def __getstate__(self):  # weak references can't be copied
        return self.__dict__ | {"_weight": _nothing, "_bias": _nothing, "neighbours": None, "probe": None}

    @property
    def is_filled(self) -> bool:
        """True if the layer has an 8-bit weight."""
        return self.storage.filled[self.index]

    def is_fresh(self, weight) -> bool:
        """Return True unless the weight may have been written to or exchanged since it was quantised."""
        return not self.touched and _is_same(weight, self._weight, self._weight_version)

    def samples(self, module) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return samples of the weight: now, and when it was last compared.

        Returns None if there is nothing to compare, or if the weight is going to be compared anyway.
        """
        weight = module._parameters.get("weight")
        if self.sample is None or self.dropped or self.failed or weight is None or not self.is_fresh(weight):
            return None
        return None if weight.is_meta else (sample_of(weight), self.sample)

    def _is_another(self, weight) -> bool:
        return weight is not self._weight() or _version(weight) != self._weight_version

    def is_ready(self, module, device: torch.device) -> bool:
        """Return True if a call on this device has nothing to make or move first: weight, balance or bias."""
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        at_hand = self.is_filled and not self.failed and self.storage.device == device
        is_balanced = self.balance is None or self.balance.vector.device == device
        has_bias = bias is None or (self._has_same_bias(bias) and not self.bias_touched)
        return at_hand and is_balanced and has_bias and (self.dropped or self.is_fresh(weight))

    def prepare(self, module) -> bool:
        """Make the 8-bit weight and the bias, unless they are up to date. Return True if the layer has them.

        Syncs if it has to read the numbers of the weight.
        """
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
            if not self.storage.fits(self.index, weight):
                return False
            if _is_recorded(weight.device):  # no numbers to compare: a weight that was only handed out is as it was
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
        self._weight = _nothing  # PyTorch can't give a tensor with weak references a counter of writes
        counts_writes(weight)
        with torch.inference_mode(False), torch.no_grad():
            is_slow = weight.device.type == "cpu" and weight.numel() >= 2**20 and torch.cuda.is_available()
            near = weight.detach().cuda() if is_slow else weight  # a whole model would take minutes on a CPU
            known = checksum(near)
            if known != self._checksum or not (self.is_filled or self.failed):
                self._quantize(near, weight.device)
            self.sample = sample_of(weight).clone()
        self._weight, self._weight_version, self._checksum = weakref.ref(weight), _version(weight), known
        self.touched = False

    def let_go(self) -> None:
        """Drop the weak references to weight and bias: PyTorch can't swap tensors that have any."""
        self._weight = self._bias = _nothing

    def may_be_trained(self, module) -> None:
        """Doubt weight and bias if they take gradients: an optimizer may write to them without counting."""
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        self.touched = self.touched or (weight is not None and weight.requires_grad)
        self.bias_touched = self.bias_touched or (bias is not None and bias.requires_grad)

    def _quantize(self, weight, device) -> None:
        self.keep(self.rows_from(weight, None if self.balance is None else self.balance.vector), device)

    def rows_from(self, weight, balance) -> QuantizedRows | None:
        """Quantise a weight [N, K] divided by balance [K]. Returns None, and logs why, if that is impossible."""
        room, self.failure = self.shared.room, "weight"
        if room is not None and self.storage.device is None and not room.has(self.storage.size, weight.device):
            self.failure = "memory"
            return None
        try:
            balance = None if balance is None else balance.to(weight.device)
            format = "int8" if self.is_weight_only else self.format
            return quantize_weight(in_16_bit(weight), format=format, balance=balance)
        except ValueError as error:
            logger.warning("linear layer %s stays in 16 bit: %s", self.label, error)
            return None

    def keep(self, rows: QuantizedRows | None, device) -> None:
        """Store the 8-bit weight that `rows_from` returned, on `device`. None: the weight can't be quantised."""
        self.version, self.failed = self.version + 1, rows is None
        if rows is not None:
            self.storage.write(self.index, QuantizedRows(*(part.to(device) for part in rows)))

    def find_short(self) -> None:
        """Compute `short_below`, which depends on joined layers and on a dropped weight.

        The columns of all joined projections count, even if they turn out to have different inputs: else the first
        call would run in 8 bit and later ones in 16.
        """
        storage = self.storage
        columns = storage.starts[-1] if storage.is_joined else storage.modules[self.index].out_features
        has_16_bit = not (self.dropped or self.is_weight_only)
        self.short_below = -(-self.shared.least_work // columns) if has_16_bit else 0

    def leave_storage(self) -> None:
        """Give each module that shares this layer's storage a storage of its own."""
        shared = self.storage
        if len(shared.modules) == 1:
            return
        ready = enumerate(shared.filled)
        kept = [[part.clone() for part in shared.rows_of(i, i)] if filled else None for i, filled in ready]
        shared.clear()
        for other, part in zip(shared.modules, kept, strict=True):
            state = other._sage
            state.storage, state.index, state.run = Storage([other]), 0, None
            state.find_short()
            if part is not None:
                state.storage.write(0, QuantizedRows(*part))

    def count_in_16_bit(self, reason: str) -> None:
        """Count a call in 16 bit; raise instead with on_unsupported="raise"."""
        if self.on_unsupported == "raise" and reason not in CHOSEN:
            raise UnsupportedLinearError(self.label, reason, REMEDIES.get(reason, ""))
        self.events.add(_fallbacks.slot(reason))
        if reason not in CHOSEN and not torch.compiler.is_compiling():
            _fallbacks.log(self.label, reason)


def _device_of(model: Any) -> torch.device:
    """Return the device of the model's first parameter that is not on the meta device, else the CPU."""
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def _is_recorded(device: torch.device) -> bool:
    """Return True while a CUDA graph or torch.jit.trace records operations on the weights as they are."""
    return is_traced() or is_captured(device)


def _nothing():
    """Stands for a weak reference to an object that is gone."""


def _is_wrapped(parameter, known) -> bool:
    """Return True for a parameter that a transform of torch.func wraps. Its numbers must not be kept.

    known: weak reference to the parameter that was seen last, which is none.
    """
    if parameter is None or parameter is known() or parameter.is_meta:
        return False
    return SEES_DISPATCH and not are_ordinary((parameter,))


def _is_same(parameter, known, version: int | None) -> bool:
    """Return True if a parameter is the one that `known` refers to, unchanged since `version`.

    One with a gradient may have changed: an optimizer may write to it. One that became an inference tensor keeps its
    count of writes, whatever is written.
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


def linear_state(module: Any) -> LinearState | None:
    """Return the LinearState that a swapped linear layer has as `_sage`; None for every other module."""
    state = module.__dict__.get("_sage")
    return state if isinstance(state, LinearState) else None
