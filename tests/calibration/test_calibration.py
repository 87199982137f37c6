"""Calibration finds options that meet a budget, says so when it can't, and does the same again, byte by byte."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import sage_processors as sp
from sage_processors.calibration import candidates
from sage_processors.calibration import cost as attention_cost
from sage_processors.calibration.cost import (
    BYTES_PER_SECOND,
    FLOPS_16BIT,
    OPS_INT8,
    CallShape,
    CostTable,
    counted_seconds,
    measured_seconds,
)
from sage_processors.calibration.trials import HELD_OUT
from sage_processors.diffusion.calls import processors
from sage_processors.evaluation import hard_variants, quality
from tests.calibration.test_layer_choices import kept
from tests.diffusion.steps.test_windows import flux_pipe, options
from tests.diffusion.test_compile import denoise
from tests.evaluation.test_quality import PROMPTS, pipeline
from tests.support.outliers import varying_outliers


SIZE = {"height": 64, "width": 64}  # a sixteenth of the work of attention
SMALL = {"steps": 2, "batch": 1, "progress": False, "arguments": SIZE}
OWN_SIZE = {"arguments": {}}  # at 64 pixels INT8 costs more than 16 bit, by the count


@pytest.fixture
def as_with_long_sequences(monkeypatch):
    """Traffic counts little, else INT8 costs more than 16 bit at 64 pixels."""
    monkeypatch.setattr(attention_cost, "BYTES_PER_SECOND", 1e15)


def run(**kwargs):
    return sp.calibrate(pipeline("tiny_flux"), PROMPTS[:1], **SMALL | kwargs)


# --- pictures ---


def test_an_easy_budget_is_met_by_the_cheapest_and_again_byte_by_byte(tmp_path, monkeypatch):
    """By a search that was interrupted and goes on, by another one, and by one that draws nothing."""
    first, second, state = (tmp_path / name for name in ("first.json", "second.json", "state.json"))
    options = {"scalings": ("per_token", "timestep"), "steps": 1}
    evaluate, drawn = quality.evaluate, []

    def stops_after_one(*args, **kwargs):
        drawn.append(len(drawn))
        if len(drawn) == 2:
            raise KeyboardInterrupt
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(quality, "evaluate", stops_after_one)
    with pytest.raises(KeyboardInterrupt):
        run(target_psnr=35.0, state_path=state, **options)
    assert len(json.loads(state.read_text())["outcomes"]) == 1
    found = run(target_psnr=35.0, path=first, state_path=state, **options)
    assert len(drawn) == 4  # the other scaling and the fresh seeds
    monkeypatch.undo()
    assert found.met and found.result["psnr_db"] >= 35 and found.result["int8_share"] == 1.0
    assert found.config == sp.SageAttnProcessor(scaling="timestep")  # by the count, cheaper than per_token
    assert [row["cost"] for row in found.curve] == sorted(row["cost"] for row in found.curve)
    assert {row["label"] for row in found.curve} == {"qk_int8_pv_bf16, timestep", "qk_int8_pv_bf16, per_token"}
    assert sp.SageAttnProcessor.from_policy(first, pipeline("tiny_flux")) == found.config

    run(target_psnr=35.0, path=second, **options)  # everything drawn again
    assert second.read_bytes() == first.read_bytes()
    monkeypatch.setattr(quality, "evaluate", None)  # what was measured is not drawn again
    again = run(target_psnr=35.0, path=second, state_path=state, **options)
    assert again == found and second.read_bytes() == first.read_bytes()


@pytest.mark.usefixtures("as_with_long_sequences")
@pytest.mark.slow("a calibration that tries every way")
def test_a_budget_out_of_reach_says_so_with_the_best_and_the_curve():
    found = run(target_psnr=119.0, scalings=("per_block",))
    assert not found.met and found.result["psnr_db"] < 119
    best = max(found.curve, key=lambda row: row["psnr_db"])
    assert candidates.label(found.config) == best["label"] and best["psnr_db"] > found.curve[0]["psnr_db"]
    assert len(found.curve) >= 5  # the last candidate of every sequence was tried
    lines = []
    found.print(type("Console", (), {"print": lambda self, *a, **k: lines.append(str(a[0]))})())
    assert "NOT met" in lines[-1]


@pytest.mark.usefixtures("as_with_long_sequences")
@pytest.mark.slow("two whole calibrations")
def test_a_budget_between_int8_and_16_bit_demotes_just_enough():
    """With outliers that per-block scaling can't take, some layers or steps have to stay in 16 bit."""
    pipe = pipeline("tiny_flux")
    with hard_variants.inject_outliers(pipe.transformer, 64.0, 2):
        plain = run(target_psnr=1.0, scalings=("per_block",))
        target = plain.result["psnr_db"] + 6
        found = run(target_psnr=target, scalings=("per_block",))
        assert found.met and found.result["psnr_db"] >= target
        config = found.config
        finer = config.scaling.name != "per_block" or config.rules("scaling") or config.rules("rotation")
        exact = kept(config) or config.rules("keep_noise") or config.keep != sp.Keep()
        assert finer or exact
        assert plain.result["cost"] < found.result["cost"] < 1
        assert (found.result["int8_share"] < 1) == bool(exact) and found.result["int8_share"] > 0
        # it is what it says: drawn here, on the seeds that decided
        seeds = [found.result["looks"] * HELD_OUT]
        variant = quality.Variant("x", config)
        drawn = quality.evaluate(pipe, PROMPTS[:1], seeds, [variant], steps=2, batch=1, arguments=SIZE)["x"]
        assert sum(drawn.psnr_db) == pytest.approx(found.result["psnr_db"], abs=0.01)


# --- attention error ---


@pytest.mark.slow("three whole calibrations")
def test_attention_error_demotes_the_layers_over_it():
    pipe = pipeline("tiny_flux")
    with sp.apply(pipe, sp.SageAttnProcessor()) as handle, handle.probe(every=1) as probe:
        quality.generate(pipe, PROMPTS[:1], [0], steps=2)
        errors = sorted(row["rel_l2"] for row in probe.summary("layer"))
    limit = (errors[1] + errors[2]) / 2  # between the second and the third of five layers
    found = run(max_attention_error=limit, scalings=("timestep",), **OWN_SIZE)
    assert found.met and 0 < found.result["attention_error"] <= limit
    assert 1 <= len(kept(found.config)) <= 4 and found.result["int8_share"] < 1
    assert run(max_attention_error=0.5, scalings=("timestep",), **OWN_SIZE).config == sp.SageAttnProcessor()
    finer = run(max_attention_error=limit, scalings=("timestep", "per_token"), **OWN_SIZE)
    assert finer.met and len(kept(finer.config)) <= len(kept(found.config))


@pytest.mark.slow("a whole calibration")
def test_attention_error_rotates_before_it_gives_a_layer_16_bit(monkeypatch):
    """Outliers that vary by token, in every layer: what is left over the limit at every scaling tries the rotation."""
    attend = processors._attend

    def harder(query, key, *rest):
        return attend(*(varying_outliers(x, 16.0) for x in (query, key)), *rest)

    monkeypatch.setattr(processors, "_attend", harder)
    monkeypatch.setattr(attention_cost, "BYTES_PER_SECOND", 1e15)  # as with long sequences: traffic counts little
    pipe, errors = pipeline("tiny_flux"), {}
    for rotation in ("none", "hadamard"):
        with sp.apply(pipe, sp.SageAttnProcessor(scaling="per_block", rotation=rotation)) as handle:
            with handle.probe(every=1) as probe:
                quality.generate(pipe, PROMPTS[:1], [0], steps=2, **SIZE)
                errors[rotation] = {row["layer"]: row["rel_l2"] for row in probe.summary("layer")}
    layer = min(errors["none"], key=lambda name: errors["hadamard"][name] / errors["none"][name])
    limit = (errors["none"][layer] * errors["hadamard"][layer]) ** 0.5
    assert errors["hadamard"][layer] < 0.6 * limit  # else the test could not fail
    found = run(max_attention_error=limit, scalings=("per_block",))
    chosen = dict(found.config.rules("rotation"))
    assert found.met and chosen[layer] == "hadamard" and layer not in kept(found.config)
    assert found.result["cost"] < 1 and 0 < found.result["attention_error"] <= limit
    assert any("per_block, hadamard" in row["label"] for row in found.curve)
    for name in chosen:  # only where it was needed
        assert errors["none"][name] > 0.7 * limit
    monkeypatch.undo()
    monkeypatch.setattr(processors, "_attend", harder)
    found = run(max_attention_error=limit, scalings=("per_block",))  # in truth these are short: 16 bit costs less
    assert found.met and not found.config.rules("rotation") and layer in kept(found.config)


# --- cost ---


def test_counted_cost_is_the_count():
    shape = CallShape(2, 512, 1024, 8, 4, 64)
    matmul, q, k = 2 * 2 * 8 * 512 * 1024 * 64, 2 * 512 * 8 * 64, 2 * 1024 * 4 * 64
    exact = 2 * matmul / FLOPS_16BIT + 4 * (q + k) / BYTES_PER_SECOND
    assert counted_seconds(shape, "exact") == pytest.approx(exact)
    # K in INT8 is a byte less to read for the matmul, and three for the prologue
    planned = matmul / OPS_INT8 + matmul / FLOPS_16BIT + (4 * (q + k) + 2 * k) / BYTES_PER_SECOND
    assert counted_seconds(shape, "timestep") == pytest.approx(planned) == counted_seconds(shape, "per_block")
    assert planned < counted_seconds(shape, "per_token") < counted_seconds(shape, "per_head")
    rotated = counted_seconds(shape, "timestep", rotation="hadamard")  # Q and K read and written once more
    assert rotated == pytest.approx(planned + 4 * (q + k) / BYTES_PER_SECOND)


def test_relative_cost_counts_windows_and_layers():
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options()) as handle:
        denoise(pipe, model, inputs, steps=1)
        table = CostTable(handle, "counted")
        names = [row["layer"] for row in handle.report().rows]
    assert sorted(table.shapes) == sorted(names)
    ((shape,), *_) = table.shapes.values()
    assert shape == CallShape(1, *shape[1:]) if isinstance(shape, tuple) else shape.batch == 1
    assert shape.heads == shape.kv_heads == model.config.num_attention_heads
    assert shape.head_dim == model.config.attention_head_dim and shape.seq_q == shape.seq_kv
    int8 = table.relative(options(), 10)
    assert (
        table.relative(options(layers={"*": {"recipe": "16bit"}}), 10)
        == 1.0
        == table.relative(options(keep={"first_steps": 10}), 10)
    )
    rotated = [
        table.relative(options(**o), 10)
        for o in ({"rotation": "hadamard"}, {"layers": {names[0]: {"rotation": "hadamard"}}})
    ]
    assert rotated[0] > rotated[1] > int8 == table.relative(options(rotation="auto"), 10)
    mixed = table.relative(options(keep={"first_steps": 2, "last_steps": 3}), 10)
    assert mixed == pytest.approx(0.5 + 0.5 * int8)


@pytest.mark.parametrize(
    ("scaling", "rotation"),
    [("exact", "none"), ("timestep", "none"), ("per_block", "none"), ("timestep", "hadamard")],
)
def test_measured_cost_is_a_time(scaling, rotation):
    recipe = "qk_int8_pv_bf16"
    small, large = (
        measured_seconds(
            CallShape(1, n, n, 2, 2, 16), scaling, recipe, "cpu", torch.float32, rotation=rotation, repeats=5
        )
        for n in (32, 2048)
    )
    assert 0 < small < large < 60


# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, "both or neither"),
        ({"target_psnr": 40, "max_attention_error": 0.1}, ValueError, "both or neither"),
        ({"target_psnr": -1}, ValueError, "expected a budget > 0"),
        ({"target_psnr": 40, "seeds": [1, 2]}, ValueError, "seeds: got 2 for 1 inputs"),
        ({"target_psnr": 40, "cost": "guessed"}, ValueError, "cost: got 'guessed'"),
        ({"target_psnr": 40, "path": "policy.safetensors"}, ValueError, "path: got 'policy.safetensors'"),
        ({"target_psnr": 40, "scalings": ()}, ValueError, "scalings: got no recipe or no scaling"),
        ({"target_psnr": 40, "scalings": ("sigma",)}, ValueError, "scaling: got 'sigma'"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        run(**arguments)


@pytest.mark.slow("two calibrations")
def test_a_state_of_another_calibration_is_refused(tmp_path):
    state = tmp_path / "state.json"
    run(target_psnr=30.0, state_path=state, scalings=("per_block",))
    with pytest.raises(ValueError, match="state_path: got 'state.json' of another model, prompts, seeds"):
        run(target_psnr=30.0, state_path=state, scalings=("per_block",), seeds=[5])
    pipe = pipeline("tiny_flux")
    with hard_variants.inject_outliers(pipe.transformer, 64.0, 2), pytest.raises(ValueError, match="another model"):
        run(target_psnr=30.0, state_path=state, scalings=("per_block",))
    content = json.loads(state.read_text())
    for broken in ("[]", "{", json.dumps(content | {"more": 1}), state.read_text().replace('"psnr_db"', '"psnr"')):
        state.write_text(broken)
        with pytest.raises(ValueError, match="path: got"):
            run(target_psnr=30.0, state_path=state, scalings=("per_block",))


def test_nothing_to_calibrate_is_an_error():
    config = sp.SageAttnProcessor(min_tokens=128)
    assert dataclasses.asdict(config)["min_tokens"] == 128
    pipe = pipeline("tiny_flux")
    pipe.transformer.train()
    try:
        with pytest.raises(ValueError, match="no attention call that runs in INT8"):
            run(target_psnr=30.0)
    finally:
        pipe.transformer.eval()
