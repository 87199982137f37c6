"""Other packages' linear layers are timed beside ours, on the same layers, and leave no trace."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from sage_kernels.results import read_rows


pytest.importorskip("diffusers")

TINY = ["--tiny", "--device", "cpu", "--case", "flux_1024", "--min-features", "0", "--linears", "int8", "--csv"]


@pytest.fixture(scope="module")
def rivals(bench):
    return bench


@pytest.fixture(scope="module")
def end_to_end(on_the_path):
    import bench_end_to_end

    return bench_end_to_end


def rows_of(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().to(torch.int8), scale


@pytest.fixture
def stand_in(monkeypatch):
    """A package of comfy-kitchen's two functions."""
    package, calls = types.ModuleType("comfy_kitchen"), []

    def int8_linear(x, weight, weight_scale, bias=None, out_dtype=None):
        calls.append(x.shape)
        codes, scale = rows_of(x)
        out = codes.float() @ weight.float().T * scale * weight_scale.T
        return (out if bias is None else out + bias).to(out_dtype)

    package.quantize_int8_rowwise, package.int8_linear = rows_of, int8_linear
    monkeypatch.setitem(sys.modules, "comfy_kitchen", package)
    return calls


def test_a_rival_runs_in_8_bit_and_leaves_the_layers_as_they_were(rivals, stand_in):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False)), torch.randn(5, 64)
    before, weights = net(x), [p.data_ptr() for p in net.parameters()]
    with torch.no_grad(), rivals.rival_linears("comfy_kitchen", [net[0], net[2]]):
        error = (net(x) - before).norm() / before.norm()
        assert 1e-4 < error < 0.03 and stand_in == [(5, 64), (5, 96)]
    assert torch.equal(net(x), before) and [p.data_ptr() for p in net.parameters()] == weights
    assert "forward" not in net[0].__dict__


def test_an_error_on_the_way_puts_the_layers_back(rivals, stand_in):
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    del net[1].weight
    with pytest.raises(AttributeError), rivals.rival_linears("comfy_kitchen", net):
        pass
    assert "forward" not in net[0].__dict__


@pytest.mark.parametrize("rival", ["torchao_int8", "torchao_fp8"])
@pytest.mark.parametrize("searches", [False, True])
def test_what_torchao_is_asked_for(rival, searches, rivals, monkeypatch):
    package, asked = types.ModuleType("torchao.quantization"), []
    package.PerRow = lambda: "rows"
    package.Int8DynamicActivationInt8WeightConfig = lambda **given: ("int8", given)
    package.Float8DynamicActivationFloat8WeightConfig = lambda **given: ("fp8", given)
    package.quantize_ = lambda holder, config: asked.append(config)
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", package)
    layer, fuses = nn.Linear(32, 32), lambda: torch._inductor.config.force_fuse_int_mm_with_mul
    if searches:
        rivals.quantize_in_place(rival, layer)
    else:  # in whole models
        with rivals.rival_linears(rival, [layer]):
            assert fuses()
    rows = {"torchao_int8": ("int8", {}), "torchao_fp8": ("fp8", {"granularity": "rows"})}[rival]
    assert asked == [(rows[0], rows[1] | {"set_inductor_config": searches})] and not fuses()


@pytest.mark.parametrize("rival", ["torchao_int8", "torchao_fp8"])
def test_torchao_where_it_is_installed(rival, rivals):
    pytest.importorskip("torchao", reason="torchao is not installed")
    if rival == "torchao_fp8" and not torch.cuda.is_available():
        pytest.skip("torchao's FP8 needs a GPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, x = (y.to(device, torch.bfloat16) for y in (nn.Sequential(nn.Linear(256, 512)), torch.randn(32, 256)))
    with torch.no_grad():
        before, parameters = net(x), [*net.parameters()]
        with rivals.rival_linears(rival, [net[0]]):
            assert 1e-3 < (net(x) - before).norm() / before.norm() < 0.06
        assert torch.equal(net(x), before) and all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


def test_rows_beside_ours(end_to_end, stand_in, tmp_path):
    path = tmp_path / "rows.csv"
    assert end_to_end.main([*TINY, str(path), "--rival", "comfy_kitchen"]) == 0
    rows = [row for row in read_rows(path) if row["provider"] == "comfy_kitchen"]
    assert [row["metric"] for row in rows] == ["time", "rel_l1"] and rows[0]["includes_quantization"] == "True"
    assert 1e-4 < float(rows[1]["median"]) < end_to_end.MAX_ERROR and rows[0]["recipe"] == ""
    ours = {row["case"] for row in read_rows(path) if row["provider"] == end_to_end.OURS}
    assert {row["case"] for row in rows} == ours and len(stand_in) > 20


def test_a_rival_that_is_not_there_or_has_nothing_to_do_has_no_row(
    end_to_end, stand_in, monkeypatch, tmp_path, capsys
):
    path = tmp_path / "rows.csv"
    usual = [name for name in TINY if name not in ("--min-features", "0")]
    assert end_to_end.main([*usual, str(path), "--rival", "comfy_kitchen"]) == 1
    assert "no linear layer that is worth 8 bit" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    assert end_to_end.main([*TINY, str(path), "--rival", "comfy_kitchen"]) == 1
    assert "comfy_kitchen" in capsys.readouterr().out
    assert not [row for row in read_rows(path) if row["provider"] == "comfy_kitchen"]
