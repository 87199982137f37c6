"""Which linear layers run in 8 bit: those whose error a picture can bear, and most of the operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sage_processors as sp
from sage_processors.calibration.candidates import label
from sage_processors.calibration.cost import FLOPS_16BIT, OPS_INT8
from sage_processors.calibration.linear_choices import EXACT, Layer, LinearChoices, measured_linear_seconds
from sage_processors.calibration.trials import HELD_OUT
from sage_processors.evaluation import quality
from tests.calibration.test_calibration import SIZE, SMALL
from tests.evaluation.test_quality import PROMPTS, pipeline


SEARCH = {
    "linears": ("int8",),
    "scalings": ("timestep",),
    "config": sp.SageAttnProcessor(linears=sp.Linears("none", min_features=0)),
}


def choices(**layers):
    """From {name: (seconds, errors)}."""
    found = LinearChoices.__new__(LinearChoices)
    found.base = "int8"
    found.layers = {
        name: Layer(
            nn.Linear(8, 8), 10, dict(zip(("fp8", "int8", EXACT), seconds, strict=True)), errors | {EXACT: 0.0}
        )
        for name, (seconds, errors) in layers.items()
    }
    return found


def test_candidates_take_most_error_away_for_its_time_first():
    found = choices(
        small=((1.0, 1.0, 2.0), {"int8": 3.0, "fp8": 9.0}),
        large=((10.0, 10.0, 20.0), {"int8": 4.0, "fp8": 9.0}),
        blind=((1.0, 1.0, 2.0), {"int8": 0.0, "fp8": 0.0}),
    )
    configs = found.candidates(sp.SageAttnProcessor(linears="int8"))
    assert [dict(config.rules("linears")) for config in configs] == [
        {"small": "none"},
        {"small": "none", "large": "none"},
    ]
    costs = [found.seconds(config) for config in configs]
    assert costs == [(13.0, 24.0), (23.0, 24.0)]
    assert [round(found.share(config), 3) for config in configs] == [0.667, 0.333]


def test_candidates_by_role_take_the_same_layer_of_all_blocks():
    even = (1.0, 1.0, 2.0)
    found = choices(
        **{"a.0.up": (even, {"int8": 5.0}), "a.1.up": (even, {"int8": 0.0}), "b.0.net.0.proj": (even, {"int8": 4.0})},
        **{
            "a.0.down": (even, {"int8": 2.0}),
            "a.1.down": (even, {"int8": 2.5}),
            "b.1.net.0.proj": (even, {"int8": 3.0}),
        },
    )
    configs = found.roles(sp.SageAttnProcessor(linears="int8"))
    assert [sorted(dict(config.rules("linears"))) for config in configs] == [
        ["b.0.net.0.proj", "b.1.net.0.proj"],
        ["a.0.up", "a.1.up", "b.0.net.0.proj", "b.1.net.0.proj"],
        sorted(found.layers),
    ]
    assert {format for _, format in configs[-1].rules("linears")} == {"none"}


def test_a_dearer_8_bit_format_comes_before_16_bit_where_it_pays():
    found = choices(
        layer=((1.0, 1.5, 4.0), {"int8": 1.0, "fp8": 9.0}), odd=((1.0, 3.9, 4.0), {"int8": 8.0, "fp8": 9.0})
    )
    configs = found.candidates(sp.SageAttnProcessor(linears="fp8", layers={"other": {"linears": "none"}}))
    assert [dict(config.rules("linears")) for config in configs] == [
        {"layer": "int8", "other": "none"},
        {"layer": "int8", "odd": "none", "other": "none"},
        {"layer": "none", "odd": "none", "other": "none"},
    ]
    assert label(configs[1]).endswith("linear layers fp8, 2 of them 16 bit, 1 of them int8")


@pytest.mark.slow("a search through whole pictures")
def test_40_db_are_met_on_fresh_seeds_with_most_operations_in_8_bit(tmp_path):
    pipe, path = pipeline("tiny_flux"), tmp_path / "policy.json"
    found = sp.calibrate(pipe, PROMPTS[:1], target_psnr=40, path=path, **SMALL, **SEARCH)
    assert found.met and found.result["psnr_db"] >= 40 and found.result["linear_share"] >= 0.7
    config = sp.SageAttnProcessor.from_policy(path, pipe)
    assert config == found.config and config.linears.format == "int8"
    # it is what it says: drawn here, on seeds that chose nothing
    seeds, reports = [(found.result["looks"] + 1) * HELD_OUT], []
    variant = quality.Variant("x", config)
    drawn = quality.evaluate(
        pipe, PROMPTS[:1], seeds, [variant], steps=SMALL["steps"], batch=1, on_handle=reports.append, arguments=SIZE
    )["x"]
    assert min(drawn.psnr_db) >= 40
    assert isinstance(pipe.components["vae"], nn.Module)  # the pipeline is stock again
    assert not any(hasattr(m, "_sage") for m in pipe.transformer.modules())


@pytest.mark.slow("a whole calibration")
def test_a_budget_between_8_and_16_bit_gives_up_the_layers_that_count():
    pipe = pipeline("tiny_sd")
    half = sp.SageAttnProcessor(
        linears=sp.Linears("none", min_features=0),
        layers={"*up_blocks*": {"linears": "none"}, "*mid_block*": {"linears": "none"}},
    )  # each layer takes a while
    easy = sp.calibrate(pipe, PROMPTS[:1], target_psnr=10, **SMALL, **SEARCH | {"config": half})
    target = easy.curve[0]["psnr_db"] + 3
    found = sp.calibrate(pipe, PROMPTS[:1], target_psnr=target, **SMALL, **SEARCH | {"config": half})
    formats = [format for _, format in found.config.rules("linears")]
    assert formats and set(formats) == {"none"} and 0.3 < found.result["linear_share"] < 1
    assert easy.result["cost"] < found.result["cost"] < 1
    best = max(found.curve, key=lambda row: row["psnr_db"])
    assert best["psnr_db"] > target


def test_errors_and_costs_are_measured_layer_by_layer():
    pipe = pipeline("tiny_sd")
    config = sp.SageAttnProcessor(
        linears=sp.Linears("none", min_features=0),
        layers={"*attn2*": {"linears": "none"}, "*up_blocks*": {"linears": "none"}, "*mid*": {"linears": "none"}},
    )

    def draw(on_step):
        quality.generate(pipe, PROMPTS[:1], [0], steps=1, on_step=on_step)

    found = LinearChoices(pipe, config, ("int8", "fp8"), draw, 1, 3, "counted", lambda *_: None)
    assert len(found.layers) == 6 and all("down_blocks" in name and "attn2" not in name for name in found.layers)
    for layer in found.layers.values():
        assert layer.errors["int8"] > 0 and layer.errors[EXACT] == 0
        tokens = layer.seconds["int8"] * OPS_INT8 / (2 * layer.module.weight.numel())
        assert tokens == pytest.approx(layer.seconds[EXACT] * FLOPS_16BIT / (2 * layer.module.weight.numel()))
        assert tokens == pytest.approx(2 * 3 * 1024)  # with and without the prompt, 3 pictures, 32 · 32 places
    total = {format: sum(layer.errors[format] for layer in found.layers.values()) for format in ("int8", "fp8")}
    assert total["int8"] < 0.5 * total["fp8"]  # a third as large an error, squared; some layers are not like the mean
    assert found.base == "int8" and found.share(sp.SageAttnProcessor(linears="int8")) == 1


@pytest.mark.parametrize("format", ["int8", "fp8", EXACT])
def test_measured_seconds_are_a_time(format):
    weight = torch.randn(64, 32)
    assert 0 < measured_linear_seconds(8, weight, format, repeats=3) < 60


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"target_psnr": 40, "linears": ("int4",)}, ValueError, "linears: got .'int4'"),
        ({"target_psnr": 40, "linears": "int8"}, TypeError, "linears: got 'int8'"),
        ({"max_attention_error": 0.1, "linears": ("int8",)}, ValueError, "linears: got formats to try without"),
        ({"target_psnr": 40, "linears": ("int8",)}, ValueError, "linears: got no linear layer"),  # all are small
        (
            {"target_psnr": 40, "config": sp.SageAttnProcessor(linears=sp.Linears("none", drop_weights=True))},
            ValueError,
            "config: got drop_weights",
        ),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        sp.calibrate(pipeline("tiny_sd"), PROMPTS[:1], **SMALL, **arguments)


def test_while_one_layer_is_measured_all_others_are_exact():
    from sage_processors.calibration.linear_choices import _errors
    from sage_processors.linears.weights.layers import choose

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).eval().requires_grad_(False)
    model[1].weight[:, :5] *= 50  # the others' errors are not its own
    inputs = [((torch.randn(4, 32),), {})]
    found = choose(model, label=str, linears="int8", min_features=0)
    options = {"layers": (), "min_features": 0}
    errors = _errors(model, "", found, ("int8",), options, inputs, lambda *_: None)
    stock = model(*inputs[0][0])
    for name in ("0", "1", "2"):
        with sp.quantize_linears(model, "none", layers={name: "int8"}, min_features=0):
            alone = model(*inputs[0][0]) + 0
        wanted = ((alone - stock).double().square().sum() / stock.double().square().sum()).item()
        assert errors[name]["int8"] == pytest.approx(wanted, rel=1e-4)
