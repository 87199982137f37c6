"""Every layer gets the cheapest way whose measured error is small enough: from made-up errors, and from real ones."""

from __future__ import annotations

import dataclasses
import json

import pytest

import sage_processors as sp
from sage_processors.calibration.cost import CostTable
from sage_processors.calibration.layer_choices import (
    Choice,
    LayerChoices,
    Way,
    check_sums,
    options_to_probe,
    relative_l2,
)
from sage_processors.diffusion.calls import processors
from sage_processors.evaluation import quality
from sage_processors.options import MAX_RANGES
from tests.diffusion.steps.test_layer_windows import JOINT, SINGLE
from tests.diffusion.steps.test_windows import flux_pipe, options
from tests.diffusion.test_compile import denoise
from tests.evaluation.test_quality import PROMPTS, pipeline
from tests.support.outliers import varying_outliers


BF16, FP8 = "qk_int8_pv_bf16", "qk_int8_pv_fp8"
BASE = sp.SageAttnProcessor(recipe=FP8)
PV16, TOKEN, ROTATED, BOTH = (Choice.of(c) for c in options_to_probe(BASE)[1:])
LEVELS = [1.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.1]
PRICES = {Choice.of(BASE): 0.5, PV16: 0.6, TOKEN: 0.65, ROTATED: 0.7, BOTH: 0.75, None: 1.0}


def made(errors: dict, base=BASE, **kwargs) -> LayerChoices:
    """errors: {layer: {choice: an error at all steps, or one for each}}."""
    choices = [Choice.of(c) for c in options_to_probe(base)]
    noise = {choice: {} for choice in choices}
    for layer, by_choice in errors.items():
        for choice in choices:
            found = by_choice[choice]
            steps = found if isinstance(found, list) else [found] * len(LEVELS)
            noise[choice][layer] = {str(i): [2.0, 2.0 * error**2] for i, error in enumerate(steps)}
    return LayerChoices(base, noise, lambda layer, choice: PRICES[choice], kwargs.get("levels", LEVELS))


def falling(first: float, second: float, third: float, fourth: float, fifth: float) -> dict:
    return dict(zip((Choice.of(BASE), PV16, TOKEN, ROTATED, BOTH), (first, second, third, fourth, fifth), strict=True))


# --- the choice ---


def kept(config):
    """Patterns of the layers that stay in 16 bit."""
    return [pattern for pattern, recipe in config.rules("recipe") if recipe == "16bit"]


def test_what_is_measured_is_every_int8_choice():
    assert [dataclasses.astuple(Choice.of(c)) for c in options_to_probe(BASE)] == [
        (FP8, "timestep", "none"),
        (BF16, "timestep", "none"),
        (BF16, "per_token", "none"),
        (BF16, "timestep", "hadamard"),
        (BF16, "per_token", "hadamard"),
    ]
    plain = sp.SageAttnProcessor(scaling="per_token", rotation="hadamard")
    assert options_to_probe(plain) == [plain]


def test_every_layer_gets_the_cheapest_way_that_is_enough():
    choices = made({
        "fine": falling(0.01, 0.01, 0.01, 0.01, 0.01),
        "values": falling(0.04, 0.01, 0.01, 0.01, 0.01),
        "tokens": falling(0.09, 0.08, 0.01, 0.05, 0.01),
        "outliers": falling(0.09, 0.08, 0.07, 0.01, 0.01),
        "hard": falling(0.09, 0.08, 0.07, 0.06, 0.01),
        "hopeless": falling(0.9, 0.8, 0.7, 0.6, 0.5),
    })  # fmt: skip
    chosen = choices.choose(dict.fromkeys(choices.layers, 0.02))
    ways = {"fine": Choice.of(BASE), "values": PV16, "tokens": TOKEN, "outliers": ROTATED, "hard": BOTH}
    assert chosen == {name: Way(choice) for name, choice in (ways | {"hopeless": None}).items()}
    config = choices.options(chosen)
    assert config == dataclasses.replace(
        BASE,
        layers={
            "values": {"recipe": BF16},
            "tokens": {"recipe": BF16, "scaling": "per_token"},
            "outliers": {"recipe": BF16, "rotation": "hadamard"},
            "hard": {"recipe": BF16, "scaling": "per_token", "rotation": "hadamard"},
            "hopeless": {"recipe": "16bit"},
        },
    )


def test_16_bit_only_at_the_noise_levels_of_the_error():
    late, early = [0.01] * 6 + [0.5] * 2, [0.5] + [0.01] * 7
    choices = made({
        "late": falling(late, late, late, late, late),
        "early": falling(early, early, early, early, early),
        "fine": falling(0.01, 0.01, 0.01, 0.01, 0.01),
        "always": falling(0.5, 0.5, 0.5, 0.5, 0.5),
    })  # fmt: skip
    chosen = choices.choose(dict.fromkeys(choices.layers, 0.02))
    base = Choice.of(BASE)
    # borders are half-way between two steps
    assert chosen == {
        "late": Way(base, (0.0, 0.25)), "early": Way(base, (0.95, 1.0)), "fine": Way(base), "always": Way(None)
    }  # fmt: skip
    config = choices.options(chosen)
    assert config.rules("keep_noise") == (("late", (0.0, 0.25)), ("early", (0.95, 1.0)))
    assert kept(config) == ["always"]
    unknown = made({"late": falling(late, late, late, late, late)}, levels=[])  # a scheduler that nobody can follow
    assert unknown.choose({"late": 0.02}) == {"late": Way(None)}


def test_a_cheaper_int8_way_goes_before_a_range_and_a_short_range_before_a_dear_one():
    one, most = [0.01] * 7 + [0.5], [0.5] * 6 + [0.01] * 2
    choices = made({
        "one": falling(one, one, one, 0.01, 0.01),  # an eighth of the steps in 16 bit: 0.5625 < 0.7
        "most": falling(most, most, most, 0.01, 0.01),  # six eighths: 0.875 > 0.7
    })  # fmt: skip
    chosen = choices.choose({"one": 0.02, "most": 0.02})
    assert chosen == {"one": Way(Choice.of(BASE), (0.0, 0.15)), "most": Way(ROTATED)}
    assert choices.choose({"one": 0.02, "most": 0.02}, {("one", chosen["one"])})["one"] != chosen["one"]


def test_no_more_ranges_than_a_handle_may_have():
    bad = {f"layer{i}": [0.5 if step == i else 0.01 for step in range(8)] for i in range(8)}
    choices = made({name: falling(steps, steps, steps, steps, steps) for name, steps in bad.items()})
    chosen = choices.choose(dict.fromkeys(choices.layers, 0.02))
    assert len({way.span for way in chosen.values()} - {()}) == MAX_RANGES
    for name, way in chosen.items():
        assert way.choice is None or choices.error(name, way.choice, way.span) <= 0.02
    assert choices.options(chosen).rules("keep_noise")  # and the options accept it


def test_candidates_get_better_and_dearer_and_are_the_same_again():
    late = [0.01] * 6 + [0.2] * 2
    errors = {
        "a": falling(0.04, 0.02, 0.015, 0.01, 0.005),
        "b": falling(0.06, 0.03, 0.02, 0.02, 0.01),
        "c": falling(late, late, late, late, late),
    }
    choices = made(errors)
    found_options = choices.candidates()
    assert (
        found_options == made(errors).candidates()
        and len(found_options) == len(set(found_options)) > 4
        and BASE not in found_options
    )

    def worst(config):
        return max(_error_of(choices, config, layer) for layer in errors)

    found = [worst(config) for config in found_options]
    assert found == sorted(found, reverse=True) and found[-1] < found[0] < 0.1
    assert all(len(kept(config)) < 3 for config in found_options)  # something stays in INT8


def _error_of(choices, config, layer):
    recipe, scaling, rotation, span = (
        config.of_layer(option, layer) for option in ("recipe", "scaling", "rotation", "keep_noise")
    )
    if recipe == "16bit":
        return 0.0
    return choices.error(layer, Choice(recipe, scaling, rotation), span)


def test_options_of_the_user_stay():
    base = dataclasses.replace(
        BASE, layers={"kept": {"recipe": "16bit"}, "other": {"recipe": BF16, "keep_noise": (0, 0.1)}}
    )
    late = [0.01] * 6 + [0.5] * 2
    choices = made({"late": falling(late, late, late, late, late)}, base)
    config = choices.options(choices.choose({"late": 0.02}))
    assert kept(config) == ["late", "kept"] and config.of_layer("recipe", "other") == BF16
    assert config.rules("keep_noise") == (("other", (0.0, 0.1)),)


def test_relative_error_and_what_a_file_may_say_of_it():
    assert relative_l2([[3.0, 0.03], [1.0, 0.01]]) == 0.1 and relative_l2([]) == 0.0
    assert relative_l2([[0.0, 1.0]]) == float("inf") and relative_l2([[0.0, 0.0]]) == 0.0
    check_sums({"a": {"0": [1.0, 0.0]}}, "")
    for wrong in (
        {"a": 1},
        {"a": {"x": [1.0, 0.0]}},
        {"a": {"0": [1.0]}},
        {"a": {"0": [1.0, -1.0]}},
        {"a": {"0": "x"}},
    ):
        with pytest.raises(ValueError, match="path: got"):
            check_sums(wrong, "delete it")


def test_cost_counts_recipes_and_ranges_by_layer():
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options()) as handle:
        denoise(pipe, model, inputs, steps=1)
        table = CostTable(handle, "counted")
    int8 = table.relative(options(), 8)
    half = {"steps": 8, "levels": LEVELS}
    own = {name: table.seconds(name, "exact") for name in (JOINT, SINGLE)}
    saved = own[JOINT] - table.seconds(JOINT, "timestep")
    one = table.relative(options(layers={JOINT: {"keep_noise": (0, 0.5)}}), **half)
    assert one == pytest.approx(int8 + 0.5 * saved / sum(own.values()))
    assert table.relative(options(keep={"noise": (0, 0.5)}), **half) == pytest.approx(0.5 + 0.5 * int8)
    assert table.relative(options(keep={"noise": (0.0, 0.5)}), **half) == pytest.approx(0.5 + 0.5 * int8)
    assert table.relative(options(keep={"noise": (0, 1)}), **half) == 1.0
    assert (
        table.relative(options(recipe=FP8, layers={"*": {"recipe": BF16}}), 8)
        == int8
        != table.relative(options(recipe=FP8), 8)
    )
    with pytest.raises(ValueError, match="levels: got 0 noise levels for 8 steps"):
        table.relative(options(keep={"noise": (0.0, 0.5)}), 8)


# --- calibrations ---

SMALL = {"batch": 1, "progress": False}
X = "transformer.transformer_blocks.1.attn"


@pytest.mark.slow("a whole calibration")
def test_a_layer_with_outliers_at_the_end_of_a_run_is_exact_there_and_no_other_layer(monkeypatch, tmp_path):
    attend, pipe = processors._attend, pipeline("tiny_flux")

    def harder(query, key, value, attn_mask, is_causal, scale, own, index):
        if own.layer == X and sp.handle_of(pipe).steps.place == 3:
            query, key = (varying_outliers(x, 16.0) for x in (query, key))
        return attend(query, key, value, attn_mask, is_causal, scale, own, index)

    monkeypatch.setattr(processors, "_attend", harder)
    with sp.apply(pipe, sp.SageAttnProcessor(scaling="per_block")) as handle, handle.probe(every=1) as probe:
        quality.generate(pipe, PROMPTS[:1], [0], steps=4)
        errors = {row["layer"]: row["rel_l2"] for row in probe.summary("layer")}
        steps = {row["step"]: row["rel_l2"] for row in probe.summary("layer", "step") if row["layer"] == X}
    bad = errors.pop(X)
    limit = (bad * max(errors.values())) ** 0.5
    assert bad > 1.5 * limit > 2 * max(errors.values())  # else the test could not fail
    assert steps[3] > bad > limit > 1.2 * max(steps[step] for step in (0, 1, 2))

    def calibrate(**kwargs):
        return sp.calibrate(
            pipe, PROMPTS[:1], max_attention_error=limit, scalings=("per_block",), steps=4, **SMALL | kwargs
        )

    found = calibrate(path=tmp_path / "a.json", state_path=tmp_path / "state.json")
    ((layer, (low, high)),) = found.config.rules("keep_noise")
    assert layer == X and low == 0.0 and 0 < high < 0.9
    assert found.config == sp.SageAttnProcessor(scaling="per_block", layers={X: {"keep_noise": (low, high)}})
    assert found.met and found.result["attention_error"] <= limit and found.result["looks"] == 1
    assert found.result["int8_share"] == pytest.approx(19 / 20)  # one call of five layers and four steps
    # the policy does what it says, in another handle
    with sp.apply(pipe, sp.SageAttnProcessor.from_policy(tmp_path / "a.json", pipe)) as handle:
        quality.generate(pipe, PROMPTS[:1], [5], steps=4)
        assert {r["layer"]: r["fallbacks"] for r in handle.report().rows if r["fallbacks"]} == {X: {"window": 1}}
    # again: from what was measured, and all drawn anew
    again = calibrate(path=tmp_path / "b.json")
    monkeypatch.setattr(quality, "evaluate", None)
    resumed = calibrate(path=tmp_path / "c.json", state_path=tmp_path / "state.json")
    assert found == again == resumed
    assert len({(tmp_path / f"{name}.json").read_bytes() for name in "abc"}) == 1
    state = json.loads((tmp_path / "state.json").read_text())
    next(iter(state["outcomes"].values()))["noise"] = {"a": {"0": "x"}}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="path: got x for noise"):
        calibrate(state_path=tmp_path / "state.json")
