"""Calls with few rows: the weight is read in 8 bit, the activation stays in 16 bit, and the report says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sage_processors as sp
from sage_kernels import QuantizedRows, weight_only_linear
from sage_kernels.facts import few_rows
from sage_processors.linears import qkv
from sage_processors.linears.postponed import linear
from sage_processors.linears.weights.few_rows import multiplied
from tests.support.tiny_language_models import MODELS


pytest.importorskip("transformers")
FEW = 8


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """On a CPU no rows are few: it takes the table of GPUs here."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    monkeypatch.setattr(few_rows, "gpu_class", lambda device: "ada")
    monkeypatch.setattr(few_rows, "_traced_most_rows", lambda *_: FEW)
    few_rows.most_rows.cache_clear()
    yield torch.device(request.param)
    few_rows.most_rows.cache_clear()


def block(device):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)) for _ in range(2)]
    return nn.Sequential(*layers).to(device, torch.bfloat16).eval()


def by_hand(model, x):
    """The same with `weight_only_linear` on the layers' own 8-bit weights."""
    for part in model:
        for layer in part:
            state = getattr(layer, "_sage", None)
            if isinstance(layer, nn.Linear):
                rows = state.storage.rows_of(state.index, state.index)
                x = weight_only_linear(x, QuantizedRows(*rows), layer._parameters["bias"])
            else:
                x = layer(x)
    return x


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("drop", [False, True])
def test_few_rows_and_many(device, drop, format):
    if device.type == "cuda" and format == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    model = block(device)
    with torch.no_grad():
        swap = sp.quantize_linears(model, format, min_features=1, drop_weights=drop)
        for rows in (1, FEW):
            x = torch.randn(rows, 64, device=device, dtype=torch.bfloat16)
            assert torch.equal(model(x), by_hand(model, x))
        model(torch.randn(FEW + 1, 64, device=device, dtype=torch.bfloat16))
    report = swap.report()
    assert [(row["calls"], row["few_row_calls"], row["fallbacks"]) for row in report.rows] == [(1, 2, {})] * 4
    assert "8 of few rows" in report.verdict and "100 %" in report.verdict and "few" in str(report)


def test_a_llama_step_joins_projections_and_stays_near_16_bit(device, monkeypatch):
    norms, products, rms_norm = [], [], F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda *args: norms.append(args) or rms_norm(*args))

    def counted(*args, **options):
        products.append(options.get("activation", "none"))
        return multiplied(*args, **options)

    for module in (qkv, linear):
        monkeypatch.setattr(module, "multiplied", counted)
    model, inputs = MODELS["llama"]()
    model = model.to(device, torch.bfloat16)
    token = {"input_ids": inputs["input_ids"][:1, :4].to(device)}
    with torch.no_grad():
        stock = model(**token).logits.float()
        with sp.quantize_linears(model, min_features=1) as swap:
            first = model(**token).logits
            assert all(torch.equal(model(**token).logits, first) for _ in range(2))
            rows = [row for row in swap.report().rows if row["format"]]
            assert all((row["calls"], row["few_row_calls"]) == (0, 3) for row in rows)
            assert len(norms) == 3 * 2 * 2  # steps, layers, norms: each once for all layers that read it
            assert products == ["none", "none", "swiglu", "none"] * 2 * 3  # q, k and v; the output; gate and up; down
        # two roundings a product: of the weight to 8 bit, half of 1 / 127 of its largest, and of bf16
        assert float((first.float() - stock).norm() / stock.norm()) < 0.05


@pytest.mark.slow("compiles a model")
def test_compiled_as_eager(device):
    torch._dynamo.reset()
    model, x = block(device), torch.randn(2, 64, device=device, dtype=torch.bfloat16)
    with torch.no_grad(), sp.quantize_linears(model, min_features=1):
        wanted = model(x).float()
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        got = torch.compile(model, backend=backend, fullgraph=True)(x).float()
        # activation functions join a product in Inductor's graph, which saves a rounding of bf16
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-6 * float(wanted.abs().max()))


@pytest.mark.gpu
def test_short_calls_are_few_rows_in_a_graph_alone():
    """An eager call of a small weight takes longer on the host than the GPU saves."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))).cuda().to(torch.bfloat16).eval()
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), sp.quantize_linears(model) as swap:
        stock = model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        for _ in range(3):
            graph.replay()
        error = float((out.float() - stock.float()).norm() / stock.float().norm())
        assert 1e-4 < error < 0.02  # another product than the 16-bit one, as near as INT8 weights are
        for row in swap.report().rows:
            assert row["few_row_calls"] == 3 and row["calls"] == 0 and row["fallbacks"] == {"short": 1}
