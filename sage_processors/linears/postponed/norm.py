"""Postponed output of a norm: one kernel normalises and quantises it for the next linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sage_kernels import QuantizedRows, quantize_activation

from ...postponed.patterns import FLOATS, is_by_token
from ...postponed.tensor import ChangedInputError, Contiguous, Operand, can_wait, ordinary_in
from ..weights.few_rows import in_16_bit_rows
from .activations import Rows, key_of


class NormCall:
    """One call of a norm module: its input and parameters.

    Attributes:
        state: norm_layers.NormState of the module.
        x: the norm's input [..., K]. operands: Operands of x and of the norm's parameters.
        forward: () -> the module's own result, in 16 bit.
        vectors: {weight, bias: [K] or None, eps: float}, arguments of `quantize_activation`.
        made: the module's own result. It is computed at once until a first call has shown that the model does not
            write to the input before the result is used; None from then on.
    """

    __slots__ = ("state", "x", "operands", "forward", "vectors", "made")

    def __init__(self, state, x, forward, vectors, parameters):
        self.state, self.x, self.forward, self.vectors = state, x, forward, vectors
        self.operands = (Operand(x), *parameters)
        self.made: torch.Tensor | None = None if state.is_proven else forward()


def _are_stale(operands) -> bool:
    for x in operands:  # not any(): its generator takes longer
        if x is not None and x.tensor._version != x.version:
            return True
    return False


class PostponedNorm(Contiguous):
    """The postponed result (norm(x) · weight + bias) · gain + shift; gain and shift may be missing.

    Args:
        call: NormCall. gain, shift: Operands or None.
        parent, step: the postponed result that this one was derived from, and a function of its numbers. None for the
            norm's own result.
    """

    def __init__(self, shape, dtype, device, call, parent=None, step=None, gain=None, shift=None):
        self._call, self._parent, self._step, self._gain, self._shift = call, parent, step, gain, shift
        self._rows: Rows = {}
        if call.made is not None:
            self.value()

    def tensor_for_16_bit(self) -> torch.Tensor:
        """Return the ordinary tensor to a linear layer that runs in 16 bit.

        If that layer is the first that reads this result, the norm's next results of this size are not postponed. The
        numbers are the same.
        """
        if not self._is_out and not self._rows:
            self._call.state.is_read_in_16_bit(self._shape.numel())
        return self.tensor()

    def _refuse_stale(self, *operands):
        if _are_stale(operands):
            raise ChangedInputError(
                f"input or parameter of {self._call.state.label}: got a tensor that was written to in place between "
                f"the norm and the use of its result, expected the one that the norm was called with; the first calls "
                f"of this norm were without such writes. Keep the linear layers behind it in 16 bit: "
                f'layers={{"{self._call.state.behind}": {{"linears": "none"}}}}'
            )

    def _compute(self):
        if self._parent is not None:
            self._refuse_stale(self._gain, self._shift)
            return self._step(self._parent.value())
        if self._call.made is not None:
            return self._call.made
        self._refuse_stale(*self._call.operands)
        return self._call.forward()

    def _reads(self, other):
        return other is self._parent

    def rows(self, format: str, balance: torch.Tensor | None = None) -> QuantizedRows:
        """Quantise this activation times balance [K]: codes [..., K], scale [...]. Computed once."""
        key = key_of(format, balance)
        if key not in self._rows:
            if self._is_readable():
                call, gain, shift = self._call, self._gain, self._shift
                made = quantize_activation(
                    call.x, format=format, norm=call.state.kind, gain=None if gain is None else gain.tensor,
                    shift=None if shift is None else shift.tensor, balance=balance, **call.vectors,
                )  # fmt: skip
            else:
                made = quantize_activation(self.value(), format=format, balance=balance)
            self._keep(key, balance, made)
        return self._rows[key][1]

    def rows_in_16_bit(self, dtype: torch.dtype, balance: Any) -> torch.Tensor:
        """Return this activation [..., K] times its balance, for layers that read only their weight in 8 bit.

        An RMSNorm is one kernel then, which rounds once; the module's own forward has some eight. Computed once, and
        nobody else has it; other norms hand out their own result. balance: a Balance, or None.
        """
        call, vectors = self._call, self._call.vectors
        weight, vector = vectors["weight"], None if balance is None else balance.on(self._device)
        plain = self._gain is None and self._shift is None and vectors["bias"] is None and self._dtype == call.x.dtype
        if call.state.kind != "rms" or not plain or (weight is not None and weight.dtype != call.x.dtype):
            factors = None if balance is None else balance.for_rows(dtype)
            return in_16_bit_rows(self.tensor_for_16_bit(), dtype, factors)

        key = key_of("16bit", vector)
        if key not in self._rows:
            if self._is_readable():
                gain = weight
                if balance is not None:
                    gain = balance.in_dtype(call.x.dtype) * (1 if weight is None else weight)
                made = F.rms_norm(call.x, call.x.shape[-1:], gain, vectors["eps"])
            else:
                made = in_16_bit_rows(self.value().clone(), self._dtype, vector)
            self._keep(key, vector, made)
        return in_16_bit_rows(self._rows[key][1], dtype, None)

    def _is_readable(self) -> bool:
        """Return True if rows can be made of the norm's input, False if of its value, as the input is stale."""
        call = self._call
        operands = (*call.operands, self._gain, self._shift)
        if call.made is not None and _are_stale(operands):
            call.state.is_postponed = False  # this model writes to a norm's operands before its result is used
            return False
        self._refuse_stale(*operands)
        return True

    def _keep(self, key: tuple[Any, ...], balance: torch.Tensor | None, rows: Any) -> None:
        state = self._call.state
        state.is_proven = state.is_postponed
        if not self._rows:
            state.is_read_in_8_bit(self._shape.numel())
        self._rows[key] = balance, rows

    def _next(self, step, dtype, gain, shift):
        dtype = dtype if dtype == self._dtype else torch.promote_types(self._dtype, dtype)
        return PostponedNorm(self._shape, dtype, self._device, self._call, self, step, gain, shift)

    def _takes(self, other) -> bool:
        return not self._is_out and can_wait(other) and is_by_token(other, self._shape)

    def __mul__(self, other):
        other = ordinary_in(other)
        if self._gain is None and self._shift is None and self._takes(other):
            return self._next(lambda x: x * other, other.dtype, Operand(other), None)
        return self.tensor() * other

    def __add__(self, other):
        other = ordinary_in(other)
        if self._shift is None and self._takes(other) and other.shape != self._shape:
            return self._next(lambda x: x + other, other.dtype, self._gain, Operand(other))
        return self.tensor() + other

    __rmul__ = __mul__
    __radd__ = __add__

    def _cast(self, dtype):
        if self._is_out or dtype not in FLOATS:
            return self.tensor().to(dtype)
        return PostponedNorm(
            self._shape, dtype, self._device, self._call, self, lambda x: x.to(dtype), self._gain, self._shift
        )
