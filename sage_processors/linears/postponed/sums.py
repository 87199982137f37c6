"""Postponed sums of a residual and an 8-bit linear layer's output.

Some models, such as Wan, add in fp32, round the sum to 16 bit, and cast it to fp32 again for each norm and sum behind
it. Here the kernel of the matmul rounds the sum, and the kernels behind it read 16 bits: the numbers are the same.
"""

from __future__ import annotations

import torch

from ...postponed.casts import Castable
from ...postponed.patterns import FLOATS
from ...postponed.tensor import ChangedInputError, Postponed


class PostponedSum(Castable):
    """The postponed result residual + gate · activation(x · weightᵀ + bias), rounded once to its dtype.

    Until a first sum of the layer has shown that the model does not write to the residual before the sum is used, the
    sum is computed at once.

    Args:
        linear: the PostponedLinear that is added. residual: Operand of the same shape.
        made: the sum, if it is known; the result is rounded from it then. is_trial: it was computed at once.
    """

    def __init__(self, shape, dtype, device, linear, residual, made=None, is_trial=False):
        self._linear, self._residual = linear, residual
        self._state = linear._module._sage
        self._is_trial = is_trial or (made is None and not self._state.sums_wait)
        self._made = linear._finish(residual.tensor, dtype) if made is None and self._is_trial else made

    def _compute(self) -> torch.Tensor:
        state, is_changed = self._state, self._residual.is_changed
        if self._is_trial and state.sums_wait is not None:
            state.sums_wait = None if is_changed else True
        if self._made is not None:
            rounded: torch.Tensor = self._made.to(self._dtype)
            return rounded
        if is_changed:
            raise ChangedInputError(
                f"residual of {state.label}: got a tensor that was written to in place after the layer's output "
                "was added to it, expected the one of the sum, as in the first calls; keep this layer in 16 bit: "
                f'layers={{"{state.label}": {{"linears": "none"}}}}'
            )
        made: torch.Tensor = self._linear._finish(self._residual.tensor, self._dtype)
        return made

    def _reads(self, other: Postponed) -> bool:
        """Return True if both sums share the numbers that were computed at once."""
        if not isinstance(other, PostponedSum) or other is self or self._made is None:
            return False
        return other._made is self._made

    def _cast(self, dtype: torch.dtype) -> torch.Tensor:
        is_narrower = torch.promote_types(dtype, self._dtype) != dtype
        if not is_narrower or self._is_out or dtype not in FLOATS or self._ordinary is not None:
            return super()._cast(dtype)
        known = self._made, self._is_trial
        made: torch.Tensor = PostponedSum(self._shape, dtype, self._device, self._linear, self._residual, *known)
        return made
