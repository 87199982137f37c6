"""8-bit linear ops under what calls them: compilers, tracers, threads, autocast, CUDA graphs, replays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx

from sage_kernels import (
    QuantizedRows,
    dynamic_linear,
    quantize_activation,
    quantize_weight,
    quantized_linear,
    weight_only_linear,
)
from sage_kernels.ops import linear, linear_dynamic, replay
from tests.kernels.linear.linear_cases import DTYPES, FORMATS, normal, rows, skip_without_fp8
from tests.support import recording_driver


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


def moved(x, device):
    """A tensor, rows or a list of them on the device; all else as it is."""
    if isinstance(x, QuantizedRows):
        return QuantizedRows(*moved(list(x), device))
    if isinstance(x, list):
        return [moved(y, device) for y in x]
    return x.to(device) if isinstance(x, torch.Tensor) else x


# --- registration ---

OPS = torch.ops.sage_kernels
_OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check_op(name, *arguments, has_fp8=False):
    """opcheck; what looks for written inputs can't compare those in FP8."""
    torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=_OPCHECKS[has_fp8:])


@pytest.mark.parametrize("columns", [64, 100])
@pytest.mark.parametrize("format", FORMATS)
def test_opcheck_of_quantize_activation(device, format, columns):
    skip_without_fp8(device, format)
    x, vector = normal(2, 5, columns).to(device), normal(columns, seed=1).to(device)
    wide = normal(2, 5, 2 * columns, seed=2).to(device)
    for given in (x, x.transpose(0, 1), x[:0], wide[..., ::2]):
        check_op("quantize_activation", given, format, "none", None, None, 1e-6, None, None, None, None)
        check_op(
            "quantize_activation", given, format, "layer", vector, vector, 1e-6, vector, vector, vector.abs(), None
        )
        beside = given.new_ones((*given.shape[:-1], 7))
        check_op("quantize_activation", given, format, "none", None, None, 1e-6, None, None, None, beside)


@pytest.mark.parametrize("activation", ["none", "geglu"])
@pytest.mark.parametrize("format", FORMATS)
def test_opcheck_of_quantized_linear(device, format, activation):
    skip_without_fp8(device, format)
    x, weight = moved([rows(2, 5, 64, format=format), rows(32, 64, format=format)], device)
    columns = 32 if activation == "none" else 16
    gate, residual = normal(2, 1, columns).to(device), normal(2, columns, 5).to(device).mT
    for dtype in DTYPES:
        for given in ((None, activation, None, None), (normal(32).to(device), activation, gate, residual)):
            check_op("quantized_linear", *x, *weight, *given, dtype, has_fp8=format == "fp8")
    empty = (x[0][:0], x[1][:0], *weight, None, activation, None, None, torch.float16)
    check_op("quantized_linear", *empty, has_fp8=format == "fp8")


def test_opcheck_of_weights_alone_and_of_both_steps_in_one(device):
    weight = moved(rows(40, 64, seed=1), device)
    bias, vector = normal(40, seed=2).to(device), normal(64, seed=3).to(device)
    for dtype in DTYPES:
        x = normal(5, 64, dtype=dtype).to(device)
        for one, b in (
            (x, None),
            (x, bias),
            (x[:0], bias),
            (x[0], None),
            (x[None, None], bias),
            (x.mT.contiguous().mT, None),
        ):
            check_op("weight_only_linear", one, *weight, b, "none", None, None, dtype, False)
        for one in (x, x[:0], x.mT.contiguous().mT):
            of_rows = (one, "int8", "layer", vector, None, 1e-6, None, None, None, None)
            check_op("dynamic_linear", *of_rows, *weight, bias, "silu", None, None, dtype)


# --- whoever calls ---


def two_calls(x, weight, bias, gain, shift, gate):
    """A norm with its modulation, a matmul and what follows, as a block calls them."""
    format = "int8" if weight.codes.dtype == torch.int8 else "fp8"
    columns = quantize_activation(x, norm="layer", gain=gain, shift=shift, format=format)
    return quantized_linear(columns, weight, bias, activation="gelu_tanh", gate=gate, residual=x, dtype=x.dtype)


def one_call(x, weight, bias, gain, shift, gate):
    """The same by `dynamic_linear`; a call in which two tensors share their memory is never replayed."""
    rest = {"activation": "gelu_tanh", "gate": gate, "residual": x.clone()}
    return dynamic_linear(x, weight, bias, norm="layer", gain=gain, shift=shift, **rest)


def weights_alone(x, weight, bias, gain, shift, gate):
    """The product and what follows by `weight_only_linear`."""
    return weight_only_linear(x * gain + shift, weight, bias, activation="gelu_tanh", gate=gate, residual=x)


LAYERS = {
    two_calls: {"quantize_activation", "quantized_linear"},
    one_call: {"dynamic_linear"},
    weights_alone: {"weight_only_linear"},
}
every_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)


def layer_inputs(tokens, device="cpu", dtype=torch.float32, seed=0, format="int8"):
    weight = quantize_weight(normal(64, 64, seed=1), format=format)
    vectors = [normal(2, 1, 64, dtype=dtype, seed=seed + n) for n in (2, 3, 4)]
    return moved(
        [normal(2, tokens, 64, dtype=dtype, seed=seed), weight, normal(64, dtype=dtype, seed=5), *vectors], device
    )


@every_layer
def test_compiled_in_one_graph_and_new_lengths_compile_once_more(device, layer):
    """The first number of rows that differs makes the graph dynamic; after that none compiles again."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for is_marked, frames in ((False, 2), (True, 1)):
        torch._dynamo.reset()
        counter.clear()
        for tokens in (6, 9, 17, 5):
            given = layer_inputs(tokens, device)
            if is_marked:
                torch._dynamo.mark_dynamic(given[0], 1)
            assert torch.equal(compiled(*given), layer(*given))
        assert counter.frame_count == frames


def test_compiled_with_rows_of_any_width(device):
    torch._dynamo.reset()

    def padded(x):
        codes, scale = quantize_activation(x)
        return codes.float() * scale[..., None], codes.reshape(-1)

    x = normal(3, 100).to(device)
    for a, b in zip(torch.compile(padded, fullgraph=True, backend="aot_eager")(x), padded(x), strict=True):
        assert torch.equal(a, b)


@every_layer
def test_tracers_autocast_and_inference_mode(device, layer):
    given = layer_inputs(5, device)
    x, weight, *rest = given
    wanted = layer(*given)
    graph = make_fx(lambda x, codes, scale, *rest: layer(x, QuantizedRows(codes, scale), *rest))(
        x, *weight, *rest
    ).graph
    seen = {str(node.target) for node in graph.nodes}
    assert {f"sage_kernels.{name}.default" for name in LAYERS[layer]} <= seen
    on_meta = layer(*moved(given, "meta"))
    assert on_meta.shape == wanted.shape and on_meta.is_meta
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(layer(*given), wanted)
    with torch.inference_mode():
        inside = layer(*layer_inputs(5, device))
        assert inside.is_inference() and torch.equal(inside, wanted)
    assert not layer(x, weight, torch.nn.Parameter(rest[0]), *rest[1:]).requires_grad


def test_two_threads(device):
    given = [layer_inputs(tokens, device, seed=tokens) for tokens in (5, 9, 17, 33)]
    wanted = [two_calls(*x) for x in given]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            for out, right in zip(threads.map(lambda x: two_calls(*x), given), wanted, strict=True):
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


@every_layer
@pytest.mark.parametrize("repeated", [1, 4])
def test_N06_dispatched_tensors_are_resolved(device, repeated, layer):
    """After calls of the same layout that a GPU replays."""
    x, weight, *rest = given = layer_inputs(9, device)
    wanted = [layer(*given) for _ in range(repeated)][-1]
    for i in (0, 2, 3, 4, 5):
        changed = list(given)
        changed[i] = negative(given[i])
        assert not replay.is_plain_call(changed[i]) and torch.equal(layer(*changed), wanted), i
    assert torch.equal(layer(x, QuantizedRows(weight.codes, negative(weight.scale)), *rest), wanted)
    zeros = torch._efficientzerotensor(x.shape, dtype=x.dtype, device=device)
    assert torch.equal(layer(zeros, *given[1:]), layer(torch.zeros_like(x), *given[1:]))
    if layer is not weights_alone:  # which first multiplies the subclass itself
        Logged.seen.clear()
        assert torch.equal(layer(Logged(x), *given[1:]), wanted)
        assert {f"sage_kernels.{name}.default" for name in LAYERS[layer]} <= set(Logged.seen)


@pytest.mark.gpu
@every_layer
@pytest.mark.parametrize("format", FORMATS)
def test_calls_are_captured_in_a_cuda_graph(format, layer):
    skip_without_fp8("cuda", format)
    given, other = (layer_inputs(700, "cuda", torch.bfloat16, seed, format) for seed in (0, 40))
    before = [layer(*given) for _ in range(2)]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = layer(*given)
    given[0].copy_(other[0])
    graph.replay()
    assert torch.equal(out, layer(*given)) and not torch.equal(out, before[0])


# --- replays ---

X, VECTOR, W32 = normal(2, 6, 64), torch.ones(64), torch.ones(32)
A, W = rows(2, 6, 64), rows(32, 64, seed=1)
FEWER = QuantizedRows(W.codes[:16], W.scale[:16])
# what follows a product: each is another call than all others
FINISHES = {
    "usual": {},
    "activation": {"activation": "silu"},
    "gated": {"activation": "swiglu"},
    "dtype": {"dtype": torch.float16},
    "bias": {"bias": W32},
    "bias in 16 bit": {"bias": W32.half()},
    "gate": {"gate": W32},
    "gate of each row": {"gate": W32.expand(2, 6, 32)},
    "residual": {"residual": X[..., :32]},
    "residual of other strides": {"residual": X[..., :32].contiguous()},
    "weight": {"weight": FEWER},
}
# how rows are quantised: the same
OF_ROWS = {
    "norm": {"norm": "layer"},
    "eps": {"eps": 1e-5},
    "eps of another type": {"eps": 1},
    "eps 1.0": {"eps": 1.0},
    "gain": {"gain": VECTOR},
    "shift": {"shift": VECTOR},
    "shift of another shape": {"shift": VECTOR.expand(2, 1, 64)},
    "balance": {"balance": VECTOR},
}
INPUTS = {
    "stride": {"x": X.transpose(0, 1).contiguous().transpose(0, 1)},
    "shape": {"x": X[:, :5]},
    "dtype of x": {"x": X.half()},
}


# op → function, its usual arguments, and what makes another call of them
CALLS = {
    "quantize_activation": (
        quantize_activation, {"x": X, "norm": "rms"},
        INPUTS | OF_ROWS | {
            "usual": {}, "format": {"format": "fp8"}, "weight": {"weight": VECTOR}, "bias": {"bias": VECTOR},
            "beside": {"beside": X}, "beside of other columns": {"beside": X[..., :32]},
        },
    ),
    "quantized_linear": (
        quantized_linear, {"x": A, "weight": W},
        FINISHES | {
            "rows": {"x": QuantizedRows(A.codes[:, :5], A.scale[:, :5])},
            "strides": {"x": QuantizedRows(A.codes.mT.contiguous().mT, A.scale)},
            "formats": {"x": rows(2, 6, 64, format="fp8"), "weight": rows(32, 64, format="fp8")},
        },
    ),
    "weight_only_linear": (
        weight_only_linear, {"x": X, "weight": W},
        INPUTS | FINISHES | {
            "invariant": {"batch_invariant": True},
            "codes of other strides": {"weight": QuantizedRows(W.codes.mT.contiguous().mT, W.scale)},
        },
    ),
    "dynamic_linear": (
        dynamic_linear, {"x": X, "weight": W, "norm": "rms"},
        INPUTS | OF_ROWS | FINISHES | {
            "fp8": {"weight": rows(32, 64, format="fp8")}, "norm's weight": {"norm_weight": VECTOR},
            "norm's bias": {"norm_bias": VECTOR},
            "beside": {"beside": X[..., :36], "weight": rows(32, 100)},
        },
    ),
}  # fmt: skip
every_op = pytest.mark.parametrize("op", CALLS)


def calls_of(op, device="cpu"):
    """(name, call) of each call of an op, with tensors on the device."""
    function, usual, changes = CALLS[op]
    for name, change in changes.items():
        given = {n: moved(x, device) for n, x in (usual | change).items()}
        yield name, lambda given=given: function(**given)


@every_op
def test_calls_that_differ_in_anything_have_other_keys(op, monkeypatch):
    seen = []

    def no_replay(op, given, options, dispatched=False):
        assert dispatched == op.startswith("op ")
        seen.append(replay.key_of(op, given, options))
        return None, None

    for module in (linear, linear_dynamic):
        monkeypatch.setattr(module, "try_replay", no_replay)
    for _ in range(2):
        for _, call in calls_of(op):
            call()
    number = len(CALLS[op][2])
    for is_op in (False, True):  # those that compiled code calls; eps is a float there
        keys = [key for key in seen if key[0].startswith("op ") == is_op]
        distinct = number - (is_op and "eps 1.0" in CALLS[op][2])
        assert len(keys) == 2 * number and keys[:number] == keys[number:] and len(set(keys)) == distinct


@pytest.mark.gpu
@every_op
def test_replayed_calls_give_the_same_bits(op):
    def as_bits(result):
        tensors = result if isinstance(result, tuple) else (result,)
        return [x.view(torch.int8) if x.dtype == torch.float8_e4m3fn else x for x in tensors]

    def run(forget):
        replay.forget()
        results = []
        for _ in range(2):
            for _, call in calls_of(op, "cuda"):
                if forget:
                    replay.forget()
                results.append(as_bits(call()))
        return results, len(replay.replays)

    (fresh, _), (again, known) = run(True), run(False)
    assert known > len(CALLS[op][2]) // 2  # a view that has to be copied first is not replayed
    for pair in zip(fresh, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
    for on_gpu, (_, call) in zip(fresh, calls_of(op), strict=False):
        if len(on_gpu) == 1:
            torch.testing.assert_close(on_gpu[0].cpu(), call(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@every_layer
@pytest.mark.parametrize("through_op", [False, True])
def test_a_known_call_still_meets_its_checks_and_reads_new_numbers(layer, through_op, monkeypatch):
    if through_op:  # as compiled code calls it
        for module in (linear, linear_dynamic):
            monkeypatch.setattr(module, "try_replay", lambda op, *given, dispatched=False: (
                replay.try_replay(op, *given, dispatched=True) if dispatched else (None, None)
            ))  # fmt: skip
    replay.forget()
    given = layer_inputs(9, "cuda", torch.float16)
    for _ in range(3):
        layer(*given)
    assert {key[0].removeprefix("op ") for key in replay.replays} and (
        all(key[0].startswith("op ") == through_op for key in replay.replays)
    )
    other = layer_inputs(9, "cuda", torch.float16, seed=40)
    again = layer(*other)
    replay.forget()
    assert torch.equal(layer(*other), again)
    for error, changed in ((NotImplementedError, given[0].requires_grad_()), (TypeError, given[0].detach().double())):
        with pytest.raises(error):
            layer(changed, *given[1:])


SCRIPT = """
import torch
from tests.support.recording_driver import install, record, replayed

handed = install(device=None, stream=7)
from sage_kernels._triton.linear import launch
from sage_kernels._triton.linear.tiles import LinearTile

launch.processors_of = lambda device: 132

def quantize(x, gain):
    return launch.launch_quantize_activation(x, "int8", "rms", None, None, 1e-6, gain, None, None, None)

def multiply(tile):
    def call(codes, scale, weight, weight_scale, gate, residual):
        finish = (None, "silu", gate, residual, torch.bfloat16)
        return launch.launch_quantized_linear(codes, scale, weight, weight_scale, *finish, tile=tile)
    return call

def both(x, gain, weight, scale, residual):
    rows = (x, "int8", "rms", None, None, 1e-6, gain, None, None, None)
    return launch.launch_dynamic_linear(rows, (weight, scale, None, "silu", None, residual, torch.bfloat16))

def codes(*shape):
    return torch.zeros(shape, dtype=torch.int8)

def operands():
    outer = torch.randn(2, 1, 32).bfloat16(), torch.randn(2, 9, 32).bfloat16()
    return codes(2, 9, 64), torch.ones(2, 9), codes(32, 64), torch.ones(32), *outer

def activation():
    return torch.randn(2, 9, 64).bfloat16(), torch.randn(2, 1, 64).bfloat16()

KINDS = {
    "rows": (quantize, activation),
    "pointers": (multiply(LinearTile(16, 32, 32, 4, 2)), operands),
    "hopper": (multiply(LinearTile(128, 128, 128, 4, 6, "hopper")), operands),
    "weights alone": (launch.launch_weight_only_linear,
                      lambda: (torch.randn(2, 9, 64).half(), codes(64, 64), torch.ones(64), torch.randn(64).half())),
    "both": (both, lambda: (*activation(), codes(32, 64), torch.ones(32), torch.randn(2, 9, 32).bfloat16())),
}
for name, (call, draw) in KINDS.items():
    again, lines = replayed(handed, name, call, draw(), draw())
    assert len(lines) == 1 + (name == "both"), name
    if name == "both":
        assert [len(again.returned), len(again.offsets)] == [1, 2]  # codes and scales are scratch
    # tensors that are copied first
    first = draw()
    first = (first[0].transpose(0, 1).contiguous().transpose(0, 1), *first[1:])
    assert record(lambda: call(*first), first)[1] is None, name
    handed.clear()
print("all made again alike")
"""


def test_a_replayed_call_launches_what_a_new_one_would(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    done = recording_driver.run(SCRIPT, tmp_path)
    assert done.stdout == "all made again alike\n", done.stderr[-3000:]
