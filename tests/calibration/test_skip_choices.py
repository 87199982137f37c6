"""Limits of skipping that a calibration finds: of each layer and noise level the largest that adds little."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

import sage_processors as sp
from sage_kernels.ops import skip_state
from sage_kernels.planning import skip_lists
from sage_processors.calibration.candidates import label
from sage_processors.calibration.cost import FLOPS_16BIT, OPS_INT8, CostTable, time_factor
from sage_processors.calibration.search import _for_psnr
from sage_processors.calibration.skip_choices import (
    SkipChoices,
    check_shares,
    checked_limits,
    shares_of,
    without_lists,
)
from sage_processors.evaluation import quality
from tests.diffusion.steps.test_windows import flux_pipe
from tests.diffusion.test_compile import denoise
from tests.evaluation.test_quality import PROMPTS, pipeline


USER = sp.SageAttnProcessor(skip=sp.Skip(first_steps=1, last_steps=1))
BASE = without_lists(USER)
LEVELS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.1]
LARGE, SMALL = 0.5, 0.1
# {limit: {layer: (noise of steps at high noise levels, of those at low ones)}}, of a signal of 1
MEASURED = {
    0.0: {"even[0]": (0.01, 0.01), "late": (0.01, 0.01), "never": (0.01, 0.01), "always": (0.02, 0.02)},
    LARGE: {"even[0]": (0.05, 0.05), "late": (0.01, 0.17), "never": (1.0, 1.0), "always": (0.02, 0.01)},
    SMALL: {"even[0]": (0.02, 0.02), "late": (0.01, 0.02), "never": (0.9, 0.9), "always": (0.02, 0.02)},
}


def measured(steps=range(6)):
    def by_step(high, low):
        return {str(step): [1.0, high if LEVELS[step] >= 0.5 else low] for step in steps}

    return {limit: {name: by_step(*noise) for name, noise in layers.items()} for limit, layers in MEASURED.items()}


def test_each_layer_and_range_has_the_largest_limit_that_adds_no_more_than_the_bar():
    choices = SkipChoices(BASE, USER, measured(), LEVELS)
    assert choices.borders == (0.5,)  # half-way between the middle ones of the four steps that have lists
    # low noise levels first; a limit adds √(0.05 - 0.01) = 0.2 to "even[0]", and 0.4 to "late" at low noise levels
    assert choices.choose(0.2 + 1e-9) == {
        "even[0]": (LARGE, LARGE), "late": (SMALL, LARGE), "never": (0.0, 0.0), "always": (LARGE, LARGE),
    }  # fmt: skip
    assert choices.choose(0.15)["even[0]"] == (SMALL, SMALL)
    assert choices.choose(0.0) == {
        "even[0]": (0.0, 0.0), "late": (0.0, LARGE), "never": (0.0, 0.0), "always": (LARGE, LARGE),
    }  # fmt: skip
    assert set(choices.choose(math.inf).values()) == {(LARGE, LARGE)}


def test_plans_become_options_that_say_no_more_than_they_must():
    choices = SkipChoices(BASE, USER, measured(), LEVELS)
    config = choices.options(choices.choose(0.2 + 1e-9))
    assert config.skip == dataclasses.replace(USER.skip, limit=LARGE, noise=(0.5,))
    assert dict(config.rules("skip_limit")) == {"late": (SMALL, LARGE), "never": 0.0}
    assert config.of_layer("skip_limit", "even[0]") == LARGE and config.of_layer("skip_limit", "late") == (
        SMALL,
        LARGE,
    )
    alike = choices.options(choices.choose(math.inf))
    assert alike == dataclasses.replace(BASE, skip=dataclasses.replace(USER.skip, limit=LARGE))
    named = choices.options(choices.choose(0.15))
    assert named.of_layer("skip_limit", "even[0]") == SMALL  # brackets in a name are no pattern
    owned = dataclasses.replace(
        USER, layers={"never": {"skip_limit": 0.3}, "*": {"skip_limit": 0.2}}
    )  # the user's own come first
    config = SkipChoices(without_lists(owned), owned, measured(), LEVELS).options(choices.choose(0.2 + 1e-9))
    assert config.of_layer("skip_limit", "never") == 0.3 and config.of_layer("skip_limit", "late") == 0.2


def test_candidates_add_less_and_less_and_each_leaves_something_out():
    choices = SkipChoices(BASE, USER, measured(), LEVELS)
    found = choices.candidates()
    assert found[0] == dataclasses.replace(BASE, skip=dataclasses.replace(USER.skip, limit=LARGE))
    assert len(found) == len(set(found)) > 3 and all(config.skip for config in found)

    def worst(config):
        def of(layer):
            limit = config.of_layer("skip_limit", layer)
            return limit if isinstance(limit, tuple) else (limit,) * 2

        return max(choices._errors.get((x, i, of(x)[i]), 0.0) for x in choices.layers for i in range(2))

    errors = [worst(config) for config in found]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.9 and errors[-1] == 0.0


@pytest.mark.parametrize("levels", [[], LEVELS[:3], [0.5] * 6])
def test_without_steps_on_both_sides_of_a_border_there_is_one_range(levels):
    steps = range(6) if len(levels) == 6 else range(3)
    choices = SkipChoices(BASE, USER, measured(steps), levels)
    assert choices.borders == () and all(len(limits) == 1 for limits in choices.choose(0.3).values())
    assert all(config.skip.noise == () for config in choices.candidates())


def test_a_users_borders_are_kept():
    base = dataclasses.replace(USER, skip=dataclasses.replace(USER.skip, noise=(0.15, 0.7)))
    choices = SkipChoices(BASE, base, measured(), LEVELS)
    assert choices.borders == (0.15, 0.7) and len(choices.choose(0.3)["late"]) == 3
    assert choices.options(choices.choose(math.inf)).skip.noise == (0.15, 0.7)


# --- time ---


def test_time_falls_with_what_is_left_out_and_rises_with_what_is_measured():
    assert time_factor("qk_int8_pv_bf16", 8, 0.0, 0.0) == 1
    assert time_factor("qk_int8_pv_fp8", 8, 0.5, 1.0) == pytest.approx(0.5 + 1 / 8)  # Q·Kᵀ is half of all, twice
    scores = (1 / OPS_INT8) / (1 / OPS_INT8 + 1 / FLOPS_16BIT)
    assert time_factor("qk_int8_pv_bf16", 4, 0.25, 0.5) == pytest.approx(0.75 + 2 * scores * 0.5 / 4)
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, BASE) as handle:
        denoise(pipe, model, inputs, steps=2)
        table = CostTable(handle, "counted")
    config = USER
    dense = table.relative(config, 4)
    all_layers = dict.fromkeys(table.shapes, [0.5, 1.0])
    factor = time_factor("qk_int8_pv_bf16", 8, 0.5, 1.0)
    assert table.relative(config, 4, (), all_layers) == pytest.approx(dense * factor)
    assert table.skipped_fraction(config, all_layers) == pytest.approx(0.5) and table.skipped_fraction(config, {}) == 0
    [first, *_] = table.shapes
    assert dense * factor < table.relative(config, 4, (), {first: [0.5, 1.0]}) < dense


def test_shares_are_of_all_calls_and_of_layers_that_left_something_out():
    def row(layer, calls, fraction, **dense):
        return {"layer": layer, "calls": calls, "skipped_fraction": fraction, "dense": dense}

    rows = [row("a", 8, 0.5, first_last=4), row("a", 8, 0.7), row("b", 8, 0.0, masked=8), row("c", 0, 0.0)]
    assert shares_of(rows) == {"a": [round((0.25 + 0.7) / 2, 6), 0.75]}


@pytest.mark.parametrize("wrong", [[0.1], [0.1, 2.0], [0.1, "0"], "ab", [0.1, 1], [float("nan"), 0.5], {}])
def test_shares_of_a_damaged_state_are_refused(wrong):
    check_shares({"a": [0.0, 1.0]}, "delete it")
    with pytest.raises(ValueError, match="path: got .* for skipped"):
        check_shares({"a": wrong}, "delete it")


# --- the search ---


@pytest.mark.parametrize(
    ("limits", "scalings", "target", "error"),
    [
        ("0.1", ("timestep",), 30.0, TypeError), ((0.1, True), ("timestep",), 30.0, TypeError),
        ((0.1, 1), ("timestep",), 30.0, TypeError), ((0.0,), ("timestep",), 30.0, ValueError),
        ((1.0,), ("timestep",), 30.0, ValueError), ((float("nan"),), ("timestep",), 30.0, ValueError),
        ((0.1,), ("per_token", "per_block"), 30.0, ValueError), ((0.1,), ("timestep",), None, ValueError),
    ],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(limits, scalings, target, error):
    with pytest.raises(error, match="skip_limits: got"):
        checked_limits(limits, scalings, target)
    assert checked_limits((0.1, 0.5, 0.1), ("per_token", "timestep"), 30.0) == (0.5, 0.1)


@pytest.mark.slow("whole calibrations")
def test_limits_found_on_some_prompts_hold_on_others(monkeypatch, tmp_path):
    """At a loss of 3 dB against dense INT8: it stays within the budget on prompts that nobody searched with."""
    monkeypatch.setattr(skip_state, "REFERENCE_BLOCK", (16, 16))
    monkeypatch.setattr(skip_lists, "LEAST_TILES", 4)
    pipe, base = pipeline("tiny_flux"), dataclasses.replace(BASE, min_tokens=0)
    user = dataclasses.replace(USER, min_tokens=0, skip=dataclasses.replace(USER.skip, every=3))
    options = {"scalings": ("timestep",), "steps": 5, "batch": 1, "progress": False, "config": user}
    others = ["a green square on a white background", "a white ring on a red background"]
    dense = quality.evaluate(pipe, PROMPTS[:1], [0], [quality.Variant("dense", base)], steps=5)["dense"]
    target = dense.psnr_db[0] - 3
    state, policy = tmp_path / "state.json", tmp_path / "policy.json"
    options |= {"skip_limits": (0.3, 0.1), "held_out": others, "path": policy, "state_path": state}
    found = sp.calibrate(pipe, PROMPTS[:1], target_psnr=target, **options)
    assert found.met and found.config.skip and found.result["psnr_db"] >= target
    assert found.result["skipped_fraction"] > 0.05 and 0 < found.result["lost_max"]
    [plain] = [row for row in found.curve if "skips" not in row["label"]]
    assert found.result["cost"] < plain["cost"] and plain["skipped_fraction"] == 0 == plain["lost_max"]
    loaded = sp.SageAttnProcessor.from_policy(policy, pipe)
    assert loaded == found.config
    # other prompts, other seeds, and another number of steps: levels mean the same
    variants = [quality.Variant("dense", base), quality.Variant("skipping", loaded)]
    drawn = quality.evaluate(pipe, others[:1], [70], variants, steps=4)
    assert drawn["skipping"].psnr_db[0] >= drawn["dense"].psnr_db[0] - (3 + 1)  # 1 dB more at most
    content = json.loads(state.read_text())
    monkeypatch.setattr(quality, "evaluate", None)  # what was measured is not drawn again
    assert sp.calibrate(pipe, PROMPTS[:1], target_psnr=target, **options) == found
    next(iter(content["outcomes"].values()))["skipped"] = {"a": [2.0, 0.0]}
    state.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="for skipped"):
        sp.calibrate(pipe, PROMPTS[:1], target_psnr=target, **options)
    with pytest.raises(ValueError, match="of another model, prompts"):
        sp.calibrate(pipe, PROMPTS[:1], target_psnr=target, **options | {"held_out": others[:1]})


class Canned:
    """Trials whose pictures are as good as `psnr` says of the sum of their layers' limits and the look."""

    steps, levels, linears, models, config = 6, LEVELS, None, (), USER

    def __init__(self, psnr):
        self._psnr, self.curve, self.drawn = psnr, {}, []

    def measure(self, config, *, look=0, probe=False):
        limits = [config.of_layer("skip_limit", layer) for layer in MEASURED[0.0]] if config.skip else [0.0]
        total = sum(sum(x) / len(x) if isinstance(x, tuple) else x for x in limits)
        psnr = self._psnr(total, look)
        outcome = {"psnr_db": psnr, "psnr_db_low": psnr, "noise": {}, "errors": {}, "cost": 1 - total / 4}
        self.drawn.append((look, round(total, 3)))
        if look == 0:
            self.curve[config] = outcome | {"label": label(config)}
        return outcome

    def skip_choices(self, base, limits):
        assert base == BASE and limits == (LARGE, SMALL)
        return SkipChoices(BASE, USER, measured(), LEVELS)

    def cost(self, config):
        return self.curve[config]["cost"]

    def preference(self, config):
        return self.cost(config), -self.curve[config]["psnr_db"]


def search(psnr):
    trials = Canned(psnr)
    return trials, _for_psnr(trials, [BASE], 40.0, (LARGE, SMALL))


def test_where_no_limit_meets_the_budget_nothing_is_skipped():
    trials, found = search(lambda total, look: 45.0 - 10 * (total > 0))
    assert found.met and found.config == BASE and [look for look, _ in trials.drawn if look] == [1]


def test_what_fresh_pictures_refuse_is_tried_milder_and_then_without_lists():
    trials, found = search(
        lambda total, look: 45.0 - 6 * total - 4.0 * (look > 0)
    )  # 5 dB of room, of which fresh take 4
    assert found.met and 0 < found.result["looks"] <= 4 and found.result["psnr_db"] >= 40
    looks = [total for look, total in trials.drawn if look]
    assert looks == sorted(looks, reverse=True) and looks[0] > looks[-1]
    trials, found = search(lambda total, look: 45.0 - 4 * total - (3.0 + 3.0 * (total > 0)) * (look > 0))
    assert found.met and found.config == BASE and [total for look, total in trials.drawn if look][-1] == 0
    assert found.result["looks"] <= 4
