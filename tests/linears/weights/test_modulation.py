"""Layers of one row a sample have INT8 weights beside their 16-bit ones with modulation="int8"."""

from __future__ import annotations

import pytest
import torch

import sage_processors as sp
from sage_processors.linears import modules
from tests.linears.counting import relative_error
from tests.linears.weights.test_weight_only import OF_A_SAMPLE, dropped, formats, made
from tests.support.tiny_models import MODELS


def swapped(model, **options):
    return sp.quantize_linears(model, "int8", **({"min_features": 0, "modulation": "int8"} | options))


def test_they_compute_what_layers_without_16_bit_weights_do_and_go_back():
    model, inputs = made()
    stock, state = model(*inputs), {name: value.clone() for name, value in model.state_dict().items()}
    alone = made()[0]
    dropped(alone)
    swap = swapped(model)
    assert {name for name, format in formats(swap).items() if format == "int8_weights"} == OF_A_SAMPLE
    assert torch.equal(model(*inputs), alone(*inputs)) and not torch.equal(model(*inputs), stock)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    swap.remove()
    assert torch.equal(model(*inputs), stock)


def test_they_follow_a_write_to_their_weight():
    model, inputs = made()
    swap = swapped(model, layers={"*.ff": "none"})
    before, layer = model(*inputs), model.norm_out.linear
    with torch.no_grad():
        layer.weight.mul_(3)
    after = model(*inputs)
    swap.remove()
    assert relative_error(after, before) > 0.1 and 0 < relative_error(after, model(*inputs)) < 0.02


@pytest.mark.parametrize(
    ("linears", "has_codes"),
    [("int8", False), (sp.Linears("int8", modulation="int8", min_features=0), True), (None, True)],
)
def test_presets_have_it_and_int8_alone_has_not(linears, has_codes):
    """None: the preset's own, whose layers are too small here, so that the option says which are asked."""
    config = sp.SageAttnProcessor("fast") if linears is None else sp.SageAttnProcessor(linears=linears)
    assert (config.linears.modulation == "int8") == has_codes
    if linears is not None:
        model, inputs = MODELS["flux"]()
        with sp.apply(model, config) as handle:
            model(**inputs)
            found = {row["layer"]: row["format"] for row in handle.report().linears.rows}
        assert (found["transformer_blocks.0.norm1.linear"] == "int8_weights") == has_codes


def test_other_words_are_refused():
    with pytest.raises(ValueError, match="modulation: got 'int4', expected one of"):
        sp.Linears(modulation="int4")
    with pytest.raises(ValueError, match="modulation: got 'int4', expected one of"):
        swapped(made()[0], modulation="int4")


def test_on_a_gpu_without_rows_they_are_in_16_bit_outside_of_graphs(monkeypatch):
    monkeypatch.setattr(modules, "is_timed", lambda device: True)
    model, inputs = made()
    stock = model(*inputs)
    swap = swapped(model, min_features=None)
    assert not swap.states()  # too small
    swap.remove()
    swap = swapped(model)
    swap._options["min_features"] = None
    swap.run_in_graphs_alone()
    assert torch.equal(model(*inputs), stock)
    assert swap.report().fallbacks == {"short": len(swap.states())}
    swap.run_short_calls(False)
    model(*inputs)
    rows = {row["layer"]: row for row in swap.report().rows}
    assert all(rows[name]["calls"] == 1 for name in OF_A_SAMPLE)
    assert rows["blocks.0.ff"]["fallbacks"] == {"short": 2}


def test_forwards_are_known_as_short_beside_them(monkeypatch):
    """A model with too little work for INT8 skips the checks of its other layers, and these stay in 8 bit."""
    monkeypatch.setattr(modules, "is_timed", lambda device: True)
    monkeypatch.setattr("sage_processors.linears.swap.is_timed", lambda device: True)
    model, inputs = made()
    swap = swapped(model)
    swap._options["min_features"] = None
    swap.run_short_calls(False)
    outputs = []
    for _ in range(5):
        outputs.append(model(*inputs))
    assert swap._shared.all_short and all(torch.equal(y, outputs[0]) for y in outputs)
    rows = {row["layer"]: row for row in swap.report().rows}
    assert all(rows[name]["calls"] == 5 for name in OF_A_SAMPLE)
    assert rows["blocks.0.ff"]["fallbacks"] == {"short": 5}
    with torch.no_grad():
        model.norm_out.linear.weight.mul_(3)
    assert not torch.equal(model(*inputs), outputs[0])
