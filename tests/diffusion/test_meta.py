"""Swapped models without numbers (meta), with numbers that come later, moved by exchange, and traced by torch.jit."""

from __future__ import annotations

import copy

import pytest
import torch

import sage_processors as sp
from tests.diffusion.calls.test_processors import forward, sqnr_db
from tests.support.tiny_models import MODELS


CONFIG = sp.SageAttnProcessor(min_tokens=0, linears=sp.Linears("int8", min_features=0))
NAMES = ["flux", "unet_sd15"]


def bare(model):
    """The same model on meta."""
    with torch.device("meta"):
        return type(model).from_config(model.config).eval()


def on_meta(inputs):
    return {key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}


def ran_in_8_bit(handle):
    report = handle.report()
    return report.calls and report.linears.calls and not report.fallbacks and not report.linears.fallbacks


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_swapped_model_that_goes_to_meta_returns_what_stock_returns(name):
    model, inputs = MODELS[name]()
    stock = copy.deepcopy(model).to("meta")(**on_meta(inputs))[0]
    with sp.apply(model, CONFIG) as handle:
        before, numbers = forward(model, inputs), copy.deepcopy(model.state_dict())
        model.to("meta")
        result = model(**on_meta(inputs))[0]
        assert result.is_meta and result.shape == stock.shape and result.dtype == stock.dtype
        assert set(handle.report().fallbacks) == set(handle.report().linears.fallbacks) == {"device"}
        handle.reset()
        model.to_empty(device="cpu").load_state_dict(numbers)
        torch.testing.assert_close(forward(model, inputs), before)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_model_on_meta_may_be_swapped_before_its_weights_come(name):
    full, inputs = MODELS[name]()
    expected = forward(full, inputs)
    for assign in (False, True):
        model = bare(full)
        with sp.apply(model, CONFIG) as handle:
            assert model(**on_meta(inputs))[0].is_meta
            handle.reset()
            if not assign:
                model.to_empty(device="cpu")
            model.load_state_dict(full.state_dict(), assign=assign)
            assert sqnr_db(forward(model, inputs), expected) > 30
            handle.refresh()
            assert sqnr_db(forward(model, inputs), expected) > 30


def test_a_swap_under_another_default_device_makes_nothing_there():
    model, inputs = MODELS["flux"]()
    with sp.apply(copy.deepcopy(model), CONFIG) as handle:
        expected = [forward(handle._model, inputs) for _ in range(2)]
    with torch.device("meta"):
        handle = sp.apply(model, CONFIG)
    assert all(map(torch.equal, [forward(model, inputs) for _ in range(2)], expected))
    assert ran_in_8_bit(handle)


def test_accelerates_empty_weights_are_no_obstacle():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    full, inputs = MODELS["flux"]()
    with accelerate.init_empty_weights(include_buffers=True):
        model = type(full).from_config(full.config).eval()
        handle = sp.apply(model, CONFIG)
    model.load_state_dict(full.state_dict(), assign=True)
    assert sqnr_db(forward(model, inputs), forward(full, inputs)) > 30
    assert ran_in_8_bit(handle)


def test_parameters_may_be_exchanged_when_a_model_is_converted():
    """torch.__future__.set_swap_module_params_on_conversion: the objects stay, with other numbers in them."""
    model, inputs = MODELS["flux"]()
    stock = copy.deepcopy(model)
    parameters = list(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with sp.apply(model, CONFIG) as handle:
            forward(model, inputs)
            for twin in (model, stock):
                twin.to(torch.bfloat16).to(torch.float32).double().float()
            assert all(map(lambda a, b: a is b, model.parameters(), parameters))
            assert sqnr_db(forward(model, inputs), forward(stock, inputs)) > 30
            other = {name: x.clone() if x.dim() < 2 else 0.7 * x.roll(1, 0) for name, x in stock.state_dict().items()}
            before = forward(stock, inputs)
            for twin in (model, stock):
                twin.load_state_dict(other)
            assert (
                sqnr_db(forward(model, inputs), forward(stock, inputs)) > 30 > sqnr_db(before, forward(stock, inputs))
            )
            assert ran_in_8_bit(handle)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class Traceable(torch.nn.Module):
    """Takes and returns one tensor."""

    def __init__(self, model, inputs):
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, x):
        (name, *_) = self.inputs
        return self.model(**(self.inputs | {name: x}), return_dict=False)[0]


@pytest.mark.slow("traces whole models")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("scaling", "forwards"), [("timestep", 0), ("timestep", 2), ("dynamic", 2)])
@torch.no_grad()
def test_a_swapped_model_may_be_traced(name, scaling, forwards):
    model, inputs = MODELS[name]()
    one = Traceable(model, inputs)
    x = next(iter(inputs.values()))
    others = [torch.randn_like(x), 2 * x]
    expected = [one(other) for other in others]
    config = sp.SageAttnProcessor(min_tokens=0, scaling=scaling, linears=sp.Linears("int8", min_features=0))
    with sp.apply(model, config):
        for _ in range(forwards):  # the first ones decide how weights are stored
            one(x)
        traced = torch.jit.trace(one, x)
        assert "sage_kernels::" in str(traced.inlined_graph)
        for other, reference in zip(others, expected, strict=True):
            assert 30 < sqnr_db(traced(other), reference) < 100
