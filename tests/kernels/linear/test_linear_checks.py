"""Bad arguments of the 8-bit linear ops: an error that says which one, what it got and what is expected."""

from __future__ import annotations

import re

import pytest
import torch
from torch.autograd import forward_ad

from sage_kernels import QuantizedRows, quantize_activation, quantize_weight, quantized_linear, weight_only_linear
from tests.kernels.linear.linear_cases import normal, rows


X = normal(2, 3, 32)
ROWS, WEIGHT = rows(2, 3, 32), rows(8, 32)
DTYPES = "one of (torch.float16, torch.bfloat16, torch.float32)"


def bad(x=X, **options):
    return lambda: quantize_activation(x, **options)


def bad_weight(weight=X[0], **options):
    return lambda: quantize_weight(weight, **options)


def bad_linear(x=ROWS, weight=WEIGHT, *rest, **options):
    return lambda: quantized_linear(x, weight, *rest, **options)


def bad_weight_only(x=X, weight=WEIGHT, *rest):
    return lambda: weight_only_linear(x, weight, *rest)


def vector(*shape, **options):
    return torch.ones(shape, **options)


NEVER = "expected None; they are the norm's own"
CALLS = {
    # quantize_activation
    "a list": (bad([1.0]), TypeError, "x: got list, expected a tensor"),
    "integers": (bad(X.int()), TypeError, f"x: got torch.int32, expected {DTYPES}"),
    "double": (bad(X.double()), TypeError, f"x: got torch.float64, expected {DTYPES}"),
    "sparse": (bad(X.to_sparse()), TypeError, "x: got layout torch.sparse_coo, expected a strided tensor"),
    "no dimension": (bad(X[0, 0, 0]), ValueError, "x: got 0 dimensions, expected 1 to 4"),
    "five dimensions": (bad(X[None, None]), ValueError, "x: got 5 dimensions, expected 1 to 4"),
    "no columns": (bad(X[..., :0]), ValueError, "x: got shape (2, 3, 0), expected [..., K] with K >= 1"),
    "format": (bad(format="int4"), ValueError, "format: got 'int4', expected one of ('int8', 'fp8')"),
    "unhashable format": (bad(format=[]), ValueError, "format: got [], expected one of ('int8', 'fp8')"),
    "norm": (bad(norm="batch"), ValueError, "norm: got 'batch', expected one of ('none', 'layer', 'rms')"),
    "weight without norm": (bad(weight=vector(32)), ValueError, f'weight, bias: got them with norm="none", {NEVER}'),
    "bias without norm": (bad(bias=vector(32)), ValueError, f'weight, bias: got them with norm="none", {NEVER}'),
    "eps": (bad(norm="rms", eps=-1.0), ValueError, "eps: got -1.0, expected a finite number >= 0"),
    "eps NaN": (bad(norm="rms", eps=float("nan")), ValueError, "eps: got nan, expected a finite number >= 0"),
    "eps text": (bad(norm="rms", eps="1"), ValueError, "eps: got '1', expected a finite number >= 0"),
    "norm weight": (bad(norm="rms", weight=vector(31)), ValueError, "weight: got shape (31,), expected (32,)"),
    "norm bias": (bad(norm="layer", bias=vector(1, 32)), ValueError, "bias: got shape (1, 32), expected (32,)"),
    "balance": (bad(balance=vector(3)), ValueError, "balance: got shape (3,), expected (32,)"),
    "balance type": (bad(balance=vector(32).int()), TypeError, f"balance: got torch.int32, expected {DTYPES}"),
    "gain": (bad(gain=vector(3, 1, 32)), ValueError, "gain: got shape (3, 1, 32), expected one that broadcasts to"),
    "shift": (bad(shift=vector(1, 1, 1, 32)), ValueError, "shift: got shape (1, 1, 1, 32), expected one that broad"),
    "gain type": (bad(gain=1.0), TypeError, "gain: got float, expected a tensor"),
    "shift device": (bad(shift=vector(32, device="meta")), ValueError, "shift: got device meta, expected cpu"),
    "beside": (bad(beside=vector(2, 4, 8)), ValueError, "beside: got shape (2, 4, 8), expected (2, 3, K2) with K2"),
    "beside of no columns": (bad(beside=vector(2, 3, 0)), ValueError, "beside: got shape (2, 3, 0), expected (2, 3, "),
    "beside of a dimension": (bad(beside=vector(8)), ValueError, "beside: got shape (8,), expected (2, 3, K2)"),
    "beside type": (bad(beside=vector(2, 3, 8).half()), TypeError, "beside: got torch.float16, expected "),
    "beside device": (bad(beside=vector(2, 3, 8, device="meta")), ValueError, "beside: got device meta, expected cpu"),
    "balance of both": (bad(beside=X, balance=vector(32)), ValueError, "balance: got shape (32,), expected (64,)"),
    # quantize_weight
    "vector": (bad_weight(X[0, 0]), ValueError, "weight: got shape (32,), expected [N, K] with N, K >= 1"),
    "no rows": (bad_weight(X[0, :0]), ValueError, "weight: got shape (0, 32), expected [N, K] with N, K >= 1"),
    "weight format": (bad_weight(format="int4"), ValueError, "format: got 'int4', expected one of"),
    "codes": (bad_weight(WEIGHT.codes), TypeError, f"weight: got torch.int8, expected {DTYPES}"),
    "meta": (bad_weight(X[0].to("meta")), ValueError, "weight: got one on the meta device, expected its numbers"),
    "odd": (bad_weight(is_gated=True), ValueError, "weight: got 3 rows, expected an even number for a gated"),
    "weight balance": (bad_weight(balance=vector(3)), ValueError, "balance: got shape (3,), expected (32,)"),
    "balance zero": (bad_weight(balance=0 * vector(32)), ValueError, "balance: got numbers that are not positive and"),
    "one of balance inf": (
        bad_weight(balance=vector(32).index_fill_(0, torch.tensor(5), torch.inf)), ValueError,
        "balance: got numbers that are not positive and",
    ),
    "one of balance negative": (
        bad_weight(balance=vector(32).index_fill_(0, torch.tensor(5), -1.0)), ValueError,
        "balance: got numbers that are not positive and",
    ),
    "NaN": (bad_weight(X[0] * torch.nan), ValueError, "weight: got NaN or inf in it, expected finite numbers"),
    "inf": (bad_weight(X[0] / 0), ValueError, "weight: got NaN or inf in it, expected finite numbers"),
    # quantized_linear
    "x alone": (bad_linear(X), TypeError, "x: got Tensor, expected QuantizedRows (codes, scale)"),
    "three": (bad_linear((*ROWS, None)), TypeError, "x: got tuple, expected QuantizedRows (codes, scale)"),
    "16-bit weight": (bad_linear(weight=X[0]), TypeError, "weight: got Tensor, expected QuantizedRows"),
    "float codes": (bad_linear(QuantizedRows(X, ROWS.scale)), TypeError, "x.codes: got torch.float32, expected"),
    "half scale": (
        bad_linear(QuantizedRows(ROWS.codes, ROWS.scale.half())), TypeError,
        "x.scale: got torch.float16, expected one of (torch.float32,)",
    ),
    "scale shape": (
        bad_linear(weight=QuantizedRows(WEIGHT.codes, WEIGHT.scale[:7])), ValueError,
        "weight.scale: got shape (7,), expected (8,)",
    ),
    "depth": (
        bad_linear(weight=rows(8, 33)), ValueError,
        "x.codes, weight.codes: got shapes (2, 3, 32) and (8, 33), expected [..., K] and [N, K]",
    ),
    "five dimensions of codes": (
        bad_linear(x=rows(1, 1, 2, 3, 32)), ValueError, "(1, 1, 2, 3, 32) and (8, 32), expected [..., K] and [N, K]"
    ),
    "weight dimensions": (bad_linear(weight=rows(1, 8, 32)), ValueError, "(1, 8, 32), expected [..., K] and [N, K]"),
    "formats": (
        bad_linear(weight=rows(8, 32, format="fp8")), TypeError,
        "weight.codes: got torch.float8_e4m3fn, expected torch.int8 as x.codes",
    ),
    "devices": (
        bad_linear(weight=QuantizedRows(*(y.to("meta") for y in WEIGHT))), ValueError,
        "weight.codes: got device meta, expected cpu as x.codes",
    ),
    "activation": (bad_linear(activation="relu"), ValueError, "activation: got 'relu', expected one of ('none',"),
    "dtype": (bad_linear(dtype=torch.float64), TypeError, "dtype: got torch.float64, expected one of"),
    "odd pairs": (
        bad_linear(weight=rows(7, 32), activation="swiglu"), ValueError,
        "weight.codes: got 7 rows, expected an even number for 'swiglu'",
    ),
    "bias shape": (
        bad_linear(ROWS, WEIGHT, vector(4), activation="geglu"), ValueError, "bias: got shape (4,), expected (8,)"
    ),
    "bias type": (bad_linear(ROWS, WEIGHT, vector(8).int()), TypeError, "bias: got torch.int32, expected one of"),
    "gate shape": (bad_linear(gate=vector(2, 8)), ValueError, "gate: got shape (2, 8), expected one that broad"),
    "gate of pairs": (bad_linear(gate=vector(8), activation="geglu"), ValueError, "broadcasts to (2, 3, 4)"),
    "residual": (bad_linear(residual=vector(8)), ValueError, "residual: got shape (8,), expected (2, 3, 8)"),
    "residual device": (
        bad_linear(residual=vector(2, 3, 8, device="meta")), ValueError, "residual: got device meta, expected cpu"
    ),
    # weight_only_linear
    "rows in 8 bit": (bad_weight_only(ROWS), TypeError, "x: got QuantizedRows, expected a tensor"),
    "rows of double": (bad_weight_only(X.double()), TypeError, f"x: got torch.float64, expected {DTYPES}"),
    "rows of no dimension": (bad_weight_only(X[0, 0, 0]), ValueError, "x: got 0 dimensions, expected 1 to 4"),
    "rows of five": (bad_weight_only(X[None, None]), ValueError, "x: got 5 dimensions, expected 1 to 4"),
    "rows of no columns": (bad_weight_only(X[..., :0]), ValueError, "expected [..., K] with K >= 1"),
    "a 16-bit weight": (bad_weight_only(X, X[0]), TypeError, "weight: got Tensor, expected QuantizedRows"),
    "a weight of another depth": (
        bad_weight_only(X, rows(8, 33)), ValueError,
        "x, weight.codes: got shapes (2, 3, 32) and (8, 33), expected [..., K] and [N, K]",
    ),
    "a weight of three dimensions": (bad_weight_only(X, rows(1, 8, 32)), ValueError, "(1, 8, 32), expected [..., K]"),
    "its scale": (
        bad_weight_only(X, QuantizedRows(WEIGHT.codes, WEIGHT.scale[:7])), ValueError,
        "weight.scale: got shape (7,), expected (8,)",
    ),
    "a weight elsewhere": (
        bad_weight_only(X, QuantizedRows(*(y.to("meta") for y in WEIGHT))), ValueError,
        "weight.codes: got device meta, expected cpu as x",
    ),
    "its bias": (bad_weight_only(X, WEIGHT, vector(7)), ValueError, "bias: got shape (7,), expected (8,)"),
    "its bias elsewhere": (
        bad_weight_only(X, WEIGHT, vector(8, device="meta")), ValueError, "bias: got device meta, expected cpu"
    ),
    "its bias of integers": (bad_weight_only(X, WEIGHT, vector(8).int()), TypeError, "bias: got torch.int32, exp"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_N04_a_bad_argument_is_named(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_balance_may_be_any_positive_number():
    small = quantize_weight(X[0], balance=vector(32) / 1024)
    assert torch.equal(small.codes, quantize_weight(X[0]).codes)  # a power of two for all channels: the scale's alone


ACTIVATION = {"gain": (32,), "shift": (32,), "balance": (32,), "beside": (2, 3, 16)}
LINEAR = {"gate": (8,), "residual": (2, 3, 8)}


def calls_with(change):
    """(name of the argument, a call with it changed)."""
    yield "x", lambda: quantize_activation(change(X))
    for name, shape in ACTIVATION.items():
        yield name, lambda n=name, s=shape: quantize_activation(X, **{n: change(vector(*s))})
    for name in ("weight", "bias"):
        yield name, lambda n=name: quantize_activation(X, norm="rms", **{n: change(vector(32))})
    for name, shape in LINEAR.items():
        yield name, lambda n=name, s=shape: quantized_linear(ROWS, WEIGHT, **{n: change(vector(*s))})
    yield "bias", lambda: quantized_linear(ROWS, WEIGHT, change(vector(8)))
    yield "x", lambda: weight_only_linear(change(X), WEIGHT)
    yield "bias", lambda: weight_only_linear(X, WEIGHT, change(vector(8)))


def test_N05_gradients_are_refused_not_lost():
    for name, call in calls_with(lambda x: x.clone().requires_grad_()):
        with pytest.raises(NotImplementedError, match=f"{name}: got a tensor that requires a gradient"):
            call()
        with torch.no_grad():
            call()
    # of a module's own weights: they are no activation that somebody differentiates by
    for name, call in calls_with(torch.nn.Parameter):
        if name in ("weight", "bias"):
            result = call()
            assert not any(x.requires_grad for x in (result if isinstance(result, tuple) else (result,)))


def test_N05_tangents_are_refused_not_lost():
    for _, call in calls_with(torch.clone):
        call()
    with forward_ad.dual_level():
        for name, call in calls_with(lambda x: forward_ad.make_dual(x, torch.ones_like(x))):
            with pytest.raises(NotImplementedError, match=f"{name}: got a tangent"):
                call()
        quantized_linear(quantize_activation(X), WEIGHT)  # what has none runs
    with pytest.raises(NotImplementedError, match="x: got a tangent"):
        torch.func.jvp(lambda x: quantize_activation(x).scale, (X,), (X,))
    ops = torch.ops.sage_kernels
    for name, call in {
        "quantize_activation": lambda x: ops.quantize_activation(
            x, "int8", "none", None, None, 0.0, None, None, None, None
        )[1],
        "quantized_linear": lambda x: ops.quantized_linear(*ROWS, *WEIGHT, None, "none", None, x, torch.float32),
        "weight_only_linear": lambda x: ops.weight_only_linear(
            x, *rows(4, 8), None, "none", None, None, x.dtype, False
        ),
    }.items():
        with pytest.raises(NotImplementedError, match=f"{name}: got a call under forward-mode"):
            torch.func.jvp(call, (vector(2, 3, 8),), (vector(2, 3, 8),))
