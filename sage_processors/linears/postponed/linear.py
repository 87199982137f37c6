"""Postponed output of an 8-bit linear layer: activation, gate and residual join its epilogue."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sage_kernels import QuantizedRows

from ...postponed import patterns
from ...postponed.casts import Addend
from ...postponed.patterns import FLOATS, GATED, is_by_token
from ...postponed.tensor import ChangedInputError, Contiguous, Operand, Postponed, can_wait, ordinary_in
from ..weights.few_rows import multiplied
from ..weights.storage import Storage
from .columns import cat
from .sums import PostponedSum


_GATED = frozenset(GATED.values())
_STOCK = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class PostponedLinear(Contiguous):
    """The postponed result gate · activation(x · weightᵀ + bias); gate and activation may be missing.

    Adding a residual of the same shape computes all of it in one kernel.

    Args:
        module: the swapped layer; of a gated activation over two layers, the first one in their storage.
        x: codes and scales of its input, or rows in 16 bit that nobody else has.
        activation: as in `quantized_linear`. gate: Operand, one vector for all tokens or for each sample, or None.
        of: the result of the same call that this one is derived from, or None.
    """

    def __init__(self, shape, dtype, device, module, x, activation="none", gate=None, of=None):
        self._module, self._x, self._activation, self._gate = module, x, activation, gate
        self._own_dtype = dtype if of is None else of._own_dtype
        if of is not None:
            self._storage, self._weights, self._bias = of._storage, of._weights, of._bias
            return
        state = module._sage
        self._storage = storage = state.storage
        # the bias is taken now, since the next call of the layer may replace state.bias
        if activation in _GATED:
            self._weights = [(m, m._sage, m._sage.version) for m in storage.modules]
            self._bias = storage.bias(0, len(storage.modules) - 1)
        else:
            self._weights, self._bias = [(module, state, state.version)], state.bias

    def _finish(self, residual=None, dtype=None) -> torch.Tensor:
        gate = None if self._gate is None else self._gate.tensor
        if gate is not None and self._gate.is_changed:
            raise ChangedInputError(
                f"gate of {self._weights[0][1].label}: got a tensor that was written to in place after the "
                "layer's output was multiplied by it, expected the one of the multiplication; keep this layer in "
                f'16 bit: layers={{"{self._weights[0][1].label}": {{"linears": "none"}}}}'
            )
        state, is_gated = self._weights[0][1], self._activation in _GATED
        options = {"activation": self._activation, "gate": gate, "residual": residual, "dtype": dtype or self._dtype}
        with state.shared.lock:
            is_exchanged = is_gated and state.storage is not self._storage
            for module, known, version in self._weights:
                is_exchanged |= module.__dict__.get("_sage") is not known or known.version != version
            if is_exchanged:
                raise ChangedInputError(
                    f"weight of {state.label}: got one that was exchanged between the call and the use of its result, "
                    "expected the one of the call; use the result first"
                )
            if not is_gated:
                return product(self._module, self._x, self._bias, **options)
            return multiplied(self._x, self._storage.all_rows, self._bias, **options)

    def _compute(self):
        return self._finish()

    def _with(self, dtype=None, activation=None, gate=None):
        return PostponedLinear(
            self._shape, dtype or self._dtype, self._device, self._module, self._x, activation or self._activation,
            gate or self._gate, self,
        )  # fmt: skip

    def _cast(self, dtype):
        """Postpone the cast, so that the result is rounded once, to `dtype`."""
        return self._with(dtype) if not self._is_out and dtype in FLOATS else self.tensor().to(dtype)

    @property
    def _is_bare(self) -> bool:
        """True if there is neither activation nor gate, and the ordinary tensor was not handed out."""
        return self._activation == "none" and self._gate is None and not self._is_out

    def _activated(self, activation: str):
        return self._with(activation=activation) if self._is_bare else _STOCK[activation](self.tensor())

    def __mul__(self, other):
        if isinstance(other, PostponedLinear):
            pair = _gated_pair(self, other)
            if pair is not None:
                return pair
        other = ordinary_in(other)
        if self._gate is None and not self._is_out and can_wait(other) and is_by_token(other, self._shape):
            dtype = self._dtype if other.dtype == self._dtype else torch.promote_types(self._dtype, other.dtype)
            if dtype in FLOATS:
                return self._with(dtype, gate=Operand(other))
        return self.tensor() * other

    def __truediv__(self, other):
        if type(other) in (int, float) and other == 1 and not self._is_out:
            return self._with()  # another tensor, as that of a division is
        return self.tensor() / ordinary_in(other)

    def __add__(self, other):
        fits = isinstance(other, Addend) and not self._is_out and other.shape == self._shape
        narrow = other.stored() if fits else None
        residual = ordinary_in(other) if narrow is None else narrow
        if self._is_out or not can_wait(residual) or residual.shape != self._shape or residual.dtype not in FLOATS:
            return self.tensor() + ordinary_in(other)
        if residual.device != self._device:
            return self.tensor() + residual
        dtype = other.dtype if other.dtype == self._dtype else torch.promote_types(self._dtype, other.dtype)
        is_wide = dtype == torch.float32 and self._own_dtype != dtype and self._activation not in _GATED
        if not is_wide and narrow is None:
            return self._finish(residual, dtype)
        made = None if is_wide else self._finish(residual, dtype)
        return PostponedSum(self._shape, dtype, self._device, self, Operand(residual), made)

    __rmul__ = __mul__
    __radd__ = __add__

    @classmethod
    def _knows(cls, func):
        return _KNOWN.get(func)


def product(
    module, x: QuantizedRows | torch.Tensor, bias, *, dtype, activation="none", gate=None, residual=None
) -> torch.Tensor:
    """Compute residual + gate · activation(x · weightᵀ + bias) of a swapped layer: [..., N].

    x: codes and scales, or rows in 16 bit.
    Columns are in the order of the layer's own weight, also if its rows are stored in turns. Under the lock.
    """
    state = module._sage
    storage = state.storage
    rows = storage.rows_of(state.index, state.index)
    if not storage.in_turns or len(storage.modules) > 1:
        return multiplied(x, rows, bias, activation=activation, gate=gate, residual=residual, dtype=dtype)
    y = multiplied(x, rows, None if bias is None else storage.turned(bias), activation=activation, dtype=dtype)
    y = storage.turned_back(y)
    y = y if gate is None else y * gate
    return (y if residual is None else residual + y).to(dtype)


class PostponedHalf(Postponed):
    """One half of the columns of a PostponedLinear, maybe activated: value or gate of GEGLU or SwiGLU.

    Args:
        whole: the PostponedLinear. place: 0 for the first half, 1 for the second.
        of: the half that this one is the activation of; None without an activation.
    """

    def __init__(self, shape, dtype, device, whole, place, activation="none", of=None):
        self._whole, self._place, self._activation, self._of = whole, place, activation, of

    def _compute(self):
        if self._of is not None:
            return _STOCK[self._activation](self._of.value())
        return self._whole.value().chunk(2, -1)[self._place]

    def tensor(self):
        """Return the ordinary tensor: a view of the whole result, unless it is activated."""
        if self._of is None:
            self._whole.tensor()
        return super().tensor()

    def _activated(self, activation: str):
        if self._activation != "none" or self._is_out or self._whole._is_out:
            return _STOCK[activation](self.tensor())
        return PostponedHalf(self._shape, self._dtype, self._device, self._whole, self._place, activation, self)

    def _reads(self, other):
        return other is self._whole or other is self._of

    def __mul__(self, other):
        if isinstance(other, PostponedHalf) and other._whole is self._whole and not self._whole._is_out:
            value, gate = (self, other) if self._activation == "none" else (other, self)
            both = {value._place, gate._place} == {0, 1} and not (value._is_out or gate._is_out)
            if both and value._activation == "none" and gate._activation != "none":
                whole = self._whole
                if _put_in_turns(whole._module, gate_first=gate._place == 0):
                    kind = GATED[gate._activation]
                    return PostponedLinear(self._shape, self._dtype, self._device, whole._module, whole._x, kind)
        return self.tensor() * ordinary_in(other)

    __rmul__ = __mul__

    @classmethod
    def _knows(cls, func):
        return _KNOWN.get(func)


def _put_in_turns(module, *, gate_first: bool) -> bool:
    """Store value and gate rows of a layer in turns, for its gated activation. Returns True if they are."""
    state = module._sage
    with state.shared.lock:
        storage = state.storage
        if storage.in_turns or len(storage.modules) > 1:
            return len(storage.modules) == 1 and storage.gate_first == gate_first
        if storage.is_fixed:
            return False
        turned = Storage([module], in_turns=True, gate_first=gate_first)
        with torch.inference_mode(False), torch.no_grad():
            rows = storage.all_rows
            storage.clear()  # the old tensors are not written to: somebody may still read them in the old order
            turned.write(0, rows)
        state.storage = turned
        return True


def _gated_pair(a: PostponedLinear, b: PostponedLinear) -> PostponedLinear | None:
    """Postpone value · activation(gate) of two layers with the same input; None for other results."""
    value, gate = (a, b) if a._activation == "none" else (b, a)
    known = value._is_bare and not gate._is_out and gate._gate is None and gate._activation in _STOCK
    if not known or value._x is not gate._x or value._dtype != gate._dtype or value._shape != gate._shape:
        return None
    modules = (value._module, gate._module)
    if modules[0] is modules[1]:
        return None
    states = [module._sage for module in modules]
    with states[0].shared.lock:
        storage = states[0].storage
        if not (storage.in_turns and len(storage.modules) == 2 and all(s.storage is storage for s in states)):
            if not _pair_up(modules, states):
                return None
        elif storage.modules[0] is not modules[0]:
            return None  # value and gate have changed places since the first time
        kind = GATED[gate._activation]
        return PostponedLinear(value._shape, value._dtype, value._device, modules[0], value._x, kind)


def _pair_up(modules, states) -> bool:
    """Store the rows of two layers in turns. Returns True if that was possible."""
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


def _activation(func):
    def call(args, kwargs):
        name = patterns.activation(func, args, kwargs)
        x = args[0] if args else None
        return x._activated(name) if name is not None and isinstance(x, _ACTIVATED) else None

    return call


def _dropout(args, kwargs):
    x = args[0] if args else None
    return x if isinstance(x, Postponed) and patterns.drops_nothing(args, kwargs) else None


def _chunk(args, kwargs):
    x = args[0] if args else None
    if type(x) is not PostponedLinear or not x._is_bare or not patterns.halves(args, kwargs, x.dim()):
        return None
    storage = x._module._sage.storage
    if x._shape[-1] % 2 or len(storage.modules) > 1:
        return None
    shape = torch.Size((*x._shape[:-1], x._shape[-1] // 2))
    return tuple(PostponedHalf(shape, x._dtype, x._device, x, place) for place in (0, 1))


_ACTIVATED = (PostponedLinear, PostponedHalf)
_KNOWN: dict[Any, Any] = {
    **{func: _activation(func) for func in (F.gelu, F.silu)},
    F.dropout: _dropout,
    **dict.fromkeys(patterns.CHUNKS, _chunk),
    **dict.fromkeys(patterns.CATS, cat),
}
