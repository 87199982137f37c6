"""Ops of 8-bit linear layers: quantise rows, multiply, apply activation, gate and residual.

Triton kernels on a GPU, the reference on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..checks.linear import check_activation, check_linear, check_weight, check_weight_only
from ..checks.tensors import check_called_below
from ..facts.numerics import CODE_TYPES, FORMATS_OF_CODES
from ..facts.recipe import GATED
from ..reference import linear as reference
from .dispatch import call_op, register
from .replay import remember, try_replay


class QuantizedRows(NamedTuple):
    """Rows in 8 bit with one scale each: an activation [..., K], or the weight [N, K] of a linear layer.

    Attributes:
        codes: int8 or float8_e4m3fn [..., K], the last stride 1, rows a multiple of 16 bytes apart.
        scale: fp32 [...]; a row is codes · scale. NaN for a row that held NaN or inf.
    """

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def format(self) -> str:
        """Format of the codes, "int8" or "fp8"; "" for another dtype, which the ops refuse."""
        return FORMATS_OF_CODES.get(self.codes.dtype, "")


def quantize_activation(
    x: torch.Tensor,
    *,
    format: str = "int8",
    norm: str = "none",
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    gain: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    balance: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
) -> QuantizedRows:
    """Quantise the rows of an activation in one pass, after an optional norm and modulation.

    The input of the quantiser is ((norm(x) · weight + bias) · gain + shift) · balance, computed in fp32. Each row is
    scaled by its own largest element.

    Args:
        x: [..., K] fp16, bf16 or fp32, 1 to 4 dimensions.
        format: "int8" (127 levels each side, more precise for rows without outliers) or "fp8" (e4m3).
        norm: "none", "layer" (LayerNorm) or "rms" (RMSNorm), over K, with `eps`.
        weight, bias: [K], of the norm; None for ones and zeros. Only with a norm.
        gain, shift: broadcastable to x, usually [B, 1, K]: adaLN's 1 + scale and shift. None for ones and zeros.
        balance: fp32 [K], positive: factor of each channel, small where it has outliers. The weight's columns were
            divided by it (`quantize_weight`).
        beside: [..., K2] of x's dtype: more columns, as if x were one tensor [..., K + K2], but without a copy. The
            vectors above then have K + K2 elements.
    Returns: codes of the rows' shape, scale of that shape without the columns.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/linear.py.
    Source: row-wise scales as in LLM.int8() (arXiv:2208.07339), the balance as in SmoothQuant (arXiv:2211.10438).
    """
    key, result = try_replay("quantize", (x, weight, bias, gain, shift, balance, beside), (format, norm, eps))
    if result is None:
        check_activation(x, format, norm, weight, bias, eps, gain, shift, balance, beside)
        arguments = (x, format, norm, weight, bias, float(eps), gain, shift, balance, beside)
        result = run_op(key, compute_codes, "quantize_activation", arguments)
    return QuantizedRows(*result)


# Elements of a weight that are in fp32 at a time on a CPU: a whole one may not fit beside a model
WORKED_ON = 2**21


def quantize_weight(
    weight: torch.Tensor, *, format: str = "int8", balance: torch.Tensor | None = None, is_gated: bool = False
) -> QuantizedRows:
    """Quantise a linear layer's weight, one scale per output channel.

    The range of a row's codes is its largest element or a smaller share of it (SHRINKS), whichever leaves the least
    squared error: a row with one outlier then rounds all its other elements finer.

    Args:
        weight: [N, K] fp16, bf16 or fp32, finite.
        format: "int8" or "fp8".
        balance: fp32 [K], the one that `quantize_activation` is given: the weight's columns are divided by it.
        is_gated: the first N/2 rows give the value, the others the gate of GEGLU or SwiGLU. They are stored
            interleaved, as `quantized_linear` wants them for `activation="geglu"` and "swiglu".
    Returns: codes [N, K], scale [N].
    """
    check_weight(weight, format, balance, is_gated)
    weight = weight.detach()
    if _has_kernel_for_weights(weight.device, format):
        from .._triton.linear.quantize_weight import launch_quantize_weight

        codes, scale = launch_quantize_weight(weight, format, balance)
    else:
        codes = torch.empty(weight.shape, dtype=CODE_TYPES[format], device=weight.device)
        scale = torch.empty(weight.shape[:1], dtype=torch.float32, device=weight.device)
        step = max(1, WORKED_ON // weight.shape[1])
        for rows, *places in zip(weight.split(step), codes.split(step), scale.split(step), strict=True):
            for place, made in zip(places, reference.ref_quantize_weight(rows, format, balance), strict=True):
                place.copy_(made)
    if is_gated:
        codes, scale = interleaved(codes), interleaved(scale)
    return QuantizedRows(*_aligned(codes, scale))


def _has_kernel_for_weights(device: torch.device, format: str) -> bool:
    """Return True on a GPU that has the format of codes."""
    if device.type != "cuda":
        return False
    return format != "fp8" or torch.cuda.get_device_capability(device) >= (8, 9)


def _aligned(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay out codes as the kernels want them: rows a multiple of 16 bytes apart, zeros between.

    Copy engines ask for that.
    """
    columns = codes.shape[-1]
    if columns % 16 == 0:
        return codes.contiguous(), scale.contiguous()
    padded = codes.new_zeros((*codes.shape[:-1], -(-columns // 16) * 16))
    padded[..., :columns] = codes
    return padded[..., :columns], scale.contiguous()


def _new_rows(x: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate codes for x's rows with so many columns, in the layout of `_aligned`."""
    if columns % 16 == 0:
        return x.new_empty((*x.shape[:-1], columns), dtype=dtype)
    return x.new_empty((*x.shape[:-1], -(-columns // 16) * 16), dtype=dtype)[..., :columns]


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Interleave values (first half of the rows) and gates: value 0, gate 0, value 1, gate 1 …"""
    return torch.stack(rows.chunk(2), 1).flatten(0, 1)


def quantized_linear(
    x: QuantizedRows,
    weight: QuantizedRows,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "none",
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiply 8-bit rows: residual + gate · activation(x · weightᵀ + bias), rounded once at the end.

    Args:
        x: codes [..., K], scale [...], as `quantize_activation` returns them.
        weight: codes [N, K] of the same format, scale [N], as `quantize_weight` returns them.
        bias: [N] or None; with a gated activation in the weight's order (`interleaved`).
        activation: "none", "gelu", "gelu_tanh" or "silu". Of pairs of columns "geglu", "geglu_tanh", "swiglu":
            value · activation(gate), N / 2 columns.
        gate: broadcastable to the output, usually [B, 1, N]: adaLN's gate.
        residual: of the output's shape.
        dtype: of the output, fp16, bf16 or fp32.
    Returns: [..., N], contiguous.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/linear.py.
    """
    given = (*x, *weight, bias, gate, residual) if isinstance(x, tuple) and isinstance(weight, tuple) else ()
    key, result = try_replay("linear", given, (activation, dtype))
    if result is None:
        check_linear(x, weight, bias, activation, gate, residual, dtype)
        arguments = (*x, *weight, bias, activation, gate, residual, dtype)
        result = run_op(key, compute_linear, "quantized_linear", arguments)
    return result


def weight_only_linear(
    x: torch.Tensor,
    weight: QuantizedRows,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "none",
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Multiply few 16-bit rows by an 8-bit weight: residual + gate · activation(x · weightᵀ + bias).

    Such a layer waits for its weight to be read, and 8 bits halve that. Codes are exact in 16 bit. Sums of x · codes
    are fp32, times the scale of their column, and rounded once at the end. Equal calls give equal bits. A row of x
    with NaN or inf has no finite output, nor has a row whose sums exceed fp32.

    Args:
        x: [..., K] fp16, bf16 or fp32, 1 to 4 dimensions.
        weight: codes [N, K], scale [N], as `quantize_weight` returns them.
        bias, activation, gate, residual: see `quantized_linear`.
        dtype: of the output, fp16, bf16 or fp32; x's if None.
        batch_invariant: the bits of a row do not depend on how many rows are multiplied with it. Slower for few rows.
    Returns: [..., N], with a gated activation [..., N / 2], contiguous.
    Raises: TypeError, ValueError, NotImplementedError before any launch; see checks/linear.py.
    """
    dtype = x.dtype if dtype is None and isinstance(x, torch.Tensor) else dtype
    given = (x, *weight, bias, gate, residual) if isinstance(weight, tuple) else ()
    key, result = try_replay("weight_only", given, (activation, dtype, batch_invariant))
    if result is None:
        check_weight_only(x, weight, bias, activation, gate, residual, dtype)
        arguments = (x, *weight, bias, activation, gate, residual, dtype, batch_invariant)
        result = run_op(key, _weight_only_linear, "weight_only_linear", arguments)
    return result


def run_op(key: Any, function: Callable[..., Any], op: str, arguments: Iterable[Any]) -> Any:
    """Run a checked call: through the dispatcher, or, with a key, recorded for replays."""
    if key is None:
        # parameters of modules are detached: the result would require a gradient, which the next call refuses
        arguments = [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in arguments]
        return call_op(op, arguments)
    given = [x for x in arguments if isinstance(x, torch.Tensor)]
    return remember(key, lambda: function(*arguments), given)


def compute_codes(x: torch.Tensor, *options: Any) -> Any:
    """Codes and scale of the rows of a checked call of `quantize_activation`."""
    if x.numel() == 0:
        return _fake_quantize_activation(x, *options)
    if x.is_cuda:
        from .._triton.linear.launch import launch_quantize_activation

        return launch_quantize_activation(x, *options)
    return _aligned(*reference.ref_quantize_activation(x, *options))


def compute_linear(codes: torch.Tensor, *arguments: Any) -> Any:
    """Output of a checked call of `quantized_linear`."""
    if codes.is_cuda and codes.numel():
        from .._triton.linear.launch import launch_quantized_linear

        return launch_quantized_linear(codes, *arguments)
    return reference.ref_quantized_linear(codes, *arguments)


def _weight_only_linear(x: torch.Tensor, *arguments: Any) -> Any:
    if x.is_cuda and x.numel():
        from .._triton.linear.launch import launch_weight_only_linear

        return launch_weight_only_linear(x, *arguments)
    return reference.ref_weight_only_linear(x, *arguments)


def _fake_quantize_activation(x: torch.Tensor, format: str, *vectors: Any) -> Any:
    beside = vectors[-1]
    columns = x.shape[-1] + (0 if beside is None else beside.shape[-1])
    return _new_rows(x, columns, CODE_TYPES[format]), x.new_empty(x.shape[:-1], dtype=torch.float32)


def fake_product(rows: torch.Tensor, weight: torch.Tensor, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """Return an output of rows [..., K] times a weight [N, K], for PyTorch's tracing with fake tensors."""
    columns = weight.shape[0] // (2 if activation in GATED else 1)
    return rows.new_empty((*rows.shape[:-1], columns), dtype=dtype)


def _of_op(name: str, function: Callable[..., Any], tensors: tuple[int, ...]) -> Callable[..., Any]:
    """Return the function that the dispatcher calls for an op; it replays calls like an earlier one.

    Compiled code calls ops this way. tensors: which of the op's arguments are tensors or None.
    """

    def run(*arguments: Any) -> Any:
        check_called_below(name)
        given = tuple(arguments[i] for i in tensors)
        options = tuple(x for i, x in enumerate(arguments) if i not in tensors)
        key, result = try_replay(f"op {name}", given, options, dispatched=True)
        if result is not None:
            return result
        if key is None:
            return function(*arguments)
        return remember(key, lambda: function(*arguments), [x for x in given if x is not None])

    return run


def register_op(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an op with these schema, computation and results for fake tensors; its calls are replayed."""
    arguments = schema.partition("(")[2].partition(") -> ")[0].split(", ")
    tensors = tuple(i for i, argument in enumerate(arguments) if argument.startswith("Tensor"))
    register(schema, _of_op(schema.partition("(")[0], function, tensors), fake)


register_op(
    "quantize_activation(Tensor x, str format, str norm, Tensor? weight, Tensor? bias, float eps, Tensor? gain, "
    "Tensor? shift, Tensor? balance, Tensor? beside) -> (Tensor, Tensor)",
    compute_codes, _fake_quantize_activation,
)  # fmt: skip
register_op(
    "quantized_linear(Tensor codes, Tensor scale, Tensor weight, Tensor weight_scale, Tensor? bias, str activation, "
    "Tensor? gate, Tensor? residual, ScalarType dtype) -> Tensor",
    compute_linear, lambda codes, _, weight, *rest: fake_product(codes, weight, rest[2], rest[5]),
)  # fmt: skip
register_op(
    "weight_only_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, str activation, Tensor? gate, "
    "Tensor? residual, ScalarType dtype, bool batch_invariant) -> Tensor",
    _weight_only_linear, lambda x, weight, *rest: fake_product(x, weight, rest[2], rest[5]),
)  # fmt: skip
