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


def test_rows_beside_ours(end_to_end, stand_in, tmp_path):
    path = tmp_path / "rows.csv"
    assert end_to_end.main([*TINY, str(path), "--rival", "comfy_kitchen"]) == 0
    rows = [row for row in read_rows(path) if row["provider"] == "comfy_kitchen"]
    assert [row["metric"] for row in rows] == ["time", "rel_l1"] and rows[0]["includes_quantization"] == "True"
    assert 1e-4 < float(rows[1]["median"]) < end_to_end.MAX_ERROR and rows[0]["recipe"] == ""
    ours = {row["case"] for row in read_rows(path) if row["provider"] == end_to_end.OURS}
    assert {row["case"] for row in rows} == ours and len(stand_in) > 20
