"""16-bit rows times a weight in 8 bit: the kernel and the reference against exact arithmetic on the same codes."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx

from sage_kernels import QuantizedRows, quantize_weight, weight_only_linear
from sage_kernels.ops import linear, replay
from tests.kernels.linear.linear_cases import DTYPES, FORMATS, normal
from tests.support import recording_driver


pytest.importorskip("triton", reason="triton is not installed")
from sage_kernels._triton.linear.tiles import FewRowsTile  # noqa: E402


TILES = {
    "one row of tiles": FewRowsTile(16, 32, 32, 2, 2, parts=3),
    "many": FewRowsTile(32, 64, 64, 4, 2),
    "lanes": FewRowsTile(8, 16, 32, 4, 3, lanes=4, prefetch=128),
    "many parts": FewRowsTile(64, 64, 32, 4, 3, parts=8),
    "lanes and parts": FewRowsTile(8, 16, 16, 2, 2, lanes=2, parts=2),
}
on_every_tile = pytest.mark.parametrize(
    ("tier", "tile"),
    [
        pytest.param("reference", None, id="reference"),
        *(pytest.param("interpreter", tile, id=f"interpreter-{name}") for name, tile in TILES.items()),
        *(pytest.param("cuda", tile, id=f"cuda-{name}", marks=pytest.mark.gpu) for name, tile in TILES.items()),
    ],
    indirect=["tier"],
)


def weight(columns, depth, seed=1):
    return quantize_weight(normal(columns, depth, seed=seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [1, 8, 17, 70])
@on_every_tile
def test_every_type_and_any_number_of_rows(linears, tile, number, dtype):
    x, w = normal(number, 96, dtype=dtype), weight(72, 96)
    linears.check_weight_only(x, w, tile=tile)
    for bias in (normal(72, dtype=dtype, seed=2), normal(72, seed=3)):
        linears.check_weight_only(x, w, bias, tile=tile)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [3, 12, 30, 70])
def test_the_table_s_own_tiles(linears, number, dtype):
    """Of narrow, middle and wide weights on a GPU."""
    for columns in (136, 5000, 8200, 12800) if linears.tier == "cuda" else (136,):
        w = weight(columns, 1552)
        linears.check_weight_only(normal(number, 1552, dtype=dtype), w, normal(columns, seed=2))


@pytest.mark.parametrize("activation", ["none", "silu", "swiglu"])
@on_every_tile
def test_what_follows_a_product(linears, tile, activation):
    """Activation, gate and residual, of INT8 and e4m3 weights; the output in another type than the input's."""
    for format in FORMATS:
        w = quantize_weight(normal(72, 200, seed=1), format=format)
        columns = 36 if activation == "swiglu" else 72
        options = {"gate": normal(2, 1, columns, seed=3), "residual": normal(2, 5, columns, seed=4)}
        x = normal(2, 5, 200, dtype=torch.float16)
        for given in ({}, options, options | {"dtype": torch.float32, "gate": None}):
            linears.check_weight_only(x, w, normal(72, seed=2), tile=tile, activation=activation, **given)


def test_rows_of_a_matrix_in_turns(linears):
    """Of value and gate: every second row, and every second scale."""
    x, whole = normal(5, 96, dtype=torch.float16), weight(144, 96)
    for first in (0, 1):
        linears.check_weight_only(x, QuantizedRows(whole.codes[first::2], whole.scale[first::2]))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("columns", "depth"), [(4096, 4096), (6144, 2048), (12800, 1024)])
def test_batch_invariant(columns, depth, format):
    """A row has the same bits alone and beside others. Without the option equal calls have equal bits."""
    w = QuantizedRows(*(y.cuda() for y in quantize_weight(normal(columns, depth, seed=1), format=format)))
    x = normal(130, depth, dtype=torch.bfloat16).cuda()
    whole = weight_only_linear(x, w, batch_invariant=True)
    for rows in (1, 2, 7, 8, 9, 16, 31, 64, 65):
        assert torch.equal(weight_only_linear(x[:rows], w, batch_invariant=True), whole[:rows])
        first = weight_only_linear(x[:rows], w)
        torch.empty(rows, columns, device="cuda").fill_(torch.nan)  # what the next call's sums may be allocated in
        assert all(torch.equal(weight_only_linear(x[:rows], w), first) for _ in range(5))


@pytest.mark.gpu
def test_a_chain_of_launches_that_overlap():
    """Each product reads the one before, in a graph: a launch that began early must have waited."""
    weights = [QuantizedRows(*(y.cuda() for y in quantize_weight(normal(2048, 2048, seed=i) / 45))) for i in range(6)]
    for rows in (1, 12, 30, 64):
        x = normal(rows, 2048, dtype=torch.bfloat16).cuda()

        def chain(x):
            for w in weights:
                x = weight_only_linear(x, w, residual=x)
            return x

        def one_by_one(x):
            for w in weights:
                x = weight_only_linear(x, w, residual=x)
                torch.cuda.synchronize()
            return x

        wanted = one_by_one(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x)
        for _ in range(20):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("columns", [1, 72, 101])
@pytest.mark.parametrize("depth", [1, 99, 272])
@on_every_tile
def test_any_number_of_columns_and_any_depth(linears, tile, depth, columns):
    for dtype in (torch.float16, torch.float32):
        x, w = normal(5, depth, dtype=dtype), weight(columns, depth)
        assert w.codes.stride(0) % 16 == 0
        linears.check_weight_only(x, w, normal(columns, seed=2), tile=tile)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 3, 4, 64), (1, 3, 1, 64)])
def test_one_to_four_dimensions(linears, shape):
    linears.check_weight_only(normal(*shape), weight(40, 64), normal(40, seed=2))


def test_an_empty_batch(linears):
    for dtype in DTYPES:
        out = linears.weight_only(torch.zeros(0, 5, 64, dtype=dtype), weight(40, 64), normal(40))
        assert out.shape == (0, 5, 40)


@on_every_tile
def test_strided_operands(linears, tile):
    """Views: of a wider tensor, transposed, every second row, off by one element, with stride 0."""
    wide, w, bias = normal(2, 6, 160, dtype=torch.float16), weight(72, 64), normal(144, seed=2)[::2]
    for x in (
        wide[..., 32:96], wide[:, ::2, :64], wide[..., 1:65], wide[..., ::2][..., :64],
        wide[:, :, :64].transpose(0, 1), wide[:1, :1, :64].expand(2, 6, 64), normal(2, 64, 6).mT,
    ):  # fmt: skip
        linears.check_weight_only(x, w, bias, tile=tile)
    shifted = weight(144, 80)
    w = QuantizedRows(shifted.codes[::2, 3:67], shifted.scale[::2])
    linears.check_weight_only(wide[..., :64], w, tile=tile)


@on_every_tile
def test_a_row_does_not_depend_on_the_others(linears, tile):
    x, w = normal(20, 100), weight(40, 100)
    if linears.tier != "cuda":
        x = (8 * x).round()  # exact sums: BLAS, the interpreter's too, adds each row in another order
    whole = linears.weight_only(x, w, tile=tile)
    for i in (0, 19):
        assert torch.equal(linears.weight_only(x[i], w, tile=tile), whole[i])


@on_every_tile
def test_sums_of_integers_are_exact(linears, tile):
    """127 · 127, 1,000 times, in fp16, whose largest number is 65,504: the sums are fp32."""
    x = torch.full((2, 1000), 127.0, dtype=torch.float16)
    codes = torch.full((3, 1000), 127, dtype=torch.int8)
    codes[1], codes[2, ::2] = -127, 0
    out = linears.weight_only(x, QuantizedRows(codes, torch.full((3,), 2.0**-14)), tile=tile)
    assert out.tolist() == [[984.5, -984.5, 492.25]] * 2  # 16,129,000 / 2^14 = 984.436, to the next 0.5


@pytest.mark.filterwarnings("ignore:.*encountered in")  # of NumPy: that is what this is about
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@on_every_tile
def test_what_is_not_finite_poisons_its_own_row_alone(linears, tile, value, dtype):
    x, w, bias = normal(2, 9, 72, dtype=dtype), weight(40, 72), normal(40, seed=2)
    clean = linears.weight_only(x, w, bias, tile=tile)
    x[1, 3, 70] = value
    got = linears.weight_only(x, w, bias, tile=tile)
    in_16_bit = torch.nn.functional.linear(x.float(), w.codes * w.scale[:, None], bias)
    assert torch.equal(got.isfinite(), in_16_bit.isfinite())
    others = torch.ones(2, 9, dtype=torch.bool)
    others[1, 3] = False
    assert torch.equal(got[others], clean[others]) and not got[1, 3].isfinite().any()


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_what_fp16_cannot_hold_is_infinite(linears):
    x, w = (
        torch.full((2, 64), 6e4, dtype=torch.float16),
        QuantizedRows(torch.ones(4, 64).to(torch.int8), torch.ones(4)),
    )
    assert linears.weight_only(x, w, -torch.full((4,), 1e5)).tolist() == [[torch.inf] * 4] * 2
    assert linears.weight_only(x, w, torch.full((4,), -64 * 6e4)).tolist() == [[0.0] * 4] * 2


def test_it_is_nearer_than_with_rows_in_8_bit(linears):
    x, w = normal(8, 1024), normal(96, 1024, seed=1)
    wanted, rows = x.double() @ w.double().mT, quantize_weight(w)
    errors = [
        float((out.double() - wanted).norm() / wanted.norm())
        for out in (
            linears.weight_only(x, rows),
            linears.multiply(linears.quantize(x), rows, dtype=torch.float32),
        )
    ]
    # half a step of 127 levels of the largest of 1,024 N(0, 1), uniform: 3.2 / 127 / sqrt(12)
    assert errors[0] < 1.2 * 3.2 / 127 / 12**0.5 and errors[0] < 0.8 * errors[1]


# --- what calls it ---


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device(request.param)


def given(rows, device="cpu", dtype=torch.float32):
    w = QuantizedRows(*(x.to(device) for x in weight(40, 64)))
    return normal(rows, 64, dtype=dtype).to(device), w, normal(40, seed=2).to(device)


def test_opcheck(device):
    op = torch.ops.sage_kernels.weight_only_linear.default
    for dtype in DTYPES:
        x, w, bias = given(5, device, dtype)
        for one, b in (
            (x, None),
            (x, bias),
            (x[:0], bias),
            (x[0], None),
            (x[None, None], bias),
            (x.mT.contiguous().mT, None),
        ):
            torch.library.opcheck(op, (one, *w, b, "none", None, None, dtype, False))


def test_compiled_in_one_graph_and_new_lengths_compile_once_more(device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(weight_only_linear, fullgraph=True, backend=counter)
    for rows in (6, 9, 17, 5):
        assert torch.equal(compiled(*given(rows, device)), weight_only_linear(*given(rows, device)))
    assert counter.frame_count == 2


def test_tracers_autocast_and_inference_mode(device):
    x, w, bias = given(5, device)
    wanted = weight_only_linear(x, w, bias)
    graph = make_fx(lambda x, codes, scale, bias: weight_only_linear(x, QuantizedRows(codes, scale), bias))
    targets = [str(node.target) for node in graph(x, *w, bias).graph.nodes]
    assert "sage_kernels.weight_only_linear.default" in targets
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(weight_only_linear(x, w, bias), wanted)
    with torch.inference_mode():
        assert torch.equal(weight_only_linear(x.clone(), w, bias), wanted)
    negative = torch._neg_view(-x)
    assert torch.equal(weight_only_linear(negative, w, bias), wanted)
    meta = weight_only_linear(x.to("meta"), QuantizedRows(*(y.to("meta") for y in w)))
    assert meta.shape == (5, 40) and meta.is_meta
    assert not weight_only_linear(x, w, torch.nn.Parameter(bias)).requires_grad


X, W = normal(2, 6, 64), weight(32, 64)
# each is another call than all others
CALLS = {
    "usual": lambda: weight_only_linear(X, W),
    "shape": lambda: weight_only_linear(X[:, :5], W),
    "stride": lambda: weight_only_linear(X.mT.contiguous().mT, W),
    "dtype": lambda: weight_only_linear(X.half(), W),
    "bias": lambda: weight_only_linear(X, W, torch.ones(32)),
    "bias in 16 bit": lambda: weight_only_linear(X, W, torch.ones(32).half()),
    "activation": lambda: weight_only_linear(X, W, activation="silu"),
    "pairs": lambda: weight_only_linear(X, W, activation="swiglu"),
    "gate": lambda: weight_only_linear(X, W, gate=torch.ones(32)),
    "residual": lambda: weight_only_linear(X, W, residual=torch.ones(2, 6, 32)),
    "output": lambda: weight_only_linear(X, W, dtype=torch.float16),
    "invariant": lambda: weight_only_linear(X, W, batch_invariant=True),
    "weight": lambda: weight_only_linear(X, QuantizedRows(W.codes[:16], W.scale[:16])),
    "codes of other strides": lambda: weight_only_linear(X, QuantizedRows(W.codes.mT.contiguous().mT, W.scale)),
}


def test_calls_that_differ_in_anything_have_other_keys(monkeypatch):
    seen = []

    def no_replay(op, given, options, dispatched=False):
        seen.append(replay.key_of(op, given, options))
        return None, None

    monkeypatch.setattr(linear, "try_replay", no_replay)
    for call in (*CALLS.values(), *CALLS.values()):
        call()
    number = len(CALLS)
    for is_op in (False, True):  # those that compiled code calls
        keys = [key for key in seen if key[0].startswith("op ") == is_op]
        assert len(keys) == 2 * number and keys[:number] == keys[number:] and len(set(keys)) == number


@pytest.mark.gpu
def test_replayed_calls_and_captured_give_the_same_bits():
    replay.forget()
    x, w, bias = given(3, "cuda", torch.bfloat16)
    first = weight_only_linear(x, w, bias)
    assert len(replay.replays) == 1
    assert all(torch.equal(weight_only_linear(x, w, bias), first) for _ in range(3))
    op = torch.ops.sage_kernels.weight_only_linear
    rest = ("none", None, None, torch.bfloat16, False)
    assert all(torch.equal(op(x, *w, bias, *rest), first) for _ in range(3)) and len(replay.replays) == 2
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = weight_only_linear(x, w, bias)
    wanted = weight_only_linear(x.neg_(), w, bias)
    graph.replay()
    assert torch.equal(out, wanted) and not torch.equal(out, first)


SCRIPT = """
import torch
from tests.support.recording_driver import install, named, record

handed = install(device=None, stream=7)
from sage_kernels._triton.linear import launch

def call(x, codes, scale, bias):
    return launch.launch_weight_only_linear(x, codes, scale, bias)

def draw():
    codes = torch.zeros(2, 32, 64, dtype=torch.int8)
    return torch.randn(2, 9, 64).half(), codes.view(64, 64), torch.ones(64), torch.randn(64).half()

first, second = draw(), draw()
result, again = record(lambda: call(*first), first)
assert again is not None
recorded = named(handed, first, result)
assert len(recorded) == 1
made = again(second)
assert named(handed, second, made) == recorded
fresh = call(*second)
assert named(handed, second, fresh) == recorded
made, fresh = ([x] if torch.is_tensor(x) else x for x in (made, fresh))
assert made[0].shape == fresh[0].shape and made[0].dtype == fresh[0].dtype
print("made again alike")
"""


@pytest.mark.slow("a process; that of test_linear_runtime launches it, too")
def test_a_replayed_call_launches_what_a_new_one_would(tmp_path):
    done = recording_driver.run(SCRIPT, tmp_path)
    assert done.stdout == "made again alike\n", done.stderr[-3000:]
