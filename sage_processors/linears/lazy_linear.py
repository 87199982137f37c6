"""The output of an 8-bit linear layer that is not computed yet: what follows it may belong to its last pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sage_kernels import QuantizedRows, quantized_linear

from .errors import ChangedInputError
from .lazy import Lazy, Operand, can_wait, is_by_token, real_of
from .lazy_columns import cat
from .storage import Storage


GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu"}
_GATED = frozenset(GATED.values())
_STOCK = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class LazyLinear(Lazy):
    """gate · activation(x · weightᵀ + bias), of which gate and activation may be missing.

    A sum with a residual of the same shape computes it all in one pass.
    """

    def __init__(self, shape, dtype, device, module, x, activation="none", gate=None):
        super().__init__(shape, dtype, device)
        self._module, self._x, self._activation, self._gate = module, x, activation, gate
        state = module._sage_linear
        self._storage = state.storage
        modules = state.storage.modules if activation in _GATED else [module]
        self._weights = [(m, m._sage_linear, m._sage_linear.version) for m in modules]
        # taken now: the next call of the layer may find another one
        self._bias = state.storage.bias(0, len(state.storage.modules) - 1) if activation in _GATED else state.bias

    def _finish(self, residual=None, dtype=None) -> torch.Tensor:
        if self._gate is not None and self._gate.is_changed:
            raise ChangedInputError(
                f"gate of {self._weights[0][1].label}: got a tensor that was written to in place after the "
                "layer's output was multiplied by it, expected the one of the multiplication; keep this layer in "
                f'16 bit: layer_linears={{"{self._weights[0][1].label}": "none"}}'
            )
        options = {"activation": self._activation, "residual": residual, "dtype": dtype or self._dtype}
        options["gate"] = None if self._gate is None else self._gate.tensor
        state, is_gated = self._weights[0][1], self._activation in _GATED
        with state.shared.lock:
            is_current = all(m.__dict__.get("_sage_linear") is s and s.version == made for m, s, made in self._weights)
            if not is_current or (is_gated and state.storage is not self._storage):
                raise ChangedInputError(
                    f"weight of {state.label}: got one that was exchanged between the call and the use of its result, "
                    "expected the one of the call"
                )
            if not is_gated:
                return product(self._module, self._x, self._bias, **options)
            return quantized_linear(self._x, self._storage.all_rows, self._bias, **options)

    def _compute(self):
        return self._finish()

    def _with(self, dtype=None, **changes):
        kept = {"activation": self._activation, "gate": self._gate} | changes
        lazy = LazyLinear(self._shape, dtype or self._dtype, self._device, self._module, self._x, **kept)
        lazy._weights = self._weights
        return lazy

    def _cast(self, dtype):
        """Rounded once, to the type that is asked for."""
        return self._with(dtype) if self._real is None and dtype in _FLOATS else self.real().to(dtype)

    @property
    def _is_bare(self) -> bool:
        """Whether only the product and the bias are there, and nobody has had its numbers."""
        return self._activation == "none" and self._gate is None and self._real is None

    def _activated(self, activation: str):
        return self._with(activation=activation) if self._is_bare else _STOCK[activation](self.real())

    def __mul__(self, other):
        if isinstance(other, LazyLinear):
            pair = _gated_pair(self, other)
            if pair is not None:
                return pair
        other = real_of(other)
        if self._gate is None and self._real is None and can_wait(other) and is_by_token(other, self._shape):
            dtype = torch.promote_types(self._dtype, other.dtype)
            if dtype in _FLOATS:
                return self._with(dtype, gate=Operand(other))
        return self.real() * other

    def __truediv__(self, other):
        if type(other) in (int, float) and other == 1:
            return self
        return self.real() / real_of(other)

    def __add__(self, other):
        if isinstance(other, Lazy):
            other = other.real()
        if self._real is None and can_wait(other) and other.shape == self._shape and other.dtype in _FLOATS:
            if other.device == self._device:
                return self._finish(other, torch.promote_types(self._dtype, other.dtype))
        return self.real() + other

    __rmul__ = __mul__
    __radd__ = __add__

    @classmethod
    def _knows(cls, func):
        return _KNOWN.get(func)


def product(module, x: QuantizedRows, bias, *, dtype, activation="none", gate=None, residual=None) -> torch.Tensor:
    """residual + gate · activation(x · weightᵀ + bias) of a swapped layer [..., N], in the order of its own weight.

    Under the lock.
    """
    state = module._sage_linear
    storage = state.storage
    rows = storage.rows_of(state.index, state.index)
    options = {"activation": activation, "gate": gate, "residual": residual, "dtype": dtype}
    if not storage.in_turns or len(storage.modules) > 1:
        return quantized_linear(x, rows, bias, **options)
    y = quantized_linear(x, rows, None if bias is None else storage.turned(bias), activation=activation, dtype=dtype)
    y = storage.turned_back(y)
    y = y if gate is None else y * gate
    return (y if residual is None else residual + y).to(dtype)


class LazyHalf(Lazy):
    """One of two equal parts of a linear layer's columns, maybe activated: half of GEGLU or SwiGLU."""

    def __init__(self, shape, dtype, device, whole, place, activation="none"):
        super().__init__(shape, dtype, device)
        self._whole, self._place, self._activation = whole, place, activation

    def _compute(self):
        half = self._whole.real().chunk(2, -1)[self._place]
        return half if self._activation == "none" else _STOCK[self._activation](half)

    def _activated(self, activation: str):
        if self._activation != "none" or self._real is not None or self._whole._real is not None:
            return _STOCK[activation](self.real())
        return LazyHalf(self._shape, self._dtype, self._device, self._whole, self._place, activation)

    def __mul__(self, other):
        if isinstance(other, LazyHalf) and other._whole is self._whole and self._whole._real is None:
            value, gate = (self, other) if self._activation == "none" else (other, self)
            both = {value._place, gate._place} == {0, 1} and value._real is None and gate._real is None
            if both and value._activation == "none" and gate._activation != "none":
                whole = self._whole
                if _put_in_turns(whole._module, gate_first=gate._place == 0):
                    kind = GATED[gate._activation]
                    return LazyLinear(self._shape, self._dtype, self._device, whole._module, whole._x, kind)
        return self.real() * real_of(other)

    __rmul__ = __mul__

    @classmethod
    def _knows(cls, func):
        return _KNOWN.get(func)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _put_in_turns(module, *, gate_first: bool) -> bool:
    """Store a layer's rows as its gated activation wants them; whether they are."""
    state = module._sage_linear
    with state.shared.lock:
        storage = state.storage
        if storage.in_turns or len(storage.modules) > 1:
            return len(storage.modules) == 1 and storage.gate_first == gate_first
        if storage.is_fixed:
            return False
        turned = Storage([module], in_turns=True, gate_first=gate_first)
        with torch.inference_mode(False), torch.no_grad():
            rows = storage.all_rows
            storage.clear()  # not written over: whoever reads the old tensors still finds the old order
            turned.write(0, rows)
        state.storage = turned
        return True


def _gated_pair(a: LazyLinear, b: LazyLinear) -> LazyLinear | None:
    """activation(gate layer) · value layer of the same input, as one multiplication; None where it is none."""
    value, gate = (a, b) if a._activation == "none" else (b, a)
    known = value._is_bare and gate._real is None and gate._gate is None and gate._activation in _STOCK
    if not known or value._x is not gate._x or value._dtype != gate._dtype or value._shape != gate._shape:
        return None
    modules = (value._module, gate._module)
    if modules[0] is modules[1]:
        return None
    states = [module._sage_linear for module in modules]
    with states[0].shared.lock:
        storage = states[0].storage
        if not (storage.in_turns and len(storage.modules) == 2 and all(s.storage is storage for s in states)):
            if not _pair_up(modules, states):
                return None
        elif storage.modules[0] is not modules[0]:
            return None  # the other way round than the first time
        kind = GATED[gate._activation]
        return LazyLinear(value._shape, value._dtype, value._device, modules[0], value._x, kind)


def _pair_up(modules, states) -> bool:
    """Store the rows of two layers in turns; whether they are."""
    if any(len(s.storage.modules) > 1 or s.storage.in_turns or s.storage.is_fixed for s in states):
        return False
    pair = Storage(modules, in_turns=True)
    with torch.inference_mode(False), torch.no_grad():
        parts = [s.storage.all_rows for s in states]
        if parts[0].codes.device != parts[1].codes.device:
            return False
        for state in states:
            state.storage.clear()
        for index, part in enumerate(parts):
            pair.write(index, part)
    for index, state in enumerate(states):
        state.storage, state.index = pair, index
    return True


def _gelu(args, kwargs):
    x = args[0] if args else None
    approximate = kwargs.get("approximate", "none")
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return x._activated(names[approximate]) if approximate in names and isinstance(x, _ACTIVATED) else None


def _silu(args, kwargs):
    x = args[0] if args else None
    in_place = args[1] if len(args) > 1 else kwargs.get("inplace", False)
    return x._activated("silu") if not in_place and isinstance(x, _ACTIVATED) else None


def _dropout(args, kwargs):
    x = args[0] if args else None
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    in_place = args[3] if len(args) > 3 else kwargs.get("inplace", False)
    return x if isinstance(x, Lazy) and not in_place and (not training or p == 0) else None


def _chunk(args, kwargs):
    x = args[0]
    chunks = args[1] if len(args) > 1 else kwargs.get("chunks")
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    if type(x) is not LazyLinear or not x._is_bare or chunks != 2 or dim not in (-1, x.dim() - 1):
        return None
    storage = x._module._sage_linear.storage
    if x._shape[-1] % 2 or len(storage.modules) > 1:
        return None
    shape = torch.Size((*x._shape[:-1], x._shape[-1] // 2))
    return tuple(LazyHalf(shape, x._dtype, x._device, x, place) for place in (0, 1))


_ACTIVATED = (LazyLinear, LazyHalf)
_KNOWN = {
    F.gelu: _gelu,
    F.silu: _silu,
    F.dropout: _dropout,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.cat: cat,
    torch.concat: cat,
}
