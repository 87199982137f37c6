"""Models that are offloaded, cast layer by layer or spread over devices: on a CPU, whose offload device is itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.linears.weights import linear_state as weights
from tests.linears.counting import relative_error, run
from tests.support.tiny_models import MODELS


accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def flux():
    model, inputs = MODELS["flux"]()
    return model, inputs, run(model, inputs)


def quantize(model, **options):
    return sp.quantize_linears(model, min_features=0, **options)


def calls(swap):
    report = swap.report()
    assert report.fallbacks == {}
    return report.calls


@pytest.mark.parametrize("before", [True, False])
def test_sequential_offload(flux, before, monkeypatch):
    model, inputs, expected = flux
    if before:
        accelerate.cpu_offload(model, execution_device="cpu")
    with quantize(model) as swap:
        if not before:
            accelerate.cpu_offload(model, execution_device="cpu")
        assert relative_error(run(model, inputs), expected) < 0.02 and calls(swap)
        made = []
        monkeypatch.setattr(weights, "quantize_weight", lambda *a, **k: made.append(1))
        run(model, inputs)
        assert not made  # once, not at every load
        monkeypatch.undo()
    accelerate.hooks.remove_hook_from_submodules(model)
    torch.testing.assert_close(run(model, inputs), expected)
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))


def test_hooks_removed_while_swapped(flux):
    model, inputs, expected = flux
    accelerate.cpu_offload(model, execution_device="cpu")
    with quantize(model) as swap:
        accelerate.hooks.remove_hook_from_submodules(model)
        assert relative_error(run(model, inputs), expected) < 0.02 and calls(swap)
    torch.testing.assert_close(run(model, inputs), expected)


@pytest.mark.parametrize("before", [True, False])
def test_layerwise_casting(flux, before):
    model, inputs, _ = flux
    stock = copy.deepcopy(model)
    stock.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    expected = run(stock, inputs)
    if before:
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with quantize(model) as swap:
        if not before:
            model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        first, second = run(model, inputs), run(model, inputs)
        assert relative_error(first, expected) < (0.005 if before else 0.06)
        assert torch.equal(first, second) and calls(swap)
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_are_written_to_while_cast_to_rest(flux, compiled):
    model, inputs, _ = flux
    stock = copy.deepcopy(model)
    for one in (stock, model):
        one.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    with quantize(model) as swap:
        if compiled:
            torch._dynamo.reset()
            model.compile_repeated_blocks(backend="eager")
        run(model, inputs)
        for one in (stock, model):
            larger = {k: (v.float() * 1.5).to(v.dtype) for k, v in one.state_dict().items()}
            one.load_state_dict(larger)
        expected = run(stock, inputs)
        assert relative_error(run(model, inputs), expected) < 0.01
        report = swap.report()
        assert report.fallbacks == {} and report.calls + sum(row["compiled_calls"] for row in report.rows)


def test_group_offload(flux):
    model, inputs, expected = flux
    if not torch.cuda.is_available():
        cpu = torch.device("cpu")
        try:
            model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
        except (ValueError, AttributeError, RuntimeError) as error:
            pytest.skip(f"no group offload to a CPU: {error}")
    with quantize(model) as swap:
        for _ in range(2):
            assert relative_error(run(model, inputs), expected) < 0.02
        assert calls(swap)


def test_device_map(flux):
    model, inputs, expected = flux
    model = accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    with quantize(model) as swap:
        assert relative_error(run(model, inputs), expected) < 0.02 and calls(swap)


def test_a_saved_model_has_16_bit_weights(flux, tmp_path):
    model, inputs, expected = flux
    with quantize(model):
        run(model, inputs)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert type(loaded.transformer_blocks[0].attn.to_q) is nn.Linear
        assert set(loaded.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(run(loaded, inputs), expected)


def test_a_model_without_16_bit_weights_is_not_saved(flux, tmp_path):
    model, inputs, expected = flux
    quantize(model, drop_weights=True)
    assert relative_error(run(model, inputs), expected) < 0.02
    with pytest.raises(RuntimeError, match="16-bit weights were dropped"):
        model.save_pretrained(tmp_path)
