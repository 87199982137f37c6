"""Columns of two tensors that are not beside each other yet: an 8-bit linear layer reads each from where it is."""

from __future__ import annotations

import torch

from sage_kernels import QuantizedRows, quantize_activation

from .activations import RowsOf
from .errors import ChangedInputError
from .lazy import Lazy, Operand, can_wait, real_of


class LazyColumns(Lazy):
    """torch.cat([first, second], -1)."""

    def __init__(self, shape, dtype, device, first, second):
        super().__init__(shape, dtype, device)
        self._first, self._second = Operand(first), Operand(second)
        self._rows = RowsOf()

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors. Raises: ChangedInputError."""
        if self._first.is_changed or self._second.is_changed:
            raise ChangedInputError(
                "torch.cat: got a tensor that was written to in place between the call and the use of its result, "
                "expected the one of the call; keep the linear layer behind it in 16 bit (layer_linears), or that in "
                "front of it"
            )
        return self._first.tensor, self._second.tensor

    def _compute(self):
        return torch.cat(self._operands(), -1)

    def rows(self, format: str, balance: torch.Tensor | None = None) -> QuantizedRows:
        """This activation times balance [K] in 8 bit: codes [..., K], scale [...]; computed once for each of these,
        unless somebody has had the ordinary tensor, which may be written to."""
        if self._real is not None:
            return quantize_activation(self._real, format=format, balance=balance)
        rows = self._rows.get(format, balance)
        if rows is None:
            first, second = self._operands()
            rows = quantize_activation(first, beside=second, format=format, balance=balance)
            self._rows.put(format, balance, rows)
        return rows


def cat(args, kwargs) -> LazyColumns | None:
    """`torch.cat` of two activations along their last dimension, one of them a layer's; None: of something else."""
    tensors = args[0] if args else kwargs.get("tensors")
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if type(tensors) not in (tuple, list) or len(tensors) != 2 or kwargs.get("out") is not None:
        return None
    first, second = tensors
    if not all(isinstance(x, torch.Tensor) for x in tensors) or first.dim() != second.dim():
        return None
    shape = first.shape
    if not 2 <= len(shape) <= 4 or dim not in (-1, len(shape) - 1) or shape[:-1] != second.shape[:-1]:
        return None
    if (first.dtype, first.device) != (second.dtype, second.device) or 0 in (*shape, second.shape[-1]):
        return None
    first, second = real_of(first), real_of(second)
    if not (can_wait(first) and can_wait(second)):
        return None
    wide = torch.Size((*shape[:-1], shape[-1] + second.shape[-1]))
    return LazyColumns(wide, first.dtype, first.device, first, second)
