"""The last tiles of a matmul on Hopper, each shared by some programs: what they share, and how that is added up."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import QuantizedRows
from sage_kernels._triton.linear import launch
from sage_kernels._triton.linear.tiles import LinearTile, split_last_tiles
from sage_kernels.facts.recipe import GATED
from tests.kernels.linear.linear_cases import FORMATS, exact, normal, rows


WIDE, SMALL = LinearTile(256, 128, 128, 4, 4, "hopper"), LinearTile(128, 128, 128, 4, 6, "hopper")
BLOCK_K = 128
SMS = 132  # of an H200


def test_which_tiles_are_shared():
    """FLUX's projections, and what there is nothing to gain from."""
    assert split_last_tiles(WIDE, 18 * 24, SMS, 12288) == (3 * SMS, 3)
    assert split_last_tiles(WIDE, 18 * 96, SMS, 3072) == (13 * SMS, 6)
    assert split_last_tiles(WIDE, 18 * 72, SMS, 3072) == (18 * 72, 1)  # 108 of 132 have work in the last round
    assert split_last_tiles(WIDE, 18 * 24, SMS, 3072) == (18 * 24, 1)  # 2,048 channels would be saved
    assert split_last_tiles(WIDE, 3 * SMS, SMS, 12288) == (3 * SMS, 1)
    assert split_last_tiles(SMALL, 288, SMS, 3072) == (288, 1)  # text: too little
    assert split_last_tiles(SMALL, 12, SMS, 15360) == (0, 11)


@pytest.mark.parametrize("tile", [WIDE, SMALL])
def test_every_channel_of_every_tile_is_multiplied_once(tile):
    """By the rule of `unit_of` (linear/hopper/producer.py), whose numbers these are."""
    for processors in (1, 78, SMS):
        for tiles in (1, 11, 100, SMS, 432, 1728):
            for depth in (1, 500, 3072, 3100, 15361):
                whole, parts = split_last_tiles(tile, tiles, processors, depth)
                shared = tiles - whole
                assert 0 <= whole <= tiles and parts >= 1 and (parts > 1) == (shared > 0)
                assert shared * parts <= processors or not shared
                assert whole % processors == 0 or not shared  # else hopper/ waits for ever: types.Sizes
                slots = -(-depth // BLOCK_K)
                ends = [part_of(part, parts, slots) for part in range(parts)]
                assert [first for first, _ in ends] == [0, *(end for _, end in ends[:-1])]
                assert ends[-1][1] == slots and all(end > first and first % 2 == 0 for first, end in ends)


def part_of(part: int, parts: int, slots: int) -> tuple[int, int]:
    """(first, end) of the slots of a part, as `unit_of` has them."""
    pairs = (slots + 1) // 2
    return part * pairs // parts * 2, min((part + 1) * pairs // parts * 2, slots)


def sums_of_parts(x, w, tile, whole, parts):
    """What the Hopper kernel leaves for `launch_add_parts`: sums [tiles, parts, BLOCK_M, BLOCK_N]; and which rows and
    columns these tiles are."""
    (number, depth), columns = x.codes.shape, w.codes.shape[0]
    down, across = -(-number // tile.block_m), -(-columns // tile.block_n)
    assert down <= 8  # one group of rows of tiles: they are walked column by column
    dtype = torch.float32 if x.format == "fp8" else torch.int32
    sums, places = torch.zeros(down * across - whole, parts, tile.block_m, tile.block_n, dtype=dtype), []
    for index in range(whole, down * across):
        m, n = index % down * tile.block_m, index // down * tile.block_n
        a, b = x.codes[m : m + tile.block_m].double(), w.codes[n : n + tile.block_n].double()
        places.append((slice(m, m + len(a)), slice(n, n + len(b))))
        for part in range(parts):
            first, end = (BLOCK_K * slot for slot in part_of(part, parts, -(-depth // BLOCK_K)))
            sums[index - whole, part, : len(a), : len(b)] = (a[:, first:end] @ b[:, first:end].mT).to(dtype)
    return sums, places


@pytest.mark.parametrize("tier", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("activation", ["none", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("format", FORMATS)
def test_sums_of_parts_are_added_and_finished(format, activation, tier):
    """Against exact arithmetic; nothing but these tiles is written."""
    device = torch.device("cuda" if tier == "cuda" else "cpu")
    whole, parts = 3, 3
    x, w, bias = rows(300, 1500, format=format), rows(264, 1500, format=format, seed=1), normal(264, seed=2)
    columns = 264 // (2 if activation in GATED else 1)
    gate, residual = normal(300, columns, seed=3), normal(300, columns, seed=4)
    sums, places = sums_of_parts(x, w, SMALL, whole, parts)
    out = torch.full((300, columns), torch.nan, dtype=torch.float32, device=device)
    constants = {
        "BLOCK_M": 128, "BLOCK_N": 128, "GROUP": 8, "ACTIVATION": GATED.get(activation, activation),
        "GATED": activation in GATED, "HAS_BIAS": True, "GATE": "row", "HAS_RESIDUAL": True, "FP8": format == "fp8",
    }  # fmt: skip
    vectors = [t.to(device) for t in (x.scale, w.scale, bias, gate)]
    sizes = [300, 264, columns, 1500, 300]
    launch.launch_add_parts(
        sums.to(device), whole, out, residual.to(device), vectors, sizes, (0, columns), constants
    )  # fmt: skip
    wanted, bound = exact(
        x, w, bias, activation=activation, gate=gate, residual=residual, dtype=torch.float32, tier=tier
    )
    written = torch.zeros(300, columns, dtype=torch.bool)
    for m, n in places:
        written[m, n if columns == 264 else slice(n.start // 2, n.stop // 2)] = True
    out = out.cpu()
    assert 0 < int(written.sum()) < written.numel() and torch.equal(out.isnan(), ~written)
    assert ((out.double() - wanted).abs() <= bound)[written].all()


FEW = 5  # processors, so that programs take several whole tiles and several parts


def shared(monkeypatch, number: int, parts: int) -> list[tuple[int, int]]:
    """Have the last tiles of every matmul be shared, at least `number` of them by `parts` programs each. Returns what
    was. As many whole tiles for every program: else hopper/ waits for ever (types.Sizes)."""
    seen = []

    def split(tile, tiles, processors, depth):
        seen.append((max(tiles - number, 0) // processors * processors, parts))
        return seen[-1]

    monkeypatch.setattr(launch, "processors_of", lambda device: FEW)
    monkeypatch.setattr(launch, "split_last_tiles", split)
    return seen


def test_shared_tiles_are_added_by_a_launch_of_their_own(monkeypatch):
    """Programs: no more than there are processors; each tile's rows, STRIP at a time."""
    calls = []
    monkeypatch.setattr(launch, "capability_of", lambda device: 90)
    monkeypatch.setattr(launch, "processors_of", lambda device: SMS)
    monkeypatch.setattr(launch, "launch", lambda kernel, programs, *_, **options: calls.append((programs, options)))
    x, w = (torch.zeros(n, 12288, dtype=torch.int8) for n in (4608, 3072))
    options = {"activation": "none", "gate": None, "residual": None, "dtype": torch.bfloat16}
    launch.launch_quantized_linear(x, torch.ones(4608), w, torch.ones(3072), None, **options)
    (programs, first), (adding, second) = calls
    assert programs == SMS and first["SPLIT"] and adding == 36 * 256 // launch.STRIP
    assert "FP8" not in second and second["BLOCK_M"] == 256


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cuda"], indirect=True)
@pytest.mark.parametrize("tile", [WIDE, SMALL], ids=["wide", "small"])
@pytest.mark.parametrize("format", FORMATS)
def test_shared_tiles_on_a_gpu(linears, tile, format, monkeypatch):
    """An odd number of slots, edges on both sides, all that may follow; the bits of INT8 are those of whole tiles."""
    x, w, bias = rows(2, 1050, 1616, format=format), rows(784, 1616, format=format, seed=1), normal(784, seed=2)
    kinds = (
        {"residual": normal(2, 1050, 784, seed=4).half(), "gate": normal(2, 1, 784, seed=3).half()},
        {"activation": "swiglu", "gate": normal(392, seed=5)},
        {"activation": "gelu", "gate": normal(2, 1050, 784, seed=6), "dtype": torch.float32},
    )
    for options in kinds:
        options = {"dtype": torch.float16} | options
        whole = linears.check(x, w, bias, tile=tile, **options)
        for number, parts in ((1, 7), (5, 2), (1000, 4)):
            with monkeypatch.context() as patch:
                seen = shared(patch, number, parts)
                out = linears.check(x, w, bias, tile=tile, **options)
                again = linears.multiply(x, w, bias, tile=tile, **options)
            assert len(seen) == 2 and torch.equal(out, again)
            assert format == "fp8" or torch.equal(out, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["cuda"], indirect=True)
def test_shared_tiles_in_a_cuda_graph_and_on_two_streams(linears, monkeypatch):
    """Sums of parts lie in memory of their own call."""
    shared(monkeypatch, 9, 3)
    linears.tile = SMALL
    inputs = [rows(700, 2000, seed=seed) for seed in range(4)]
    w = linears.to_device(rows(520, 2000, seed=9))
    given = [linears.to_device(x) for x in inputs]
    wanted = [linears.multiply(x, rows(520, 2000, seed=9), tile=SMALL).cuda() for x in inputs]
    from sage_kernels import quantized_linear

    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(10):
        for i, x in enumerate(given):
            with torch.cuda.stream(streams[i % 2]):
                results.append((i, quantized_linear(x, w)))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted[i]) for i, result in results)
    place = QuantizedRows(given[0].codes.clone(), given[0].scale.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_linear(place, w)
    for i in (2, 1, 3):
        place.codes.copy_(given[i].codes)
        place.scale.copy_(given[i].scale)
        graph.replay()
        assert torch.equal(out, wanted[i])
