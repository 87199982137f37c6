"""Classes of swapped linear layers and norms: the same objects, with another forward."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sage_kernels import QuantizedRows
from sage_kernels.compat import is_any_autocast, is_differentiating_forward

from ..patching.derived import Derived, derived
from ..postponed.casts import PostponedCast
from ..postponed.joins import JoinedParts
from ..postponed.region import in_thread, is_caller_known
from ..postponed.tensor import CAN_WAIT, Postponed, is_dual, ordinary_in, version_of
from ..torch_modes import is_autocast
from .balance import vector_of
from .postponed.activations import quantized
from .postponed.columns import PostponedColumns
from .postponed.linear import PostponedLinear, product
from .postponed.norm import PostponedNorm
from .weights.few_rows import has_many_rows, in_16_bit_rows, is_few, pays_eagerly, stays_in_16_bit
from .weights.linear_state import AT_REST, CALLED, DTYPES, EVENTS, FEW_ROWS, SHORT, LinearState, is_timed
from .weights.storage import CODES, SCALE, as_saved, in_place, is_captured


_DEVICES = ("cpu", "cuda")
_PEFT_READERS = ("forward", "dequantize_module_weight")  # functions of peft that read a base layer's numbers
_ORDINARY = (torch.Tensor, nn.Parameter)
_READY = (PostponedNorm, PostponedColumns)  # postponed results that quantise themselves
_STORED = (PostponedCast, JoinedParts)  # those whose numbers a norm reads where they are
_CALLED = EVENTS.index(CALLED)


def _torchs(forward: Any) -> bool:
    return getattr(forward, "__globals__", None) is vars(torch.nn.modules.linear)


def _linear() -> Any:
    return F.linear if isinstance(F.linear, types.BuiltinFunctionType) else None


# None if it was replaced before this import: then `is_replaced` decides at each call, also once that is undone
FORWARD = nn.Linear.forward if _torchs(nn.Linear.forward) else None
LINEAR = _linear()


def is_replaced(base: Any) -> bool:
    """Return True if a linear layer of this class no longer runs torch's own functions."""
    return not _torchs(base.forward) or _linear() is None


def call_replaced(base: Any, module: nn.Module, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Call the replaced forward of a layer on a copy of it with another weight."""
    twin = object.__new__(base)
    parameters = module._parameters | {"weight": nn.Parameter(weight, requires_grad=False)}
    twin.__dict__.update(module.__dict__, _parameters=parameters)
    made: torch.Tensor = base.forward(twin, x)
    return made


def _reason_against(module, state: LinearState, x, weight, autocast: torch.dtype | None) -> str | None:
    """Return the reason why this call can't run in 8 bit, or None. Reads no numbers.

    autocast: as `_autocast` returns it.
    """
    if weight is None or "bias" not in module._parameters:  # pruning and parametrizations change that
        return "other"
    if module.training:
        return "training"
    dtype, shape = x.dtype, x.shape
    if dtype not in DTYPES:
        return "dtype"
    if not 2 <= len(shape) <= 4 or shape[-1] != module.in_features:
        return "rank"
    if 0 in shape:
        return "empty"
    if state.is_gated and stays_in_16_bit(state, x):
        return "gated"
    if torch.is_grad_enabled():
        bias = module._parameters.get("bias")
        if x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad):
            return "gradient"
    if is_differentiating_forward() and (is_dual(x) or is_dual(weight)):
        return "gradient"
    if has_many_rows(state, x):
        return "rows"
    device = x.device
    if weight.device != device or device.type not in _DEVICES:
        return "device"
    if autocast is not None:
        return None if autocast in DTYPES else "autocast"
    if weight.dtype in AT_REST and state.is_filled:
        return None  # another thread's call has put it to rest
    return None if dtype == weight.dtype else "dtype"


def _autocast(x) -> torch.dtype | None:
    """Return the dtype of autocast on the device of x, or None if it is off."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x.device) else None


def _in_16_bit(module, base, x):
    """Run a layer in 16 bit: its own forward, or with the dequantised weight if its own was dropped."""
    state = module._sage
    if not state.dropped:
        parameters = module._parameters
        if base.forward is FORWARD and parameters.get("weight") is not None and "bias" in parameters:
            # not by the property `weight` below, which takes its caller for somebody who may write to the weight
            return F.linear(x, parameters["weight"], parameters["bias"])
        return base.forward(module, x)
    with state.shared.lock:
        balance = None if state.balance is None else state.balance.vector
        weight = state.storage.dequantized(state.index, x.dtype, balance)
    if base.forward is not FORWARD:
        return call_replaced(base, module, weight, x)
    return F.linear(x, weight, module._parameters.get("bias"))


def _in_8_bit(module, base, x):
    """Run a swapped linear layer in eager code: x [..., K] -> [..., N], both ordinary or postponed."""
    state = module._sage
    shared = state.shared
    shared.was_called = True
    if shared.check.is_wanted:  # called by hand, before the run's first forward
        shared.check.make()
    is_postponed = type(x) in _READY and not x._is_out
    if not is_postponed and type(x) not in _ORDINARY:
        x = ordinary_in(x)
        if type(x) not in _ORDINARY:
            state.count_in_16_bit("subclass")
            return _in_16_bit(module, base, x)
    if state.is_resting:
        return _in_16_bit(module, base, ordinary_in(x))
    if x.numel() < state.short_below and is_timed(x.device):
        if not ((is_captured(x.device) and state.is_ready(module, x.device)) or pays_eagerly(state, x)):
            if is_postponed:
                x = x.tensor_for_16_bit() if type(x) is PostponedNorm else x.tensor()
            state.events.add(SHORT)
            return _in_16_bit(module, base, x)
    autocast = _autocast(x) if is_any_autocast() else None
    weight = module._parameters.get("weight")
    reason = _reason_against(module, state, x, weight, autocast)
    if reason is None:
        with shared.lock:
            if state.prepare(module):
                return _multiplied(module, state, x, is_postponed, autocast or x.dtype)
            reason = state.failure if state.failed else "other"
    if reason in ("training", "gradient"):
        state.may_be_trained(module)
    state.count_in_16_bit(reason)
    return _in_16_bit(module, base, ordinary_in(x))


def _multiplied(module, state: LinearState, x, is_postponed: bool, dtype: torch.dtype):
    """Run a call in 8 bit with a weight that is ready. Under the lock: no thread changes it meanwhile."""
    region, storage, device = in_thread.region, state.storage, x.device
    if storage.device != device:
        storage.move_to(device)
    captured = is_captured(device)
    storage.is_fixed = storage.is_fixed or captured
    balance = None if state.balance is None or state.is_weight_only else vector_of(state, device)
    few = is_few(state, x, dtype)
    state.events.add_uncompiled(FEW_ROWS if few and not state.is_weight_only else _CALLED, captured)
    rows: QuantizedRows | torch.Tensor
    if few:
        is_norm = type(x) is PostponedNorm
        factors = None if balance is None else state.balance.for_rows(dtype)
        rows = x.rows_in_16_bit(dtype, state.balance) if is_norm else in_16_bit_rows(ordinary_in(x), dtype, factors)
    else:
        rows = x.rows(state.format, balance) if is_postponed else quantized(x, state.format, balance, region)
    if not few and state.probe is not None and state.probe.shared.on:
        state.probe.compare(module, x, rows)
    if state.run is not None and region is not None:
        version = 0 if is_postponed else version_of(x)
        y = None if version is None else state.run.output(state.index, x, version, rows, dtype, region)
        if y is not None:
            return y
    # joined projections are ordinary tensors in some calls, so they are never postponed: rounding stays the same. Nor
    # are products of 16-bit rows that somebody may write to before the result is used, so all but those of a norm
    is_ours = not few or (type(x) is PostponedNorm and not x._is_out)
    if not is_ours or storage.is_joined or not CAN_WAIT or not is_caller_known(3):
        return product(module, rows, state.bias, dtype=dtype)
    shape = torch.Size((*x.shape[:-1], module.out_features))
    return PostponedLinear(shape, dtype, device, module, rows)


def _compiled(module, base, x):
    """Run a swapped linear layer in compiled code, by registered ops. The compiler does all the rest."""
    state = module._sage
    autocast = _autocast(x)
    few = is_few(state, x, autocast or x.dtype)
    if not few and x.numel() < state.short_below and is_timed(x.device):
        state.is_short_compiled = True
        return _in_16_bit(module, base, x)
    storage = state.storage
    weight = module._parameters.get("weight")
    reason = _reason_against(module, state, x, weight, autocast)
    if reason is None and weight.shape != (module.out_features, module.in_features):
        reason = "other"
    home = storage.modules[0]._buffers
    codes = home.get(CODES)
    balance = None if state.balance is None else state.balance.vector
    if reason is None and (codes is None or state.failed or codes.device != x.device or not state.is_filled):
        reason = state.failure
    if reason is None and balance is not None and balance.device != x.device:
        reason = "weight"
    if reason is not None:
        state.count_in_16_bit(reason)
        return _in_16_bit(module, base, x)
    ops = torch.ops.sage_kernels
    dtype = autocast or x.dtype
    codes, scale = storage.rows_of(state.index, state.index)
    bias = module._parameters.get("bias")
    alone_in_turns = storage.in_turns and len(storage.modules) == 1
    finish = (None if alone_in_turns else bias, "none", None, None, dtype)
    if few:
        rows = in_16_bit_rows(x, dtype, None if state.is_weight_only else balance)
        y = ops.weight_only_linear(rows, codes, scale, *finish, False)
    else:
        rows = ops.quantize_activation(x, state.format, "none", None, None, 1e-6, None, None, balance, None)
        if state.probe is not None and state.probe.shared.on:
            state.probe.compare(module, x, QuantizedRows(*rows))
        y = ops.quantized_linear(*rows, codes, scale, *finish)
    if not alone_in_turns:
        return y
    y = storage.turned_back(y)
    return y if bias is None else y + bias.to(dtype)


def _refuse_numbers(state: LinearState, reader: types.CodeType) -> None:
    """Raise a RuntimeError if an adapter of peft is about to compute with a dropped weight.

    The weight that stands in its place has no numbers. Others read its dtype, device or shape, as peft's plain LoRA
    does. reader: the code that reads it.
    """
    if f"{os.sep}peft{os.sep}" in reader.co_filename and reader.co_name in _PEFT_READERS:
        raise RuntimeError(
            f"weight of {state.label}: got an adapter that computes with it, such as DoRA, HRA or PiSSA, expected "
            "plain LoRA: this layer's 16-bit weight was dropped, or never loaded; give the model its adapter in 16 bit"
        )


def _handed_out(name: str, mark: str) -> property:
    """Return the property for a 16-bit parameter; reading it sets `mark`, as the reader may write to it."""

    def read(self):
        if not torch.compiler.is_compiling():
            if self._sage.dropped and name == "weight":
                _refuse_numbers(self._sage, sys._getframe(1).f_code)
            setattr(self._sage, mark, True)
        return _attribute(self, name)

    def write(self, value):
        self.__dict__[name] = value  # never a parameter: nn.Module registers these itself

    return property(read, write, lambda self: self.__dict__.pop(name))


class _SwappedLinear(Derived):
    """Mixin of the classes of swapped linear layers.

    Its attributes beside weight and bias start with _sage.
    """

    _sage: LinearState

    weight = _handed_out("weight", "touched")
    bias = _handed_out("bias", "bias_touched")

    def _apply(self, fn, recurse=True):
        """Apply `fn` to all tensors, but only move those in 8 bit and never cast them.

        `to(dtype)` is meant for the 16-bit weight. Under the lock, without removing the buffers in between: layerwise
        casting does this in each call, and another thread's call may be running.
        """
        state = self.__dict__["_sage"]
        if torch.__future__.get_swap_module_params_on_conversion():
            state.let_go()

        def applied(x):
            if x is dropped:
                return fn(x.detach()[:1, :1].clone()).expand(x.shape)
            if not any(x is buffer for buffer in own):
                return fn(x)
            device = fn(torch.empty(0, dtype=torch.float32, device=x.device)).device
            if device.type == "meta" or device == x.device:
                return x
            vector_of(state, device)
            return in_place(x.to(device))

        with state.shared.lock:
            own = [self._buffers[name] for name in (CODES, SCALE) if name in self._buffers]
            dropped: Any = self._parameters["weight"] if state.dropped else None
            return super()._apply(applied, recurse)

    def _load_from_state_dict(self, *args, **kwargs):
        state = self.__dict__["_sage"]
        with state.shared.lock:
            if torch.__future__.get_swap_module_params_on_conversion():
                state.let_go()
            super()._load_from_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        state = self._sage
        if state.dropped and state.shared.saving == "refused":
            raise RuntimeError(
                f"weight of {state.label}: got a model whose 16-bit weights were dropped (drop_weights=True), "
                "expected one that still has them; load the model with "
                "quantization_config=sage_processors.SageConfig(), whose save_pretrained writes the 8-bit ones"
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if state.dropped and state.shared.saving == "codes":
            rows = state.storage.plain_rows(state.index, copies=False)
            destination |= {f"{prefix}{name}": tensor for name, tensor in as_saved(rows, state.balance).items()}


def _attribute(module, name):
    for place in (module.__dict__.get("_parameters", {}), module.__dict__, module.__dict__.get("_buffers", {})):
        if name in place:
            return place[name]
    raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")


@functools.cache
def linear_class(base: Any) -> Any:
    """Return the 8-bit subclass of nn.Linear, or of a subclass of nn.Linear with the same forward."""

    def forward(self, input):
        state = getattr(self, "_sage", None)
        if state is None:  # removed, but a wrapper of the user's still holds this function
            return base.forward(self, input)
        if (base.forward is not FORWARD or F.linear is not LINEAR) and is_replaced(base):
            state.count_in_16_bit("patched")
            return _in_16_bit(self, base, ordinary_in(input))
        if torch.compiler.is_compiling():
            return _compiled(self, base, input)
        return _in_8_bit(self, base, input)

    return derived(_SwappedLinear, base, forward, linear_class)


class _SwappedNorm(Derived):
    """Mixin of the classes of norms that postpone results."""


@functools.cache
def norm_class(base: Any) -> Any:
    """Return the subclass of a norm class that may postpone its result."""

    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or kwargs or len(args) != 1 or not hasattr(self, "_sage"):
            return base.forward(self, *args, **kwargs)
        x, waiting = args[0], None
        if is_caller_known(1):
            narrow = x.stored() if type(x) in _STORED else None
            if narrow is not None:
                waiting = self._sage.postpone(self, narrow, base.forward, x.dtype)
            else:
                x = x.tensor() if isinstance(x, Postponed) else x
                waiting = self._sage.postpone(self, x, base.forward)
        return base.forward(self, ordinary_in(x)) if waiting is None else waiting

    return derived(_SwappedNorm, base, forward, norm_class)


def is_swapped(module) -> bool:
    """Return True for a linear layer or norm with a class of this file."""
    return isinstance(module, (_SwappedLinear, _SwappedNorm))
