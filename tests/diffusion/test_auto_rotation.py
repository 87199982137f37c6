"""The rotation option of processors: by layer, counted, and found by the probe where outliers vary by token."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo

import sage_processors as sp
from sage_processors import options as config_module
from sage_processors.diffusion.calls import processors
from sage_processors.diffusion.calls.processors import EVENTS
from tests.diffusion.steps.test_windows import flux_pipe, options
from tests.diffusion.test_compile import compiled, denoise
from tests.support.outliers import varying_outliers


JOINT, SINGLE = "transformer.transformer_blocks.0.attn", "transformer.single_transformer_blocks.0.attn"
HARD = 16.0


@pytest.fixture
def outliers(monkeypatch):
    """Channels of Q and K of the layers in this set become many times larger, in every INT8 call: others in every
    token, so that no balance of channels takes them away."""
    chosen, attend = set(), processors._attend

    def harder(query, key, value, attn_mask, is_causal, scale, own, index):
        if own.layer in chosen:
            query, key = (varying_outliers(x, HARD) for x in (query, key))
        return attend(query, key, value, attn_mask, is_causal, scale, own, index)

    monkeypatch.setattr(processors, "_attend", harder)
    return chosen


def rotations(handle):
    return {row["layer"]: (row["rotation"], row["rotated_calls"], row["calls"]) for row in handle.report().rows}


def worst(probe, step):
    rows = [row for row in probe.data() if row["step"] == step]
    return {name: min(r["sqnr_db"] for r in rows if r["layer"] == name) for name in {r["layer"] for r in rows}}


# --- by choice ---


@pytest.mark.parametrize("scaling", ["timestep", "delayed", "dynamic", "per_block"])
def test_rotation_by_layer_is_run_counted_and_reported(scaling):
    pipe, model, inputs = flux_pipe()
    stock = denoise(pipe, model, inputs, steps=4)
    with sp.apply(pipe, options(scaling=scaling, layers={"*single*": {"rotation": "hadamard"}})) as handle:
        result = denoise(pipe, model, inputs, steps=4)
        assert rotations(handle) == {JOINT: ("none", 0, 4), SINGLE: ("hadamard", 4, 4)}
        assert "rotated" in str(handle.report())
        if scaling == "timestep":  # planned from the second step on, in its own channels
            assert [row["dynamic_calls"] for row in handle.report().rows] == [1, 1]
            assert [site.rotation for denoiser in handle._denoisers for site in denoiser.state.sites] == [
                "none",
                "hadamard",
            ]
    assert (result - stock).norm() < 0.05 * stock.norm()
    with sp.apply(
        pipe, options(rotation="hadamard", scaling=scaling, layers={SINGLE: {"rotation": "none"}})
    ) as handle:
        assert not torch.equal(denoise(pipe, model, inputs, steps=4), result)
        assert rotations(handle) == {JOINT: ("hadamard", 4, 4), SINGLE: ("none", 0, 4)}


def test_a_refresh_and_a_copy_keep_the_rotation():
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(layers={SINGLE: {"rotation": "hadamard"}})) as handle:
        denoise(pipe, model, inputs, steps=2)
        handle.freeze_scales()
        model.set_attn_processor({name: type(p)._sage_base() for name, p in model.attn_processors.items()})
        handle.refresh()
        denoise(pipe, model, inputs, steps=2)
        assert rotations(handle) == {JOINT: ("none", 0, 4), SINGLE: ("hadamard", 4, 4)}
        assert all(row["dynamic_calls"] == 1 for row in handle.report().rows)  # the scales of both went on
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin(**inputs)
        counts = {n: p._sage.events.numbers()[EVENTS.index("rotated")] for n, p in twin.attn_processors.items()}
        assert sorted(counts.values()) == [0, 1]


# --- found by the probe ---


@pytest.mark.parametrize("scaling", ["timestep", "dynamic"])
def test_auto_rotates_the_layers_that_need_it_from_the_next_step_on(outliers, scaling):
    outliers.add(JOINT)
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(scaling=scaling, rotation="auto")) as handle:
        denoise(pipe, model, inputs, steps=5)
        assert rotations(handle) == {SINGLE: ("none", 0, 5), JOINT: ("hadamard", 4, 5)}
        notes = {row["layer"]: row["note"] for row in handle.report().rows}
        assert "rotated since" in notes[JOINT] and "rotated since" not in notes[SINGLE]
        assert float(notes[JOINT].split()[2]) < config_module.ROTATE_BELOW_DB <= float(notes[SINGLE].split()[2])
        if scaling == "timestep":  # first call, and first call in the other channels
            assert {row["layer"]: row["dynamic_calls"] for row in handle.report().rows} == {JOINT: 2, SINGLE: 1}
        assert all(layer.own.probe is None for denoiser in handle._denoisers for layer in denoiser.layers)
        with handle.probe(every=1) as probe:
            denoise(pipe, model, inputs, steps=3)  # a second run, decided by its own first step
        assert rotations(handle)[JOINT] == ("hadamard", 6, 8)
        found = worst(probe, 2)  # planned from a rotated step
    with sp.apply(pipe, options(scaling=scaling)) as handle, handle.probe(every=1) as probe:
        denoise(pipe, model, inputs, steps=3)
        plain = worst(probe, 2)
    assert found[JOINT] > plain[JOINT] + 3, (found, plain)
    assert abs(found[SINGLE] - plain[SINGLE]) < 3


def test_auto_decides_anew_in_every_run_and_waits_for_the_first_int8_step(outliers):
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(rotation="auto", keep={"first_steps": 2})) as handle:
        denoise(pipe, model, inputs, steps=4)
        assert {name: row[0] for name, row in rotations(handle).items()} == {JOINT: "none", SINGLE: "none"}
        assert all("in step 2" in row["note"] for row in handle.report().rows)
        outliers.add(JOINT)
        denoise(pipe, model, inputs, steps=4)
        assert rotations(handle) == {JOINT: ("hadamard", 1, 4), SINGLE: ("none", 0, 4)}
        outliers.clear()
        denoise(pipe, model, inputs, steps=4)
        assert rotations(handle) == {JOINT: ("none", 1, 6), SINGLE: ("none", 0, 6)}
        handle.reset()
        denoise(pipe, model, inputs, steps=4)
        assert rotations(handle) == {JOINT: ("none", 0, 2), SINGLE: ("none", 0, 2)}


@pytest.mark.parametrize("scaling", ["timestep", "timestep_adaptive"])
def test_auto_keeps_what_was_decided_where_the_scales_are_kept(outliers, scaling):
    """Scales of rotated channels say nothing of plain ones."""
    outliers.add(JOINT)
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(rotation="auto", scaling=scaling)) as handle:
        denoise(pipe, model, inputs, steps=4)
        if scaling == "timestep":
            handle.freeze_scales()
        outliers.clear()
        denoise(pipe, model, inputs, steps=4)
        assert rotations(handle) == {JOINT: ("hadamard", 7, 8), SINGLE: ("none", 0, 8)}
        if scaling == "timestep":  # all steps but the first run's first one, and the first one in the other channels
            dynamic = {row["layer"]: row["dynamic_calls"] for row in handle.report().rows}
            assert dynamic[SINGLE] == 1 and dynamic[JOINT] >= 3  # plans of outliers that are gone do not fit
        handle.reset()
        denoise(pipe, model, inputs, steps=4)
        assert rotations(handle) == {JOINT: ("none", 0, 4), SINGLE: ("none", 0, 4)}


def test_scales_of_other_channels_are_refused(outliers, tmp_path):
    outliers.add(JOINT)
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(rotation="auto")) as handle:
        denoise(pipe, model, inputs, steps=3)
        handle.save_scales(tmp_path / "a.safetensors")
    with sp.apply(pipe, options()) as handle:
        with pytest.raises(ValueError, match=f"got hadamard for rotation of layer '{JOINT}'.*layers="):
            handle.load_scales(tmp_path / "a.safetensors")
    with sp.apply(pipe, options(layers={JOINT: {"rotation": "hadamard"}})) as handle:
        assert handle.load_scales(tmp_path / "a.safetensors")
        denoise(pipe, model, inputs, steps=3)
        assert rotations(handle)[JOINT][0] == "hadamard"


@pytest.mark.slow("compiles two versions")
def test_compiled_auto_makes_two_versions(outliers):
    outliers.add(JOINT)
    pipe, model, inputs = flux_pipe()
    torch._dynamo.reset()
    with sp.apply(pipe, options(rotation="auto")) as handle:
        eager = denoise(pipe, model, inputs, steps=6)
        handle.reset()
        fast, counter = compiled(model, "aot_eager")
        result = denoise(pipe, fast, inputs, steps=6)
        assert counter.frame_count == 2  # the measured step, and the others
        assert rotations(handle) == {SINGLE: ("none", 0, 6), JOINT: ("hadamard", 5, 6)}
        with torch._dynamo.config.patch(error_on_recompile=True):
            denoise(pipe, fast, inputs, steps=6)
            handle.reset()
            denoise(pipe, fast, inputs, steps=6)
    torch._dynamo.reset()
    torch.testing.assert_close(result, eager, rtol=1e-4, atol=1e-4)
