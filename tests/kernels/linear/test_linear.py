"""The 8-bit matmul with its epilogue, against exact arithmetic on the same codes."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import QuantizedRows, quantize_weight
from sage_kernels.facts.recipe import GATED
from sage_kernels.ops.linear import interleaved
from tests.kernels.linear.linear_cases import (
    ACTIVATIONS,
    DTYPES,
    FORMATS,
    activated,
    exact,
    normal,
    oracle,
    rows,
    skip_without_fp8,
)


pytest.importorskip("triton", reason="triton is not installed")
from sage_kernels._triton.linear.tiles import LinearTile  # noqa: E402


TILES = {"pointers": LinearTile(16, 32, 32, 4, 2)}
HOPPER_TILES = {
    "hopper": LinearTile(256, 128, 128, 4, 4, "hopper"),
    "hopper, few rows": LinearTile(128, 128, 128, 4, 6, "hopper"),
}
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of NumPy: SiLU of -100
on_a_gpu = pytest.mark.parametrize("tier", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
without_reference = pytest.mark.parametrize(
    "tier", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


# each tile on the kernels; the reference has none
on_every_tile = pytest.mark.parametrize(
    ("tier", "tile"),
    [
        pytest.param("reference", None, id="reference"),
        *(pytest.param("interpreter", tile, id=f"interpreter-{name}") for name, tile in TILES.items()),
        *(
            pytest.param("cuda", tile, id=f"cuda-{name}", marks=pytest.mark.gpu)
            for name, tile in (TILES | HOPPER_TILES).items()
        ),
    ],
    indirect=["tier"],
)


def epilogue(shape, *, dtype=torch.float16):
    """gate and residual of an output [B, S, N]."""
    gate = normal(shape[0], 1, shape[2], seed=11).to(dtype)
    return {"gate": gate, "residual": normal(*shape, seed=12).to(dtype)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@on_every_tile
def test_every_activation_alone_and_with_all_that_may_follow(linears, tile, activation):
    x, weight = rows(2, 9, 96), rows(144, 96, seed=1)
    columns = 72 if activation in GATED else 144
    linears.check(x, weight, activation=activation, dtype=torch.float32, tile=tile)
    bias = normal(144, dtype=torch.float16, seed=2)
    linears.check(x, weight, bias, activation=activation, tile=tile, dtype=torch.float16, **epilogue((2, 9, columns)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@on_every_tile
def test_every_output_type(linears, tile, dtype, format):
    x, weight = rows(2, 9, 96, format=format), rows(80, 96, seed=1, format=format)
    linears.check(x, weight, normal(80, dtype=dtype, seed=2), tile=tile, dtype=dtype)
    linears.check(x, weight, normal(80, seed=2), tile=tile, dtype=dtype, **epilogue((2, 9, 80), dtype=dtype))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [1, 72, 100])
@pytest.mark.parametrize("depth", [1, 100, 272])
@on_every_tile
def test_any_number_of_columns_and_any_depth(linears, tile, depth, columns, format):
    x, weight = (
        linears.quantize(normal(5, depth), format=format),
        quantize_weight(normal(columns, depth), format=format),
    )
    assert weight.codes.stride(0) % 16 == 0
    linears.check(x, weight, normal(columns, seed=2), residual=normal(5, columns, seed=3), tile=tile)


@pytest.mark.parametrize("number", [1, 17, 65, 300])
@on_every_tile
def test_any_number_of_rows(linears, tile, number):
    x, weight = rows(number, 64), rows(72, 64, seed=1)
    out = linears.check(x, weight, tile=tile, dtype=torch.float32)
    linears.check(x, weight, residual=normal(number, 72, seed=3), tile=tile)
    last = QuantizedRows(x.codes[-1:], x.scale[-1:])
    assert torch.equal(linears.multiply(last, weight, tile=tile, dtype=torch.float32), out[-1:])


@without_reference
@pytest.mark.parametrize("number", [5, 40, 70])
@pytest.mark.parametrize("format", FORMATS)
def test_the_table_s_own_tiles(linears, number, format):
    x, weight = rows(number, 272, format=format), rows(136, 272, format=format, seed=1)
    linears.check(x, weight, normal(136, seed=2), activation="gelu_tanh")
    linears.check(x, weight, residual=normal(number, 136, seed=3))


@pytest.mark.parametrize(
    "shape",
    [(2, 1, 72), (72,), (1, 9, 72), (2, 9, 72), (1, 1, 72), (1,), (2, 9, 1), (9, 1), (2, 1, 1), (1, 72)],
)
@on_every_tile
def test_gates_of_every_shape(linears, tile, shape):
    x, weight = rows(2, 9, 64), rows(72, 64, seed=1)
    gate = normal(*shape, seed=2)
    linears.check(x, weight, gate=gate, tile=tile, dtype=torch.float32)
    one = QuantizedRows(x.codes[:1], x.scale[:1])
    if shape[0] != 2:
        linears.check(one, weight, gate=gate, tile=tile, dtype=torch.float32)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 3, 4, 64), (1, 3, 1, 64)])
def test_one_to_four_dimensions(linears, shape):
    x, weight = rows(*shape), rows(40, 64, seed=1)
    out = (*shape[:-1], 40)
    for gate in ((40,), out, (*shape[:1], *(1 for _ in shape[1:-1]), 40)[-len(shape) :]):
        linears.check(x, weight, normal(40, seed=2), gate=normal(*gate, seed=3), residual=normal(*out, seed=4))
    if len(shape) == 4:
        linears.check(x, weight, gate=normal(shape[0], 1, shape[2], 40, seed=3))
        linears.check(x, weight, gate=normal(shape[1], 1, 1, seed=3))


def test_an_empty_batch(linears):
    x = linears.quantize(torch.zeros(0, 5, 64))
    assert x.codes.shape == (0, 5, 64) and x.codes.dtype == torch.int8
    out = linears.multiply(x, rows(40, 64), activation="swiglu", residual=torch.zeros(0, 5, 20))
    assert out.shape == (0, 5, 20)


@on_every_tile
def test_strided_operands(linears, tile):
    """Views: of a wider tensor, transposed, every second row, off by one element, with stride 0."""
    wide, weight = rows(2, 6, 160), rows(72, 64, seed=1)
    bias = normal(144, seed=2)[::2]
    for codes in (
        wide.codes[..., 32:96],
        wide.codes[:, ::2, :64],
        wide.codes[..., 1:65],
        wide.codes[..., ::2][..., :64],
    ):
        x = QuantizedRows(codes, wide.scale[:, ::2] if codes.shape[1] == 3 else wide.scale)
        shape = (*codes.shape[:-1], 72)
        residuals = [
            normal(*shape[:-1], 144, seed=3)[..., 8:80], normal(shape[1], shape[0], 72, seed=3).transpose(0, 1),
            normal(*shape[:-1], 145, seed=3)[..., 1:73], normal(1, 1, 72, seed=3).expand(shape),
            normal(shape[0], 72, shape[1], seed=3).mT,
        ]  # fmt: skip
        for residual in residuals:
            gate = normal(shape[0], 72, shape[1], seed=4).mT
            linears.check(x, weight, bias, residual=residual, gate=gate, tile=tile)
    shifted = oracle(normal(72, 80, seed=1))
    linears.check(
        QuantizedRows(wide.codes[..., :64], wide.scale),
        QuantizedRows(shifted.codes[:, 3:67], shifted.scale),
        tile=tile,
    )
    linears.check(
        QuantizedRows(wide.codes[:1, :1, :64].expand(2, 6, 64), wide.scale[:1, :1].expand(2, 6)), weight, tile=tile
    )


@on_every_tile
def test_nothing_is_written_but_the_output(linears, tile):
    x, weight, bias = rows(2, 9, 64), rows(72, 64, seed=1), normal(72, seed=2)
    given = [*x, *weight, bias, *epilogue((2, 9, 72)).values()]
    before = [y.clone() for y in given]
    linears.multiply(x, weight, bias, gate=given[5], residual=given[6], tile=tile)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_long_int8_sums_are_exact(linears):
    """15,360 products of 127 · 127: beyond what fp32 counts one by one."""
    x = QuantizedRows(torch.full((3, 15360), 127, dtype=torch.int8), torch.ones(3))
    codes = torch.full((16, 15360), 127, dtype=torch.int8)
    codes[1, 5], codes[2], codes[3, ::2] = 126, -127, 0
    linears.check(x, QuantizedRows(codes, torch.ones(16)), dtype=torch.float32)


@pytest.mark.parametrize("activation", GATED)
def test_interleaved_weights_are_those_of_a_gated_module(linears, activation):
    """First half values, second half gates, as GEGLU and SwiGLU modules of diffusers have them."""
    x, weight, bias = normal(7, 256), normal(80, 256, seed=1) / 16, normal(80, seed=2)
    quantized = quantize_weight(weight, is_gated=True)
    out = linears.multiply(
        linears.quantize(x), quantized, interleaved(bias), activation=activation, dtype=torch.float32
    )
    value, gate = torch.nn.functional.linear(x, weight, bias).chunk(2, -1)
    wanted = value * activated(gate, GATED[activation])
    assert (out - wanted).norm() / wanted.norm() < 0.03


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "silu"])
@pytest.mark.filterwarnings("ignore:.*encountered in")  # of NumPy: that is what this is about
@on_every_tile
def test_N03_infinite_and_large_sums(linears, tile, activation):
    """As in fp32 PyTorch: large ones are themselves or nothing, never NaN."""
    x = QuantizedRows(torch.ones(1, 32, dtype=torch.int8), torch.ones(1))
    scale = torch.tensor([1e30, -1e30, 10.0, -10.0, 1e4, -1e4, 0.0, torch.nan])
    weight = QuantizedRows(torch.ones(8, 32, dtype=torch.int8), scale)
    out = linears.multiply(x, weight, activation=activation, tile=tile, dtype=torch.float32)[0]
    wanted = activated(32 * scale, activation)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_long_sums_of_one_sign_are_right_on_a_gpu(format):
    """FP8 matrix units cut off what they add to a long sum: 23 % of this one with torch's fast accumulation."""
    from sage_kernels import quantize_activation, quantized_linear
    from sage_kernels.ops import replay

    skip_without_fp8("cuda", format)
    x, w = (normal(n, 15360, seed=n).abs().cuda() for n in (300, 512))
    x, w = quantize_activation(x, format=format), quantize_weight(w, format=format)
    replay.forget()
    for number in (16, 64, 300):
        part = QuantizedRows(x.codes[:number], x.scale[:number])
        wanted = (part.codes.double() @ w.codes.double().mT) * part.scale.double()[:, None] * w.scale.double()
        out = quantized_linear(part, w, dtype=torch.float32)
        assert ((out.double() - wanted).abs() / wanted).max() < 0.003
    replay.forget()


def multiplied_by(monkeypatch, rows=300, depth=272, columns=264, dtype=torch.bfloat16, residual=None, capability=90):
    """(name of the kernel, programs) of a call on a GPU with 132 SMs of that capability, which launches nothing."""
    from sage_kernels._triton.linear import launch

    calls = []
    monkeypatch.setattr(launch, "capability_of", lambda device: capability)
    monkeypatch.setattr(launch, "processors_of", lambda device: 132)
    monkeypatch.setattr(launch, "launch", lambda kernel, programs, *_, **__: calls.append((kernel, programs)))
    x, w = (torch.zeros(n, depth, dtype=torch.int8) for n in (rows, columns))
    options = {"activation": "none", "gate": None, "residual": residual, "dtype": dtype}
    launch.launch_quantized_linear(x, torch.ones(rows), w, torch.ones(columns), None, **options)
    ((kernel, programs),) = calls
    return kernel.__name__, programs


def test_which_kernel_multiplies(monkeypatch):
    hopper, pointers = "linear_hopper_kernel", "_linear_kernel"
    assert multiplied_by(monkeypatch) == (hopper, 3 * 3)  # of 128 x 128: too few for larger tiles
    assert multiplied_by(monkeypatch, rows=32760, columns=4608) == (hopper, 132)
    assert multiplied_by(monkeypatch, dtype=torch.float32)[0] == hopper
    assert multiplied_by(monkeypatch, rows=64)[0] == pointers
    assert multiplied_by(monkeypatch, capability=80) == (pointers, 3 * 3)
    # rows that the copy engine can't read or write: their beginnings are no multiples of 16 bytes
    for sizes in ({"depth": 264}, {"columns": 100}, {"columns": 100, "dtype": torch.float16}):
        assert multiplied_by(monkeypatch, **sizes)[0] == pointers, sizes
    assert multiplied_by(monkeypatch, columns=100, dtype=torch.float32)[0] == hopper
    shifted = torch.zeros(300, 272)[:, 1:265]
    assert multiplied_by(monkeypatch, residual=shifted)[0] == pointers
    assert multiplied_by(monkeypatch, residual=torch.zeros(1, 264).expand(300, 264))[0] == pointers
    assert multiplied_by(monkeypatch, residual=torch.zeros(300, 264))[0] == hopper


@pytest.mark.parametrize("capability, begins", [(90, True), (80, False), (120, False)])
def test_on_hopper_the_matmul_may_begin_before_its_codes_are_made(monkeypatch, capability, begins):
    from sage_kernels._triton.linear import launch

    calls = []
    monkeypatch.setattr(launch, "capability_of", lambda device: capability)
    monkeypatch.setattr(launch, "processors_of", lambda device: 132)
    monkeypatch.setattr(launch, "launch", lambda kernel, *_, **options: calls.append(options))
    x, w = torch.zeros(300, 272), torch.zeros(264, 272, dtype=torch.int8)
    vectors = dict.fromkeys(("weight", "bias", "gain", "shift", "balance", "beside"))
    codes, scale = launch.launch_quantize_activation(x, format="int8", norm="none", eps=1e-6, **vectors)
    options = {"activation": "none", "gate": None, "residual": None, "dtype": torch.bfloat16}
    launch.launch_quantized_linear(codes, scale, w, torch.ones(264), None, **options)
    quantise, multiply = calls
    assert quantise["OVERLAP"] == begins and multiply.get("launch_pdl", False) == begins


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cuda"], indirect=True)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_never_read_before_they_are_made(linears, format):
    """Calls one behind the other, in turns of two inputs, whose codes lie in the memory of the call before; among them
    launches of others, and copies that end late."""
    from sage_kernels import quantize_activation, quantized_linear

    w = linears.to_device(rows(640, 8000, format=format, seed=1))
    inputs = [normal(2100, 8000, seed=seed).cuda() for seed in (2, 3)]
    late = torch.empty(2**26, device="cuda")
    wanted = []
    for x in inputs:
        codes = quantize_activation(x, format=format)
        torch.cuda.synchronize()
        wanted.append(quantized_linear(codes, w))
    results = []
    for i in range(30):
        if i % 5 == 4:
            late.fill_(i)
        y = quantized_linear(quantize_activation(inputs[i % 2], format=format), w)
        results.append(y + 0 if i % 3 else y)
    assert all(torch.equal(y, wanted[i % 2]) for i, y in enumerate(results))


def test_without_gluon_pointers_multiply(monkeypatch):
    from sage_kernels._triton import compat

    monkeypatch.setattr(compat, "has_gluon", lambda: False)
    assert multiplied_by(monkeypatch)[0] == "_linear_kernel"


@on_a_gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tile", HOPPER_TILES.values(), ids=HOPPER_TILES)
def test_many_tiles_a_program_and_a_ring_that_goes_round_many_times(linears, tile, format):
    """More tiles than a Hopper GPU has SMs, an odd number of slots, edges on both sides, all of the epilogue."""
    x, weight, bias = rows(3 * 700, 400, format=format), rows(1928, 400, format=format, seed=1), normal(1928, seed=2)
    gate, residual = normal(3, 1, 1928, seed=3), normal(3 * 700, 1928, seed=4)
    some = torch.tensor([0, 63, 64, 127, 128, 255, 256, 699, 700, 1399, 1400, 2047, 2048, 2099])
    few, of_rows = QuantizedRows(x.codes[some], x.scale[some]), gate[some // 700, 0]

    def check(given=x, **options):
        out = linears.multiply(given, weight, bias, tile=tile, **options).reshape(2100, -1)
        for name, value in (("gate", of_rows), ("residual", residual[some])):
            options |= {name: value.to(options[name].dtype)} if name in options and options[name].dim() > 1 else {}
        wanted, bound = exact(few, weight, bias, tier="cuda", **options)
        assert ((out[some].double() - wanted).abs() <= bound).all() and out.isfinite().all()
        return out

    samples = QuantizedRows(x.codes.view(3, 700, 400), x.scale.view(3, 700))
    both = {"gate": gate.half(), "residual": residual.view(3, 700, 1928).half(), "dtype": torch.float16}
    assert torch.equal(check(samples, **both), check(samples, **both))
    check(activation="swiglu", gate=normal(964, seed=5))
    check(residual=residual, dtype=torch.float32)


@on_a_gpu
def test_any_tile_gives_the_same_bits_of_int8(linears):
    """Sums are exact and what follows is the same for each element: tables of tiles may change, pictures do not."""
    x, weight, bias = rows(150, 400), rows(264, 400, seed=1), normal(264, seed=2)
    options = {"residual": normal(150, 264, seed=3), "dtype": torch.float32}
    assert torch.equal(*(linears.multiply(x, weight, bias, tile=tile, **options) for tile in HOPPER_TILES.values()))


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_weight_quantised_some_rows_at_a_time_has_the_same_bits(format, is_gated, monkeypatch):
    weight, balance = normal(70, 40), normal(40).abs() + 0.5
    whole = quantize_weight(weight, format=format, balance=balance, is_gated=is_gated)
    monkeypatch.setattr("sage_kernels.ops.linear.WORKED_ON", 300)  # 7 rows
    for part, expected in zip(
        quantize_weight(weight, format=format, balance=balance, is_gated=is_gated), whole, strict=True
    ):
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))
