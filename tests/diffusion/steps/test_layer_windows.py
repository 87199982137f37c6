"""Recipes and ranges of noise levels by layer: the right calls of the right layers run as asked, counted, compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import sage_processors as sp
from sage_kernels.planning import row_maxima
from sage_processors import options as config_module
from sage_processors.diffusion.calls import processors
from sage_processors.diffusion.steps.noise_level import noise_levels
from sage_processors.diffusion.steps.windows import inside, stays_16bit
from tests.diffusion.steps.test_windows import flux_pipe, options
from tests.diffusion.test_compile import denoise


JOINT, SINGLE = "transformer.transformer_blocks.0.attn", "transformer.single_transformer_blocks.0.attn"
BF16, FP8 = "qk_int8_pv_bf16", "qk_int8_pv_fp8"


def rows_of(handle):
    return {row["layer"]: row for row in handle.report().rows}


def counts(handle):
    return {name: (row["calls"], row["fallbacks"].get("window", 0)) for name, row in rows_of(handle).items()}


# --- noise levels ---


@pytest.mark.parametrize("scaling", ["timestep", "dynamic"])
def test_a_layer_is_exact_in_its_range_bit_for_bit_and_int8_elsewhere(scaling):
    pipe, model, inputs = flux_pipe(FlowMatchEulerDiscreteScheduler(shift=1.0))
    seen = {JOINT: [], SINGLE: []}

    def keep(name):
        def hook(module, args, kwargs, output):
            seen[name].append(copy.deepcopy((args, kwargs, output)))

        return hook

    modules = {name: model.get_submodule(name.partition(".")[2]) for name in seen}
    with sp.apply(pipe, options(scaling=scaling, layers={JOINT: {"keep_noise": (0.2, 0.85)}})) as handle:
        hooks = [m.register_forward_hook(keep(name), with_kwargs=True) for name, m in modules.items()]
        denoise(pipe, model, inputs, steps=8)
        rows = rows_of(handle)
    for hook in hooks:
        hook.remove()
    asked = [0.2 <= u < 0.85 for u in noise_levels(pipe.scheduler).tolist()]
    assert 1 < sum(asked) < 7 and not asked[0] and not asked[-1]  # in the middle of the run

    def same(name):
        with torch.no_grad():
            stock = [modules[name](*args, **kwargs) for args, kwargs, _ in seen[name]]
        pairs = [(out if isinstance(out, tuple) else (out,)) for out in stock]
        ours = [(out if isinstance(out, tuple) else (out,)) for *_, out in seen[name]]
        return [all(map(torch.equal, a, b)) for a, b in zip(pairs, ours, strict=True)]

    assert same(JOINT) == asked and same(SINGLE) == [False] * 8
    assert (rows[JOINT]["calls"], rows[JOINT]["fallbacks"]) == (8 - sum(asked), {"window": sum(asked)})
    assert (rows[SINGLE]["calls"], rows[SINGLE]["fallbacks"]) == (8, {})
    assert rows[JOINT]["keep_noise"] == (0.2, 0.85) and rows[SINGLE]["keep_noise"] == ()
    assert rows[JOINT]["note"] == "16 bit at noise levels 0.2 to 0.85" and rows[SINGLE]["note"] == ""


def test_ranges_add_to_the_windows_of_all_layers_and_replace_their_range():
    pipe, model, inputs = flux_pipe(FlowMatchEulerDiscreteScheduler(shift=1.0))
    pipe.scheduler.set_timesteps(10)
    levels = noise_levels(pipe.scheduler).tolist()
    low, high = sum(u < 0.5 for u in levels), sum(u >= 0.9 for u in levels)
    assert 1 < low < 9 and 1 < high < 9 and low + high < 10
    with sp.apply(pipe, options(keep={"noise": (0, 0.5)}, layers={SINGLE: {"keep_noise": (0.9, 1)}})) as handle:
        denoise(pipe, model, inputs, steps=10)
        assert counts(handle) == {JOINT: (10 - low, low), SINGLE: (10 - high, high)}
    with sp.apply(
        pipe, options(keep={"noise": (0, 0.5), "first_steps": 1}, layers={SINGLE: {"keep_noise": ()}})
    ) as handle:
        denoise(pipe, model, inputs, steps=10)
        assert counts(handle) == {JOINT: (9 - low, low + 1), SINGLE: (9, 1)}


def test_a_range_holds_its_low_end_and_one_but_not_its_high_end():
    assert [inside((0.2, 0.5), u) for u in (0.19, 0.2, 0.49, 0.5)] == [False, True, True, False]
    assert inside((0.2, 1.0), 1.0) and inside((0.0, 0.1), 0.0) and not inside((), 0.5)
    config = options(keep={"first_steps": 1, "last_steps": 2, "noise": (0.0, 0.35)})
    kept = [stays_16bit(config, (0.5, 0.7), 1 - i / 10, i, 10 - i) for i in range(10)]
    assert kept == [True, False, False, False, True, True, False, False, True, True]


def test_auto_rotation_waits_until_a_layer_leaves_its_range(monkeypatch):
    attend = processors._attend

    def harder(query, key, value, attn_mask, is_causal, scale, own, index):
        factor = torch.ones(key.shape[3])
        factor[[1, key.shape[3] // 2]] = 30.0
        return attend(query, key * factor, value, attn_mask, is_causal, scale, own, index)

    monkeypatch.setattr(processors, "_attend", harder)
    monkeypatch.setattr("sage_processors.diffusion.auto_rotation.ROTATE_BELOW_DB", 99.0)
    pipe, model, inputs = flux_pipe(FlowMatchEulerDiscreteScheduler(shift=1.0))
    with sp.apply(
        pipe, options(rotation="auto", scaling="per_block", layers={JOINT: {"keep_noise": (0.9, 1)}})
    ) as handle:
        pipe.scheduler.set_timesteps(8)
        first = sum(u >= 0.9 for u in noise_levels(pipe.scheduler).tolist())
        assert first >= 1
        denoise(pipe, model, inputs, steps=8)
        notes = {name: row["note"] for name, row in rows_of(handle).items()}
        assert "in step 0" in notes[SINGLE] and f"in step {first}" in notes[JOINT] and "no INT8" not in notes[JOINT]
        assert handle._probe is None  # all decided: nothing goes on measuring


# --- recipes ---


@pytest.mark.parametrize("scaling", ["timestep", "per_token"])
def test_a_layer_runs_its_own_recipe(scaling, monkeypatch):
    """With a recipe of its own every layer does what a handle with only that recipe does, while inputs are equal."""
    monkeypatch.setattr(row_maxima, "FIRST_STEPS", 0)
    pipe, model, inputs = flux_pipe()

    def first_outputs(config, steps=1):
        found = {}
        modules = {name: model.get_submodule(name.partition(".")[2]) for name in (JOINT, SINGLE)}

        def keep(name):
            return lambda module, args, output: found.setdefault(name, output)

        hooks = [m.register_forward_hook(keep(name)) for name, m in modules.items()]
        with sp.apply(pipe, config) as handle:
            denoise(pipe, model, inputs, steps=steps)
            rows = rows_of(handle)
            state = handle._denoisers[0].state
            lagged = {} if state is None else {site["name"]: site["lagged"] for site in state.summary()}
        for hook in hooks:
            hook.remove()
        return found[JOINT][0], rows, lagged

    fp8, _, _ = first_outputs(options(scaling=scaling, recipe=FP8))
    bf16, _, _ = first_outputs(options(scaling=scaling))
    mixed, rows, lagged = first_outputs(
        options(recipe=FP8, scaling=scaling, layers={JOINT: {"recipe": BF16}}), steps=3
    )
    assert torch.equal(mixed, bf16) and not torch.equal(mixed, fp8)
    assert {name: (row["recipe"], row["calls"]) for name, row in rows.items()} == {JOINT: (BF16, 3), SINGLE: (FP8, 3)}
    # only FP8 has a softmax reference from the step before
    assert [name for name, tiles in lagged.items() if tiles] == ([SINGLE] if scaling == "timestep" else [])
    mixed, rows, lagged = first_outputs(
        options(scaling=scaling, layers={"*.transformer_blocks.*": {"recipe": FP8}}), steps=3
    )
    assert torch.equal(mixed, fp8) and {row["recipe"] for row in rows.values()} == {BF16, FP8}
    assert [name for name, tiles in lagged.items() if tiles] == ([JOINT] if scaling == "timestep" else [])


# --- copies, files, refusals ---


def test_as_many_ranges_as_a_compiled_model_has_room_for():
    """Flags of the layers without a range and of MAX_RANGES ranges, alone or all on by a window of all layers."""
    assert 2**config_module.MAX_RANGES + 1 < torch._dynamo.config.recompile_limit
