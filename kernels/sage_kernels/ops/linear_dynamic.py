"""The op `dynamic_linear`: an 8-bit linear layer of a 16-bit activation in one call.

For rows that are quantised for this product alone.
"""

from __future__ import annotations

from typing import Any

import torch

from ..checks.linear import check_activation, check_linear, check_quantized
from ..facts.numerics import CODE_TYPES, FORMATS_OF_CODES
from .linear import QuantizedRows, compute_codes, compute_linear, fake_product, register_op, run_op
from .replay import try_replay


_OF_ROWS = 10  # the first arguments, up to here, say how rows are quantised; the others how they are multiplied


def dynamic_linear(
    x: torch.Tensor,
    weight: QuantizedRows,
    bias: torch.Tensor | None = None,
    *,
    norm: str = "none",
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    gain: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    balance: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
    activation: str = "none",
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Quantise the rows of x and multiply them by an 8-bit weight, in one call.

    The bits are those of `quantized_linear` after `quantize_activation`, and so are the launches; the host checks,
    looks up and allocates once.

    Args:
        x: [..., K] fp16, bf16 or fp32, 1 to 4 dimensions.
        weight: codes [N, K], scale [N], as `quantize_weight` returns them. x's rows get the same format.
        bias, activation, gate, residual: see `quantized_linear`.
        norm, norm_weight, norm_bias, eps, gain, shift, balance, beside: see `quantize_activation`.
        dtype: of the output, fp16, bf16 or fp32; x's if None.
    Returns: [..., N], with a gated activation [..., N / 2], contiguous.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/linear.py.
    """
    dtype = x.dtype if dtype is None and isinstance(x, torch.Tensor) else dtype
    of_rows: tuple[Any, ...] = (x, norm_weight, norm_bias, gain, shift, balance, beside)
    given = (*of_rows, *weight, bias, gate, residual) if isinstance(weight, tuple) else ()
    key, result = try_replay("dynamic", given, (norm, eps, activation, dtype))
    if result is None:
        check_quantized("weight", weight, tuple(CODE_TYPES.values()))
        format = FORMATS_OF_CODES[weight[0].dtype]
        check_activation(
            x, format, norm, norm_weight, norm_bias, eps, gain, shift, balance, beside=beside, prefix="norm_"
        )
        check_linear(_stand_in(x, format, beside), weight, bias, activation, gate, residual, dtype)
        arguments = (x, format, norm, *of_rows[1:3], float(eps), *of_rows[3:])
        arguments += (*weight, bias, activation, gate, residual, dtype)
        result = run_op(key, _dynamic_linear, "dynamic_linear", arguments)
    return result


def _stand_in(x: torch.Tensor, format: str, beside: torch.Tensor | None) -> QuantizedRows:
    """Return rows without memory, of the shape, type and device of x's: all that the checks look at."""
    columns = x.shape[-1] + (0 if beside is None else beside.shape[-1])
    codes = x.new_empty((), dtype=CODE_TYPES[format]).expand(*x.shape[:-1], columns)
    return QuantizedRows(codes, x.new_empty((), dtype=torch.float32).expand(x.shape[:-1]))


def _dynamic_linear(x: torch.Tensor, *arguments: Any) -> Any:
    of_rows, of_product = (x, *arguments[: _OF_ROWS - 1]), arguments[_OF_ROWS - 1 :]
    if not (x.is_cuda and x.numel()):
        return compute_linear(*compute_codes(*of_rows), *of_product)
    from .._triton.linear.launch import launch_dynamic_linear

    return launch_dynamic_linear(of_rows, of_product)


def _fake(x: torch.Tensor, *arguments: Any) -> Any:
    weight, _, _, activation, _, _, dtype = arguments[_OF_ROWS - 1 :]
    return fake_product(x, weight, activation, dtype)


register_op(
    "dynamic_linear(Tensor x, str format, str norm, Tensor? norm_weight, Tensor? norm_bias, float eps, Tensor? gain, "
    "Tensor? shift, Tensor? balance, Tensor? beside, Tensor weight, Tensor weight_scale, Tensor? bias, "
    "str activation, Tensor? gate, Tensor? residual, ScalarType dtype) -> Tensor",
    _dynamic_linear, _fake,
)  # fmt: skip
