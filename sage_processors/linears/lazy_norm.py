"""The output of a norm that is not computed yet: an 8-bit linear layer takes norm, modulation and rounding in one."""

from __future__ import annotations

import torch

from sage_kernels import QuantizedRows, quantize_activation

from .activations import RowsOf
from .errors import ChangedInputError
from .lazy import Lazy, Operand, can_wait, is_by_token


class NormCall:
    """One call of a norm module: its input, and what it was called with.

    Attributes:
        state: norms.NormState of the module.
        x: Operand, the norm's input [..., K].
        forward: () -> the module's own result, in 16 bit.
        vectors: {weight, bias: [K] or None, eps: float}: what `quantize_activation` takes.
        is_careful: the result is computed at once as well: whether the model writes to the input before the result
            is used is not known yet.
        gave_rows, gave_numbers: a layer in 8 bit took it, one that stays in 16 bit did.
    """

    __slots__ = ("state", "x", "forward", "vectors", "is_careful", "gave_rows", "gave_numbers")

    def __init__(self, state, x, forward, vectors, is_careful):
        self.state, self.x, self.forward, self.vectors = state, Operand(x), forward, vectors
        self.is_careful = is_careful
        self.gave_rows = self.gave_numbers = False


class LazyNorm(Lazy):
    """(norm(x) · weight + bias) · gain + shift, of which each of the last two may be missing."""

    def __init__(self, shape, dtype, device, call, parent=None, step=None, gain=None, shift=None):
        super().__init__(shape, dtype, device)
        self._call, self._parent, self._step, self._gain, self._shift = call, parent, step, gain, shift
        self._rows = RowsOf()
        if call.is_careful:
            self.real()

    def real_from_now_on(self) -> torch.Tensor:
        """The ordinary tensor, for a layer that stays in 16 bit. Where all who use it do, the norm's next ones of this
        size are computed at once."""
        self._call.gave_numbers = True
        self._look_who_asked()
        return self.real()

    def _look_who_asked(self) -> None:
        """Where one layer takes it in 8 bit, all of its next ones wait, as this one did: they have the same bits."""
        call, state, size = self._call, self._call.state, self._shape.numel()
        if call.gave_rows and call.gave_numbers:
            state.waits_from = min(state.waits_from, size)
            state.at_once_up_to = min(state.at_once_up_to, state.waits_from - 1)
        elif call.gave_numbers and size < state.waits_from:
            state.at_once_up_to = max(state.at_once_up_to, size)

    def _operands(self):
        return [x for x in (self._call.x, self._gain, self._shift) if x is not None]

    @property
    def _is_stale(self) -> bool:
        return any(x.is_changed for x in self._operands())

    def _refuse_stale(self):
        if self._is_stale:
            raise ChangedInputError(
                f"input of {self._call.state.label}: got a tensor that was written to in place between the norm and "
                f"the use of its result, expected the one that the norm was called with; the first calls of this "
                f"norm were without such writes. Keep the linear layers behind it in 16 bit: "
                f'layer_linears={{"{self._call.state.behind}": "none"}}'
            )

    def _compute(self):
        if self._parent is None:
            self._refuse_stale()
            return self._call.forward()
        if self._parent._real is None:
            self._refuse_stale()
        return self._step(self._parent.real())

    def rows(self, format: str, balance: torch.Tensor | None = None) -> QuantizedRows:
        """This activation times balance [K] in 8 bit: codes [..., K], scale [...]; computed once for each of these."""
        if self.is_changed:
            return quantize_activation(self._real, format=format, balance=balance)
        rows = self._rows.get(format, balance)
        if rows is None:
            if self._call.is_careful and self._is_stale:
                self._call.state.is_postponed = False  # this model writes to what it has normalised
                rows = quantize_activation(self._real, format=format, balance=balance)
            else:
                self._refuse_stale()
                gain, shift = (None if x is None else x.tensor for x in (self._gain, self._shift))
                call = self._call
                rows = quantize_activation(
                    call.x.tensor, format=format, norm=call.state.kind, gain=gain, shift=shift, balance=balance,
                    **call.vectors,
                )  # fmt: skip
                call.state.is_proven = True
            self._rows.put(format, balance, rows)
            if not self._call.gave_rows:
                self._call.gave_rows = True
                self._look_who_asked()
        return rows

    def _next(self, other, step, dtype, **operands):
        kept = {"gain": self._gain, "shift": self._shift} | operands
        return LazyNorm(self._shape, dtype, self._device, self._call, self, step, **kept)

    def _takes(self, other) -> bool:
        return can_wait(other) and not self.is_changed and is_by_token(other, self._shape)

    def __mul__(self, other):
        if isinstance(other, Lazy):
            other = other.real()
        if self._gain is None and self._shift is None and self._takes(other):
            dtype = torch.promote_types(self._dtype, other.dtype) if other.dim() else self._dtype
            return self._next(other, lambda x: x * other, dtype, gain=Operand(other))
        return self.real() * other

    def __add__(self, other):
        if isinstance(other, Lazy):
            other = other.real()
        if self._shift is None and self._takes(other) and other.shape != self._shape:
            dtype = torch.promote_types(self._dtype, other.dtype)
            return self._next(other, lambda x: x + other, dtype, shift=Operand(other))
        return self.real() + other

    __rmul__ = __mul__
    __radd__ = __add__

    def _cast(self, dtype):
        if not dtype.is_floating_point or self.is_changed:
            return self.real().to(dtype)
        return self._next(None, lambda x: x.to(dtype), dtype)
