"""8-bit linear ops under what calls them: compilers, tracers, threads, autocast, CUDA graphs, calls made again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx

from sage_kernels import QuantizedRows, quantize_activation, quantize_weight, quantized_linear
from sage_kernels.ops import linear, replay
from tests.kernels.linear.linear_cases import FORMATS, normal, rows, skip_without_fp8
from tests.support import recording_driver


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device(request.param)


_OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def moved(rows: QuantizedRows, device) -> QuantizedRows:
    return QuantizedRows(*(x.to(device) for x in rows))


OPS = torch.ops.sage_kernels


@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize("format", FORMATS)
def test_opcheck_of_quantize_activation(device, format, columns):
    skip_without_fp8(device, format)
    x, vector = normal(2, 5, columns).to(device), normal(columns, seed=1).to(device)
    plain, all_of_it = (None,) * 6, (vector, vector, vector, vector, vector.abs(), None)
    wide = normal(2, 5, 2 * columns, seed=2).to(device)
    for given in (x, x.transpose(0, 1), x[:0], wide[..., ::2]):
        for norm, (weight, bias, *modulation) in (("none", plain), ("layer", all_of_it)):
            arguments = (given, format, norm, weight, bias, 1e-6, *modulation)
            torch.library.opcheck(OPS.quantize_activation.default, arguments)
        arguments = (given, format, "none", None, None, 1e-6, None, None, None, given.new_ones((*given.shape[:-1], 7)))
        torch.library.opcheck(OPS.quantize_activation.default, arguments)


@pytest.mark.parametrize("activation", ["none", "geglu"])
@pytest.mark.parametrize("format", FORMATS)
def test_opcheck_of_quantized_linear(device, format, activation):
    skip_without_fp8(device, format)
    x, weight = moved(rows(2, 5, 64, format=format), device), moved(rows(32, 64, format=format), device)
    columns = 32 if activation == "none" else 16
    gate, residual = normal(2, 1, columns).to(device), normal(2, columns, 5).to(device).mT
    # what looks for written inputs can't compare those in FP8
    options = {"test_utils": _OPCHECKS[format == "fp8" :]}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for given in ((None, activation, None, None), (normal(32).to(device), activation, gate, residual)):
            torch.library.opcheck(OPS.quantized_linear.default, (*x, *weight, *given, dtype), **options)
    empty = (x[0][:0], x[1][:0], *weight, None, activation, None, None, torch.float16)
    torch.library.opcheck(OPS.quantized_linear.default, empty, **options)


def layer(x, weight, bias, gain, shift, gate, activation="gelu_tanh"):
    """A norm with its modulation, a matmul and what follows, as a block calls them."""
    columns = quantize_activation(x, norm="layer", gain=gain, shift=shift)
    return quantized_linear(columns, weight, bias, activation=activation, gate=gate, residual=x, dtype=x.dtype)


def layer_inputs(tokens, device="cpu", dtype=torch.float32, seed=0, batch=2):
    weight = moved(quantize_weight(normal(64, 64, seed=1)), device)
    vectors = [normal(batch, 1, 64, dtype=dtype, seed=seed + n).to(device) for n in (2, 3, 4)]
    x = normal(batch, tokens, 64, dtype=dtype, seed=seed).to(device)
    return x, weight, normal(64, dtype=dtype, seed=5).to(device), *vectors


def test_compiled_in_one_graph_and_new_lengths_compile_once_more(device):
    """The first number of rows that differs makes the graph dynamic; after that none compiles again."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (6, 9, 17, 5, 33):
        given = layer_inputs(tokens, device)
        assert torch.equal(compiled(*given), layer(*given))
    assert counter.frame_count == 2
    torch._dynamo.reset()
    counter.clear()
    for tokens in (6, 9, 40):
        given = layer_inputs(tokens, device)
        torch._dynamo.mark_dynamic(given[0], 1)
        assert torch.equal(compiled(*given), layer(*given))
    assert counter.frame_count == 1


def test_compiled_with_rows_of_any_width(device):
    torch._dynamo.reset()

    def padded(x):
        codes, scale = quantize_activation(x)
        return codes.float() * scale[..., None], codes.reshape(-1)

    x = normal(3, 100).to(device)
    for a, b in zip(torch.compile(padded, fullgraph=True, backend="aot_eager")(x), padded(x), strict=True):
        assert torch.equal(a, b)


def test_tracers_see_the_ops(device):
    graph = make_fx(lambda *given: layer(given[0], QuantizedRows(*given[1:3]), *given[3:]))
    x, weight, *rest = layer_inputs(5, device)
    targets = [str(node.target) for node in graph(x, *weight, *rest).graph.nodes]
    assert "sage_kernels.quantize_activation.default" in targets and "sage_kernels.quantized_linear.default" in targets
    on_meta = layer(*(moved(y, "meta") if isinstance(y, tuple) else y.to("meta") for y in layer_inputs(5)))
    assert on_meta.shape == (2, 5, 64) and on_meta.is_meta


def test_autocast_changes_nothing(device):
    given = layer_inputs(9, device)
    wanted = layer(*given)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(layer(*given), wanted)


def test_inference_mode(device):
    given = layer_inputs(9, device)
    wanted = layer(*given)
    with torch.inference_mode():
        inside = layer(*layer_inputs(9, device))
        assert inside.is_inference() and torch.equal(inside, wanted)
    made = layer_inputs(9, device)
    with torch.inference_mode():
        codes = quantize_activation(made[0])
    assert torch.equal(quantized_linear(codes, made[1]), quantized_linear(quantize_activation(made[0]), made[1]))


def test_two_threads(device):
    given = [layer_inputs(tokens, device, seed=tokens) for tokens in (5, 9, 17, 33)]
    wanted = [layer(*x) for x in given]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            for out, right in zip(threads.map(lambda x: layer(*x), given), wanted, strict=True):
                assert torch.equal(out, right)


def negative(x):
    """x, as the negative of what lies in memory."""
    return torch._neg_view(-x)


class Logged(torch.Tensor):
    """A subclass round a tensor that sees each op."""

    seen: ClassVar[list] = []

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        plain = [x.inner if isinstance(x, cls) else x for x in args]
        return func(*plain, **kwargs or {})


@pytest.mark.parametrize("repeated", [1, 4])
def test_N06_dispatched_tensors_are_resolved(device, repeated):
    """After calls of the same layout that a GPU makes again."""
    x, weight, bias, gain, shift, gate = given = layer_inputs(9, device)
    wanted = [layer(*given) for _ in range(repeated)][-1]
    for i in (0, 2, 3, 4, 5):
        changed = list(given)
        changed[i] = negative(given[i])
        assert not replay.is_plain_call(changed[i]) and torch.equal(layer(*changed), wanted), i
    scales = QuantizedRows(weight.codes, negative(weight.scale))
    assert torch.equal(layer(x, scales, bias, gain, shift, gate), wanted)
    zeros = torch._efficientzerotensor(x.shape, dtype=x.dtype, device=device)
    assert torch.equal(layer(zeros, *given[1:]), layer(torch.zeros_like(x), *given[1:]))
    Logged.seen.clear()
    assert torch.equal(layer(Logged(x), *given[1:]), wanted)
    assert {"sage_kernels.quantize_activation.default", "sage_kernels.quantized_linear.default"} <= set(Logged.seen)


def keys_of(patch):
    """A list that grows by the key of each call, on any device."""
    seen = []

    def no_replay(op, given, options, dispatched=False):
        assert dispatched == op.startswith("op ")
        seen.append(replay.key_of(op, given, options))
        return None, None

    patch.setattr(linear, "try_replay", no_replay)
    return seen


X = normal(2, 6, 64)
VECTOR = torch.ones(64)
# each is another call than all others
ACTIVATION_CALLS = {
    "usual": lambda: quantize_activation(X, norm="rms"),
    "stride": lambda: quantize_activation(X.transpose(0, 1).contiguous().transpose(0, 1), norm="rms"),
    "shape": lambda: quantize_activation(X[:, :5], norm="rms"),
    "dtype": lambda: quantize_activation(X.half(), norm="rms"),
    "format": lambda: quantize_activation(X, norm="rms", format="fp8"),
    "norm": lambda: quantize_activation(X, norm="layer"),
    "eps": lambda: quantize_activation(X, norm="rms", eps=1e-5),
    "eps of another type": lambda: quantize_activation(X, norm="rms", eps=1),
    "eps 1.0": lambda: quantize_activation(X, norm="rms", eps=1.0),
    "weight": lambda: quantize_activation(X, norm="rms", weight=VECTOR),
    "bias": lambda: quantize_activation(X, norm="rms", bias=VECTOR),
    "gain": lambda: quantize_activation(X, norm="rms", gain=VECTOR),
    "shift": lambda: quantize_activation(X, norm="rms", shift=VECTOR),
    "shift of another shape": lambda: quantize_activation(X, norm="rms", shift=VECTOR.expand(2, 1, 64)),
    "balance": lambda: quantize_activation(X, norm="rms", balance=VECTOR),
    "beside": lambda: quantize_activation(X, norm="rms", beside=X),
    "beside of other columns": lambda: quantize_activation(X, norm="rms", beside=X[..., :32]),
}
A, W = rows(2, 6, 64), rows(32, 64, seed=1)
LINEAR_CALLS = {
    "usual": lambda: quantized_linear(A, W),
    "activation": lambda: quantized_linear(A, W, activation="silu"),
    "gated": lambda: quantized_linear(A, W, activation="swiglu"),
    "dtype": lambda: quantized_linear(A, W, dtype=torch.float16),
    "bias": lambda: quantized_linear(A, W, VECTOR[:32]),
    "bias in 16 bit": lambda: quantized_linear(A, W, VECTOR[:32].half()),
    "gate": lambda: quantized_linear(A, W, gate=VECTOR[:32]),
    "gate of each row": lambda: quantized_linear(A, W, gate=VECTOR[:32].expand(2, 6, 32)),
    "residual": lambda: quantized_linear(A, W, residual=X[..., :32]),
    "residual of other strides": lambda: quantized_linear(A, W, residual=X[..., :32].contiguous()),
    "rows": lambda: quantized_linear(QuantizedRows(A.codes[:, :5], A.scale[:, :5]), W),
    "strides": lambda: quantized_linear(QuantizedRows(A.codes.mT.contiguous().mT, A.scale), W),
    "weight": lambda: quantized_linear(A, QuantizedRows(W.codes[:16], W.scale[:16])),
    "formats": lambda: quantized_linear(rows(2, 6, 64, format="fp8"), rows(32, 64, format="fp8")),
}


@pytest.mark.parametrize("calls", [ACTIVATION_CALLS, LINEAR_CALLS], ids=["activation", "linear"])
def test_calls_that_differ_in_anything_have_other_keys(calls, monkeypatch):
    seen = keys_of(monkeypatch)
    for call in (*calls.values(), *calls.values()):
        call()
    number = len(calls)
    of_ops = [key for key in seen if key[0].startswith("op ")]  # which compiled code calls; eps is a float there
    of_functions = [key for key in seen if not key[0].startswith("op ")]
    for keys, distinct in ((of_functions, number), (of_ops, number - ("eps 1.0" in calls))):
        assert len(keys) == 2 * number and keys[:number] == keys[number:] and len(set(keys)) == distinct


def on_gpu(device, call):
    """The tensors of this file's calls, on a GPU."""
    names = ("X", "VECTOR", "A", "W")
    before = {name: globals()[name] for name in names}
    for name, x in before.items():
        globals()[name] = moved(x, device) if isinstance(x, QuantizedRows) else x.to(device)
    try:
        return call()
    finally:
        globals().update(before)


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [ACTIVATION_CALLS, LINEAR_CALLS], ids=["activation", "linear"])
def test_replayed_calls_give_the_same_bits(calls):

    def as_bits(result):
        return [x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x for x in result]

    def run(forget):
        replay.forget()
        results = []
        for call in (*calls.values(), *calls.values()):
            if forget:
                replay.forget()
            result = call()
            results.append(as_bits(result if isinstance(result, tuple) else (result,)))
        return results, len(replay.replays)

    fresh, _ = on_gpu("cuda", lambda: run(True))
    again, known = on_gpu("cuda", lambda: run(False))
    assert known > len(calls) // 2  # a view that has to be copied first is not made again
    for pair in zip(fresh, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
    for device_result, call in zip(fresh, calls.values(), strict=False):
        if len(device_result) == 1:
            torch.testing.assert_close(device_result[0].cpu(), call(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_known_call_still_meets_its_checks_and_reads_new_numbers():
    given = layer_inputs(9, "cuda", torch.float16)
    for _ in range(3):
        layer(*given)
    other = layer_inputs(9, "cuda", torch.float16, seed=40)
    again = layer(*other)
    replay.forget()
    assert torch.equal(layer(*other), again)
    with pytest.raises(NotImplementedError):
        layer(given[0].requires_grad_(), *given[1:])
    given[0].requires_grad_(False)
    with pytest.raises(ValueError):
        quantized_linear(quantize_activation(given[0]), given[1], activation="relu")


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_calls_are_captured_in_a_cuda_graph(format):
    skip_without_fp8("cuda", format)
    x, other = (normal(2, 70, 256, dtype=torch.bfloat16, seed=n).cuda() for n in (0, 1))
    weight = quantize_weight(normal(512, 256, seed=2).cuda(), format=format)

    def run():
        return quantized_linear(quantize_activation(x, norm="rms", format=format), weight, activation="swiglu")

    before, stream = run(), torch.cuda.Stream()
    run()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = run()
    x.copy_(other)
    graph.replay()
    assert torch.equal(out, run()) and not torch.equal(out, before)


SCRIPT = """
import torch
from tests.support.recording_driver import install, named, record

handed = install(device=None, stream=7)
from sage_kernels._triton.linear import launch
from sage_kernels._triton.linear.tiles import LinearTile

launch.processors_of = lambda device: 132
NONE = dict.fromkeys(("weight", "bias", "gain", "shift", "balance", "beside"))

def quantize(x, gain):
    return launch.launch_quantize_activation(x, **NONE | {"format": "int8", "norm": "rms", "eps": 1e-6, "gain": gain})

def multiply(tile):
    def call(codes, scale, weight, weight_scale, gate, residual):
        options = {"activation": "silu", "gate": gate, "residual": residual, "dtype": torch.bfloat16, "tile": tile}
        return launch.launch_quantized_linear(codes, scale, weight, weight_scale, None, **options)
    return call

def operands():
    rows = [torch.zeros(2, n, 64, dtype=torch.int8) for n in (9, 16)]
    outer = torch.randn(2, 1, 32).bfloat16(), torch.randn(2, 9, 32).bfloat16()
    return rows[0], torch.ones(2, 9), rows[1].view(32, 64), torch.ones(32), *outer

def weights_alone():
    codes = torch.zeros(2, 32, 64, dtype=torch.int8)
    return torch.randn(2, 9, 64).half(), codes.view(64, 64), torch.ones(64), torch.randn(64).half()

KINDS = {
    "rows": (quantize, lambda: (torch.randn(2, 9, 64).bfloat16(), torch.randn(2, 1, 64).bfloat16())),
    "pointers": (multiply(LinearTile(16, 32, 32, 4, 2)), operands),
    "hopper": (multiply(LinearTile(128, 128, 128, 4, 6, "hopper")), operands),
    "weights alone": (launch.launch_weight_only_linear, weights_alone),
}
for name, (call, draw) in KINDS.items():
    first, second = draw(), draw()
    results, again = record(lambda: call(*first), first)
    assert again is not None, name
    recorded = named(handed, first, results)
    assert len(recorded) == 1, name
    made = again(second)
    assert named(handed, second, made) == recorded, name
    fresh = call(*second)
    assert named(handed, second, fresh) == recorded, name
    for a, b in zip(*([x] if torch.is_tensor(x) else x for x in (made, fresh))):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype, name
    # an address that Triton would compile anew for, and tensors that are copied first
    shifted = torch.empty(second[0].numel() + 1, dtype=second[0].dtype)[1:].view(second[0].shape)
    assert again((shifted, *second[1:])) is None and not handed, name
    first = (first[0].transpose(0, 1).contiguous().transpose(0, 1), *first[1:])
    assert record(lambda: call(*first), first)[1] is None, name
    handed.clear()
print("all made again alike")
"""


def test_a_replayed_call_launches_what_a_new_one_would(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    done = recording_driver.run(SCRIPT, tmp_path)
    assert done.stdout == "all made again alike\n", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_ops_that_compiled_code_calls_are_replayed_with_their_own_tensors(format):
    skip_without_fp8("cuda", format)
    replay.forget()
    for seed in range(3):
        x, gain, residual = (normal(*shape, seed=seed).cuda() for shape in ((2, 5, 64), (2, 1, 64), (2, 5, 32)))
        weight = moved(rows(32, 64, seed=seed, format=format), "cuda")
        a = OPS.quantize_activation(x, format, "layer", None, None, 1e-6, gain, None, None, None)
        b = quantize_activation(x, format=format, norm="layer", gain=gain)
        assert all(torch.equal(m.view(torch.uint8), n.view(torch.uint8)) for m, n in zip(a, b, strict=True))
        got = OPS.quantized_linear(*a, *weight, None, "gelu_tanh", None, residual, torch.bfloat16)
        assert torch.equal(got, quantized_linear(b, weight, activation="gelu_tanh", residual=residual))
    assert {"op quantize_activation", "op quantized_linear"} <= {key[0] for key in replay.replays}
