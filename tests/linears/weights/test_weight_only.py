"""Layers of one row a sample keep INT8 weights where 16-bit ones are dropped, and multiply activations as they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sage_processors as sp
from tests.linears.compiled.test_compile import Backend
from tests.linears.counting import OpCounter, relative_error
from tests.support.tiny_models import MODELS


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AdaLayerNorm(nn.Module):
    """A norm that is modulated, as diffusers has them."""

    def __init__(self, dim=48):
        super().__init__()
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, x, condition):
        scale, shift = self.linear(F.silu(condition)).chunk(2, -1)
        return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.norm1, self.ff, self.router = AdaLayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, 4)

    def forward(self, x, condition):
        return x + self.ff(self.norm1(x, condition))


class Model(nn.Module):
    """Embeddings, blocks, a last norm that is modulated and a last projection."""

    def __init__(self, dim=48):
        super().__init__()
        self.x_embedder, self.time_embedder = nn.Linear(8, dim), nn.Linear(16, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm_out, self.proj_out, self.lm_head = AdaLayerNorm(dim), nn.Linear(dim, 8), nn.Linear(dim, 8)

    def forward(self, x, time):
        condition, x = self.time_embedder(time), self.x_embedder(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.proj_out(self.norm_out(x, condition))


OF_A_SAMPLE = {"time_embedder", "norm_out.linear", "blocks.0.norm1.linear", "blocks.1.norm1.linear"}


def made(dtype=torch.float32, batch=2):
    """A model and its inputs."""
    torch.manual_seed(0)
    model = Model().to(dtype).eval().requires_grad_(False)
    return model, (torch.randn(batch, 5, 8, dtype=dtype), torch.randn(batch, 16, dtype=dtype))


def dropped(model, linears="int8", **options):
    return sp.quantize_linears(model, linears, **({"min_features": 0, "drop_weights": True} | options))


def formats(swap):
    return {row["layer"]: row["format"] for row in swap.report().rows}


@pytest.mark.parametrize("linears", ["int8", "fp8"])
def test_layers_of_one_row_a_sample_lose_their_16_bit_weights_and_no_others(linears):
    model, inputs = made()
    expected = model(*inputs)
    swap = dropped(model, linears)
    found = formats(swap)
    assert {name for name, format in found.items() if format == "int8_weights"} == OF_A_SAMPLE
    assert {name for name, format in found.items() if format == linears} == {"blocks.0.ff", "blocks.1.ff"}
    rest = {"x_embedder", "proj_out", "lm_head", "blocks.0.router", "blocks.1.router"}
    assert {name for name, format in found.items() if format is None} == rest
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert (module._parameters["weight"].untyped_storage().nbytes() == 4) == (name not in rest), name
    assert 0 < relative_error(model(*inputs), expected) < (0.03 if linears == "int8" else 0.06)
    rows = [row for row in swap.report().rows if row["format"] == "int8_weights"]
    assert all(row["calls"] == 1 and row["bytes_saved"] > 0 and "dropped" in row["note"] for row in rows)
    assert swap.report().fallbacks == {} and "int8_weights" in str(swap.report())


def test_options_say_otherwise():
    model, _ = made()
    found = formats(dropped(model, layers={"*norm1*": "none", "norm_out.*": "int8", "time_embedder": "none"}))
    assert found["blocks.0.norm1.linear"] is None and found["time_embedder"] is None
    assert found["norm_out.linear"] == "int8"
    assert "int8_weights" not in formats(dropped(made()[0], "none", layers={"*.ff": "int8"})).values()
    model, _ = made()
    found = formats(dropped(model, min_features=48))  # 48 · 48 weights at least
    assert found["time_embedder"] is None and found["norm_out.linear"] == "int8_weights"
    model, _ = made()
    model._keep_in_fp32_modules = ["time_embedder"]
    found = formats(dropped(model))
    assert found["time_embedder"] is None and found["norm_out.linear"] == "int8_weights"
    with pytest.raises(ValueError, match="layers: got 'int8_weights'"):  # what drop_weights does, no format to ask for
        sp.quantize_linears(made()[0], layers={"norm_out.*": "int8_weights"})


def test_weights_that_pytorch_s_own_attention_is_handed_stay():
    """A pooling attention beside the time's embedding: its layers are not called, their weights are read."""
    swap = dropped(MODELS["hunyuan_dit"]()[0])
    found = formats(swap)
    pool = [name for name in found if "pooler" in name]
    assert pool and not any(found[name] for name in pool)
    assert "int8_weights" in found.values()


def codes_stand_for(module):
    """The weight that a layer multiplies by, fp64."""
    return module._buffers["_sage_codes"].double() * module._buffers["_sage_scale"].double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 48), (40, 48), (2, 3, 48), (2, 1, 3, 48)])
def test_activations_are_multiplied_as_they_are(shape, dtype):
    model, _ = made(dtype)
    layer = model.norm_out.linear
    weight, bias = layer.weight.clone(), layer.bias.clone()
    dropped(model)
    x = torch.randn(shape).to(dtype)
    got = layer(x)
    assert type(got) is torch.Tensor and got.dtype == dtype
    half_unit = torch.finfo(dtype).eps / 2
    assert relative_error(got, F.linear(x.double(), codes_stand_for(layer), bias.double())) < 2 * half_unit
    assert relative_error(codes_stand_for(layer), weight) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype(dtype):
    model, _ = made()
    layer = model.norm_out.linear
    swap = dropped(model)
    x = torch.randn(3, 48)
    with torch.autocast("cpu", dtype=dtype):
        got = layer(x)
    assert got.dtype == dtype and swap.report().calls == 1 and swap.report().fallbacks == {}
    assert torch.equal(got, layer.to(dtype)(x.to(dtype)))


def test_what_waits_for_its_use_is_computed_first():
    """A norm's result, and that of a layer in 8 bit, both of which others may take as codes."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first = nn.LayerNorm(48), nn.Linear(48, 48)
            self.block_mod, self.second = nn.Sequential(nn.SiLU(), nn.Linear(48, 48)), nn.Linear(48, 48)

        def forward(self, x):
            return self.block_mod[1](self.norm(x)) + self.block_mod[1](self.first(x))

    torch.manual_seed(0)
    model, x = Chain().eval().requires_grad_(False), torch.randn(2, 5, 48)
    expected = model(x)
    swap = dropped(model)
    assert formats(swap)["block_mod.1"] == "int8_weights"
    with OpCounter() as ops:
        assert relative_error(model(x), expected) < 0.02
    assert ops.multiplied == 1 and ops.quantized == 1


def test_calls_it_can_not_do_use_what_the_codes_stand_for():
    model, _ = made()
    layer = model.norm_out.linear
    bias = layer.bias.clone()
    swap = dropped(model)
    x = torch.randn(3, 48)
    wanted = F.linear(x.double(), codes_stand_for(layer), bias.double())
    needing = x.clone().requires_grad_()
    got = layer(needing)
    got.sum().backward()
    assert relative_error(got.detach(), wanted) < 1e-6 and needing.grad is not None
    assert relative_error(layer.train()(x), wanted) < 1e-6
    layer.eval()
    assert layer(x[:0]).shape == (0, 96) and relative_error(layer(x[0]), wanted[0]) < 1e-6
    assert swap.report().fallbacks == {"gradient": 1, "training": 1, "empty": 1, "rank": 1}
    x[1, 2] = torch.nan
    assert torch.equal(layer(x).isfinite().all(-1), torch.tensor([True, False, True]))


def test_weights_that_are_made_at_a_call_are_dropped_before_the_next(monkeypatch):
    from sage_processors.linears.swap import LinearSwap

    # as on a CPU that has a GPU beside it
    monkeypatch.setattr(LinearSwap, "_is_quantised_later", lambda self, module: True)
    model, inputs = made()
    expected = model(*inputs)
    dropped(model)
    layer = model.norm_out.linear
    assert not layer._sage.is_filled and not layer.weight.isnan().any()
    first = model(*inputs)
    assert layer._sage.is_filled and relative_error(first, expected) < 0.03
    assert torch.equal(model(*inputs), first) and layer._sage.dropped and layer.weight.isnan().all()


def test_they_can_neither_be_saved_nor_put_back_and_copies_compute_the_same():
    model, inputs = made()
    swap = dropped(model, layers={"*.ff": "none"})  # the only swapped layers are these
    for call in (swap.remove, model.state_dict, lambda: sp.quantize_linears(model)):
        with pytest.raises(RuntimeError, match="16-bit weights were dropped .*drop_weights=True.*load the model"):
            call()
    expected = model(*inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(*inputs), expected)
        twin.norm_out.linear.bias.zero_()
        assert not torch.equal(twin(*inputs), expected) and torch.equal(model(*inputs), expected)
    swap.refresh()
    assert torch.equal(model(*inputs), expected)
    half = model.to(torch.bfloat16)(*(x.bfloat16() for x in inputs))
    assert half.dtype == torch.bfloat16 and relative_error(half, expected) < 0.02
    assert model.norm_out.linear._buffers["_sage_codes"].dtype == torch.int8


def test_compiled_code_is_one_graph_with_the_op():
    torch._dynamo.reset()
    model, inputs = made()
    expected = model(*inputs)

    class Counting(Backend):
        weight_only = 0

        def __call__(self, graph, inputs):
            self.weight_only += sum("weight_only_linear" in str(node.target) for node in graph.graph.nodes)
            return super().__call__(graph, inputs)

    backend = Counting()
    swap = dropped(model)
    eager = model(*inputs)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(3):
        got = compiled(*inputs)
    assert relative_error(got, eager) < 0.01 and relative_error(got, expected) < 0.03
    assert backend.graphs == 1 and backend.weight_only == len(OF_A_SAMPLE) and backend.multiplied == 2
    rows = {row["layer"]: row for row in swap.report().rows}
    assert rows["norm_out.linear"]["compiled_calls"] == 3 and swap.report().fallbacks == {}
    layer = model.norm_out.linear.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.compile(layer, fullgraph=True, backend=backend)(torch.randn(3, 48)).dtype == torch.bfloat16


def test_through_the_handle():
    model, inputs = MODELS["flux"]()
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
        linears = sp.Linears(min_features=0, drop_weights=True)
        handle = sp.apply(model, sp.SageAttnProcessor(scaling="dynamic", linears=linears))
        assert relative_error(model(**inputs, return_dict=False)[0], expected) < 0.05
    found = {row["layer"]: row["format"] for row in handle.report().linears.rows}
    assert found["transformer_blocks.0.norm1.linear"] == found["norm_out.linear"] == "int8_weights"
    assert found["x_embedder"] is found["proj_out"] is found["context_embedder"] is None
    handle.remove()
    assert "stay in 8 bit" in str(handle.report())


def test_calls_of_many_rows_multiply_by_the_dequantised_weight():
    """As in models with a timestep for each token; the kernel for few rows would need memory for its partial sums."""
    model, _ = made()
    layer, bias = model.norm_out.linear, model.norm_out.linear.bias.clone()
    swap = dropped(model)
    weight, x = codes_stand_for(layer), torch.randn(2, 200, 48)
    compiled = torch.compile(layer, backend="eager")
    with OpCounter() as ops:
        for got in (layer(x), compiled(x)):
            assert relative_error(got, F.linear(x.double(), weight, bias.double())) < 1e-6
        assert ops.multiplied == 0
        layer(x[:, :128])  # 256 rows
    row = next(row for row in swap.report().rows if row["layer"] == "norm_out.linear")
    assert (row["calls"], row["fallbacks"]) == (1, {"rows": 2})
