"""Postponed torch.cat of two activations: an 8-bit linear layer reads both without copying them."""

from __future__ import annotations

import torch

from sage_kernels import QuantizedRows, quantize_activation

from ...postponed import patterns
from ...postponed.region import current
from ...postponed.tensor import ChangedInputError, Operand, Postponed, can_wait, ordinary_in
from .activations import Rows, key_of


class PostponedColumns(Postponed):
    """The postponed result of torch.cat([first, second], -1)."""

    def __init__(self, shape, dtype, device, first, second):
        self._first, self._second = Operand(first), Operand(second)
        self._rows: Rows = {}

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both tensors. Raises: ChangedInputError."""
        if self._first.is_changed or self._second.is_changed:
            raise ChangedInputError(
                "torch.cat: got a tensor that was written to in place between the call and the use of its result, "
                "expected the one of the call; keep the linear layer behind it in 16 bit (a rule in layers), or that "
                "in front of it"
            )
        return self._first.tensor, self._second.tensor

    def _compute(self):
        return torch.cat(self._operands(), -1)

    def rows(self, format: str, balance: torch.Tensor | None = None) -> QuantizedRows:
        """Quantise this activation times balance [K]: codes [..., K], scale [...]. Computed once."""
        key = key_of(format, balance)
        if key not in self._rows:
            first, second = self._operands()
            self._rows[key] = balance, quantize_activation(first, beside=second, format=format, balance=balance)
        return self._rows[key][1]


def cat(args, kwargs) -> PostponedColumns | None:
    """Postpone torch.cat of two activations along their last dimension; None for any other call of it."""
    tensors = args[0] if args else kwargs.get("tensors")
    if current() is None or not isinstance(tensors, (tuple, list)) or not isinstance(tensors[0], torch.Tensor):
        return None
    pair = patterns.joined(args, kwargs, tensors[0].dim())
    if pair is None or not isinstance(pair[1], torch.Tensor) or pair[0].dim() != pair[1].dim():
        return None
    first, second = pair
    shape = first.shape
    if not 2 <= len(shape) <= 4 or shape[:-1] != second.shape[:-1]:
        return None
    if (first.dtype, first.device) != (second.dtype, second.device) or 0 in (*shape, second.shape[-1]):
        return None
    first, second = ordinary_in(first), ordinary_in(second)
    if not (can_wait(first) and can_wait(second)):
        return None
    wide = torch.Size((*shape[:-1], shape[-1] + second.shape[-1]))
    return PostponedColumns(wide, first.dtype, first.device, first, second)
