"""`dynamic_linear` is `quantized_linear` of `quantize_activation`: their bits, their errors, in one call."""

from __future__ import annotations

import re

import pytest
import torch

from sage_kernels import QuantizedRows, dynamic_linear, quantize_activation, quantize_weight, quantized_linear
from sage_kernels.facts.recipe import GATED
from sage_kernels.ops import replay
from tests.kernels.linear.linear_cases import FORMATS, normal, skip_without_fp8
from tests.support import recording_driver


OP = torch.ops.sage_kernels.dynamic_linear.default
OF_ROWS = ("norm", "norm_weight", "norm_bias", "eps", "gain", "shift", "balance", "beside")


def vector(columns=64, seed=1, **options):
    return normal(columns, seed=seed, **options)


# what a call is given beside x [2, 9, 64] and a weight of 32 rows
OPTIONS = {
    "plain": {},
    "layer norm": {"norm": "layer", "norm_weight": vector(), "norm_bias": vector(seed=2), "eps": 1e-3},
    "modulated": {"norm": "rms", "gain": normal(2, 1, 64, seed=3), "shift": normal(2, 1, 64, seed=4)},
    "balance": {"balance": vector().abs() + 0.1},
    "beside": {"beside": normal(2, 9, 36, seed=5)},
    "gelu": {"activation": "gelu_tanh"},
    "gated": {"activation": "swiglu", "bias": vector(32)},
    "gate and residual": {"gate": normal(2, 1, 32, seed=6), "residual": normal(2, 9, 32, seed=7), "bias": vector(32)},
    "another type": {"dtype": torch.float16},
}


def weight_of(options, format="int8", device="cpu"):
    columns = 64 + (36 if "beside" in options else 0)
    weight = normal(32, columns, seed=8).to(device)
    return quantize_weight(weight, format=format, is_gated=options.get("activation") in GATED)


def in_two_calls(x, weight, options):
    rows = {name.removeprefix("norm_"): options[name] for name in OF_ROWS if name in options}
    rest = {"dtype": x.dtype} | {name: value for name, value in options.items() if name not in OF_ROWS}
    return quantized_linear(quantize_activation(x, format=weight.format, **rows), weight, **rest)


def moved(options, device):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_two_calls(linears, name, format, dtype):
    skip_without_fp8(linears.device, format)
    options = moved(OPTIONS[name], linears.device)
    options |= {"beside": options["beside"].to(dtype)} if name == "beside" else {}
    weight = weight_of(options, format, linears.device)
    for x in (normal(2, 9, 64), normal(9, 2, 64).transpose(0, 1)):
        x = x.to(linears.device, dtype)
        got = dynamic_linear(x, weight, **options)
        assert torch.equal(got, in_two_calls(x, weight, options)) and got.is_contiguous()
        assert got.isfinite().all() and got.dtype == options.get("dtype", dtype)


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64), (2, 3, 2, 64)])
def test_every_rank_and_no_rows(linears, shape):
    x, weight = normal(*shape).to(linears.device), weight_of({}, device=linears.device)
    got = dynamic_linear(x, weight)
    assert got.shape == (*shape[:-1], 32) and torch.equal(got, in_two_calls(x, weight, {}))


def test_nan_and_inf_poison_their_row_alone(linears):
    x, weight = normal(2, 9, 64).to(linears.device), weight_of({}, device=linears.device)
    right = dynamic_linear(x, weight)
    x[0, 3, 5], x[1, 2, 0] = torch.nan, torch.inf
    got = dynamic_linear(x, weight)
    assert got[0, 3].isnan().all() and got[1, 2].isnan().all()
    got[0, 3], got[1, 2] = right[0, 3], right[1, 2]
    assert torch.equal(got, right)


X = normal(2, 9, 64)
BAD = {
    "x": ({"x": X.int()}, TypeError, "x: got torch.int32"),
    "no tensor": ({"x": [1.0]}, TypeError, "x: got list, expected a tensor"),
    "columns": ({"x": X[..., :63]}, ValueError, "x.codes, weight.codes: got shapes (2, 9, 63) and (32, 64)"),
    "columns beside": ({"beside": X}, ValueError, "x.codes, weight.codes: got shapes (2, 9, 128) and (32, 64)"),
    "no rows in 8 bit": ({"weight": X[0]}, TypeError, "weight: got Tensor, expected QuantizedRows"),
    "empty weight": ({"weight": ()}, TypeError, "weight: got tuple, expected QuantizedRows (codes, scale)"),
    "weight of numbers": ({"weight": (1, 2)}, TypeError, "weight.codes: got int, expected a tensor"),
    "scale of numbers": ({"weight": (X[0].to(torch.int8), 2)}, TypeError, "weight.scale: got int, expected a tensor"),
    "norm's weight": ({"norm": "rms", "norm_weight": vector(63)}, ValueError, "norm_weight: got shape (63,), exp"),
    "no norm": ({"norm_bias": vector()}, ValueError, 'norm_weight, norm_bias: got them with norm="none"'),
    "bias": ({"bias": vector(31)}, ValueError, "bias: got shape (31,), expected (32,)"),
    "residual": ({"residual": X}, ValueError, "residual: got shape (2, 9, 64), expected (2, 9, 32)"),
    "dtype": ({"dtype": torch.float64}, TypeError, "dtype: got torch.float64"),
    "activation": ({"activation": "relu"}, ValueError, "activation: got 'relu'"),
    "elsewhere": ({"gate": vector(32).to("meta")}, ValueError, "gate: got device meta, expected cpu"),
    "gradient of x": ({"x": X.clone().requires_grad_()}, NotImplementedError, "x: got a tensor that requires"),
    "gradient of a gain": ({"gain": vector().requires_grad_()}, NotImplementedError, "gain: got a tensor that req"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_N04_a_bad_argument_is_named(name, monkeypatch):
    monkeypatch.setattr("sage_kernels.ops.linear_dynamic.run_op", lambda *_: pytest.fail("something ran"))
    options, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        dynamic_linear(**{"x": X, "weight": weight_of({})} | options)


def test_a_modules_own_parameters_leave_no_gradient():
    norm, bias = (torch.nn.Parameter(vector(n)) for n in (64, 32))
    assert not dynamic_linear(X, weight_of({}), bias, norm="rms", norm_weight=norm).requires_grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(device):
    x, weight = X.to(device), weight_of({}, device=device)
    for given in (x, x[:0], x.transpose(0, 1)):
        rows = (given, "int8", "layer", vector().to(device), None, 1e-6, None, None, None, None)
        for dtype in (torch.float16, torch.float32):
            torch.library.opcheck(OP, (*rows, *weight, vector(32).to(device), "silu", None, None, dtype))
    on_meta = dynamic_linear(X.to("meta"), QuantizedRows(*(y.to("meta") for y in weight)))
    assert on_meta.is_meta and on_meta.shape == (2, 9, 32)


def calls():
    """Each is another call than all others."""
    for name, options in OPTIONS.items():
        weight = weight_of(options)
        yield name, lambda o=options, w=weight: dynamic_linear(X, w, **o)
    plain = weight_of({})
    yield "16 bit", lambda: dynamic_linear(X.half(), plain)
    yield "fewer rows", lambda: dynamic_linear(X[:, :5], plain)
    yield "fewer columns", lambda: dynamic_linear(X, QuantizedRows(plain.codes[:16], plain.scale[:16]))
    yield "fp8", lambda: dynamic_linear(X, weight_of({}, "fp8"))
    yield "norm", lambda: dynamic_linear(X, plain, norm="rms")
    yield "eps", lambda: dynamic_linear(X, plain, norm="rms", eps=1e-5)
    # the same tensor at another place
    for name in ("gain", "shift"):
        yield f"a {name}", lambda n=name: dynamic_linear(X, plain, **{n: vector()})
    for name in ("bias", "gate"):
        yield f"a {name}", lambda n=name: dynamic_linear(X, plain, **{n: vector(32)})


def test_calls_that_differ_in_anything_have_other_keys(monkeypatch):
    seen = []

    def no_replay(op, given, options, dispatched=False):
        seen.append(replay.key_of(op, given, options))
        return None, None

    for module in ("linear", "linear_dynamic"):
        monkeypatch.setattr(f"sage_kernels.ops.{module}.try_replay", no_replay)
    number = sum(1 for _ in calls())
    for _ in range(2):
        for _, call in calls():
            call()
    for keys in ([x for x in seen if x[0] == "dynamic"], [x for x in seen if x[0] == "op dynamic_linear"]):
        assert len(keys) == 2 * number and keys[:number] == keys[number:] and len(set(keys)) == number


SCRIPT = """
import torch
from tests.support.recording_driver import install, named, record

handed = install(device=None, stream=7)
from sage_kernels._triton.linear import launch

launch.processors_of = lambda device: 132
NONE = dict.fromkeys(("weight", "bias", "shift", "balance", "beside"))

def call(x, gain, weight, scale, residual):
    rows = NONE | {"format": "int8", "norm": "rms", "eps": 1e-6, "gain": gain}
    options = {"activation": "silu", "gate": None, "residual": residual, "dtype": torch.bfloat16}
    return launch.launch_dynamic_linear(x, rows, weight, scale, None, **options)

def draw():
    vectors = torch.randn(2, 1, 64).bfloat16(), torch.zeros(32, 64, dtype=torch.int8), torch.ones(32)
    return torch.randn(2, 9, 64).bfloat16(), *vectors, torch.randn(2, 9, 32).bfloat16()

first, second = draw(), draw()
result, again = record(lambda: call(*first), first)
recorded = named(handed, first, result)
assert again is not None and len(recorded) == 2, recorded
made = again(second)
replayed = named(handed, second, made)
assert replayed == recorded, (recorded, replayed)
assert [len(again.returned), len(again.offsets)] == [1, 2]  # codes and scales are scratch
fresh = call(*second)
assert named(handed, second, fresh) == recorded
assert (made.shape, made.dtype) == (fresh.shape, fresh.dtype) and made.data_ptr() != fresh.data_ptr()
shifted = torch.empty(second[0].numel() + 1, dtype=torch.bfloat16)[1:].view(second[0].shape)
assert again((shifted, *second[1:])) is None and not handed
print("made again alike")
"""


def test_a_replayed_call_launches_what_a_new_one_would(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    done = recording_driver.run(SCRIPT, tmp_path)
    assert done.stdout == "made again alike\n", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("through_op", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_replayed_calls_read_new_numbers_and_meet_their_checks(format, through_op, monkeypatch):
    skip_without_fp8("cuda", format)
    if through_op:  # as compiled code calls it
        monkeypatch.setattr("sage_kernels.ops.linear_dynamic.try_replay", lambda *_: (None, None))
    weight = quantize_weight(normal(640, 1000, seed=8).cuda(), format=format)
    options = {"norm": "layer", "gain": normal(2, 1, 1000, seed=3).cuda(), "activation": "gelu"}
    replay.forget()
    for seed in range(4):
        x, residual = (normal(2, 333, n, seed=seed + n).cuda().bfloat16() for n in (1000, 640))
        given = options | {"residual": residual}
        assert torch.equal(dynamic_linear(x, weight, **given), in_two_calls(x, weight, given)), seed
    known = [key[0] for key in replay.replays]
    assert ("op dynamic_linear" if through_op else "dynamic") in known
    for bad, error in (({"activation": "relu"}, ValueError), ({"bias": x[0, 0]}, ValueError)):
        with pytest.raises(error):
            dynamic_linear(x, weight, **given | bad)
    with pytest.raises(NotImplementedError):
        dynamic_linear(x.requires_grad_(), weight, **given)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    x, other = (normal(2, 700, 1024, seed=n).cuda().bfloat16() for n in (0, 1))
    weight = quantize_weight(normal(512, 1024, seed=2).cuda())
    before = [dynamic_linear(x, weight, norm="rms") for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dynamic_linear(x, weight, norm="rms")
    x.copy_(other)
    graph.replay()
    assert torch.equal(out, in_two_calls(other, weight, {"norm": "rms"})) and not torch.equal(out, before[0])
