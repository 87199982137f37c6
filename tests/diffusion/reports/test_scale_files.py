"""Scale files: the run that it would have been, bit for bit, and nothing from a file that does not fit."""

from __future__ import annotations

import json

import diffusers
import pytest
import torch
from safetensors.torch import save_file

import sage_processors as sp
from sage_processors.diffusion.reports import scale_files
from tests.diffusion.reports.scale_files import Refusal, changed, flux_file, learnt, same, values_of
from tests.diffusion.test_apply_pipelines import EVERYTHING
from tests.support.plans import calls_without_a_plan
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import PIPES


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return flux_file(tmp_path_factory.mktemp("scales"))


@pytest.fixture(scope="module")
def refused():
    return Refusal()


# --- P02: what is restored ---


@pytest.mark.parametrize("name", PIPES)
def test_P02_saved_and_loaded_scales_restore_the_run_bit_for_bit(name, tmp_path):
    pipe, handle, run = learnt(name)
    handle.save_scales(tmp_path / "scales.safetensors")
    handle.freeze_scales()
    expected = run(seed=5)

    other, rerun = PIPES[name]()
    cold, _ = PIPES[name]()
    with other.set_attn_processor(EVERYTHING) as fresh:
        assert not torch.equal(rerun(seed=5), expected)  # else the test could not fail
        calls = fresh.report().calls
        fresh.load_scales(tmp_path / "scales.safetensors")
        assert fresh.report().calls == calls
        assert torch.equal(rerun(seed=5), expected)
        report = fresh.report()
    warm = {row["layer"]: row for row in report.rows}
    called = [row for row in handle.report().rows if row["calls"]]
    assert sum(row["misfit_fraction"] == 0 for row in called) > len(called) / 2
    for row in called:  # only the first steps of the runs before were without a plan
        if not row["misfit_fraction"]:
            assert (calls_without_a_plan(row), calls_without_a_plan(warm[row["layer"]])) == (2, 1), row["layer"]
    assert other.components.keys() == cold.components.keys()


@pytest.mark.parametrize("name", ["flux", "unet_sd15"])
def test_P02_a_model_without_a_pipeline_goes_on_at_its_timestep(name, tmp_path):
    def steps(model, inputs, values):
        key = next(key for key in ("timestep", "timesteps", "t") if key in inputs)
        as_given = (lambda v: torch.full_like(inputs[key], v)) if torch.is_tensor(inputs[key]) else int
        with torch.no_grad():
            return [model(**inputs | {key: as_given(value)})[0] for value in values]

    model, inputs = MODELS[name]()
    handle = sp.apply(model, EVERYTHING)
    steps(model, inputs, [900, 600, 300])
    handle.save_scales(tmp_path / "scales.safetensors")
    at_save = values_of(handle)
    handle.freeze_scales()
    expected = steps(model, inputs, [900, 600])  # the timestep turned back: another run

    model, inputs = MODELS[name]()
    with sp.apply(model, EVERYTHING) as fresh:
        assert not torch.equal(steps(model, inputs, [900, 600])[0], expected[0])
        calls = fresh.report().calls
        fresh.load_scales(tmp_path / "scales.safetensors")
        assert fresh.report().calls == calls > 0 and same(at_save, values_of(fresh))
        assert all(torch.equal(a, b) for a, b in zip(steps(model, inputs, [900, 600]), expected, strict=True))


def test_P02_a_step_with_nan_can_be_saved_and_is_not_learnt(tmp_path):
    model, inputs = MODELS["flux"]()
    handle = sp.apply(model, EVERYTHING)
    with torch.no_grad():
        model(**inputs)
        model(**inputs | {"hidden_states": inputs["hidden_states"] * float("nan")})
        handle.save_scales(tmp_path / "scales.safetensors")
        handle.freeze_scales()
        expected = [model(**inputs)[0] for _ in range(2)]
        model, inputs = MODELS["flux"]()
        sp.apply(model, EVERYTHING).load_scales(tmp_path / "scales.safetensors")
        assert all(torch.equal(model(**inputs)[0], out) for out in expected)
    assert torch.isfinite(expected[1]).all()


def test_saving_replaces_in_one_step_and_changes_nothing(tmp_path):
    _, handle, _ = learnt("ddpm")
    before, path = values_of(handle), tmp_path / "scales.safetensors"
    path.write_bytes(b"old")
    with path.open("rb") as reader:  # who began to read the old file reads on in it
        handle.save_scales(str(path))
        assert reader.read() == b"old"
    assert same(before, values_of(handle)) and [f.name for f in tmp_path.iterdir()] == [path.name]
    first = path.read_bytes()
    handle.save_scales(path)
    assert path.read_bytes() == first
    with pytest.raises(FileNotFoundError, match="nowhere/scales.safetensors"):
        handle.save_scales(tmp_path / "nowhere" / "scales.safetensors")


def test_scales_move_with_the_model():
    """Offloading moves a model to its device at its first call: after the file was loaded."""
    _, handle, _ = learnt("ddpm")
    state = handle._denoisers[0].state
    before, calls = state.snapshot(), state.summary()
    state.device = torch.device("meta")  # so that the CPU is another device
    state.to("cpu")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.snapshot().items())
    assert calls[0]["calls"] > 0 and all(row["calls"] == 0 for row in state.summary())


# --- Q01: another model's file ---


def _rename(old, new):
    def rename(metadata):
        for layer in metadata["parts"][0]["layers"]:
            layer["name"] = layer["name"].replace(old, new) if layer["name"].startswith(old) else layer["name"]

    return rename


def _set(name, value):
    return lambda metadata: metadata["parts"][0].update({name: value})


def _set_layer(name, value):
    return lambda metadata: metadata["parts"][0]["layers"][0].update({name: value})


Q01 = {
    "missing": (lambda m: m["parts"][0]["layers"].pop(0), ["none for ['transformer.transformer_blocks.0.attn']"]),
    "extra": (
        lambda m: m["parts"][0]["layers"].append(
            {"name": "transformer.x.attn", "kv_heads": 2, "head_dim": 16, "rotation": "none"}
        ),
        ["lacks: ['transformer.x.attn']", "none for []"],
    ),
    # what a substring match takes for the same layer, and what an IP-Adapter's second call is named
    "substring": (
        _rename("transformer.transformer_blocks", "transformer.single_transformer_blocks.x.transformer_blocks"),
        ["lacks: ['transformer.single_transformer_blocks.x.transformer_blocks.0.attn'", "another model"],
    ),
    "prefix": (
        _rename("transformer.transformer_blocks", "transformer_blocks"),
        ["lacks: ['transformer_blocks.0.attn'"],
    ),
    "twice": (lambda m: m["parts"][0]["layers"].append(m["parts"][0]["layers"][0]), ["or twice"]),
    "order": (lambda m: m["parts"][0]["layers"].reverse(), ["in another order"]),
    "class": (_set("model_class", "UNet2DModel"), ["UNet2DModel", "expected FluxTransformer2DModel"]),
    "part": (_set("name", "unet"), ["lacks: ['unet']", "none for ['transformer']"]),
    "no_parts": (lambda m: m.update(parts=[]), ["none for ['transformer']"]),
    "rotation": (_set_layer("rotation", "hadamard"), ["got hadamard for rotation of layer", "attn", "expected none"]),
    "heads": (_set_layer("kv_heads", 7), ["got 7 for kv_heads of layer", "attn", "expected 2"]),
    "head_dim": (_set_layer("head_dim", 99), ["got 99 for head_dim of layer", "attn"]),
    "bins": (_set("bins", 8), ["got 8 for bins", "expected 16"]),
    "margin": (_set("margin", 1.5), ["got 1.5 for margin", "expected 0.9", "'margin': 1.5"]),
    "config": (_set("config_hash", "0" * 64), ["for config_hash of transformer", 'on_mismatch="fresh"']),
    "dtype": (_set("dtype", "torch.float16"), ["got torch.float16 for dtype", "expected torch.float32"]),
    "adapters": (_set("adapters", ["style:1"]), ["got ['style:1'] for adapters", "same LoRA adapters"]),
    "version": (lambda m: m.update(format_version=1), ["got format_version 1, expected 3"]),
}


@pytest.mark.parametrize("case", Q01)
def test_Q01_scales_of_another_model_are_refused_by_name(case, saved, refused, tmp_path):
    change, words = Q01[case]
    message = refused(changed(saved, tmp_path / "x.safetensors", change))
    assert all(word in message for word in words) and message.startswith("path: got"), message


def test_Q01_a_file_of_another_pipeline_is_refused(refused, tmp_path):
    _, handle, _ = learnt("ddpm", runs=1)
    handle.save_scales(tmp_path / "ddpm.safetensors")
    assert "['unet']" in refused(tmp_path / "ddpm.safetensors")


def test_Q01_a_mismatch_may_start_anew_but_damage_never(saved, tmp_path, caplog):
    pipe, run = PIPES["flux"]()
    handle = pipe.set_attn_processor(EVERYTHING)
    before = values_of(handle)
    path = changed(saved, tmp_path / "x.safetensors", _set("dtype", "torch.float16"))
    assert handle.load_scales(path, on_mismatch="fresh") is False
    assert same(before, values_of(handle)) and "learnt from the start: path: got torch.float16" in caplog.text
    assert handle.load_scales(saved[0], on_mismatch="fresh") is True and not same(before, values_of(handle))
    path.write_bytes(saved[0].read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged"):
        handle.load_scales(path, on_mismatch="fresh")
    with pytest.raises(ValueError, match="on_mismatch: got 'warn'"):
        handle.load_scales(saved[0], on_mismatch="warn")


def test_Q01_a_table_without_lora_is_none_for_the_model_with_it(tmp_path):
    peft = pytest.importorskip("peft")
    pipe, run = PIPES["flux"]()
    handle = pipe.set_attn_processor(EVERYTHING)
    run()
    handle.save_scales(tmp_path / "x.safetensors")
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False)
    pipe.transformer.add_adapter(config, adapter_name="style")
    with pytest.raises(ValueError, match=r"got \[\] for adapters of transformer, expected \['style:"):
        handle.load_scales(tmp_path / "x.safetensors")
    pipe.transformer.disable_adapters()
    assert handle.load_scales(tmp_path / "x.safetensors")


SCHEMA = {
    "unknown_key": (lambda m: m.update(extra=1), "unknown keys ['extra']"),
    "missing_key": (lambda m: m.pop("package_version"), "missing keys ['package_version']"),
    "unknown_part_key": (_set("code", "os.system"), "unknown keys ['code']"),
    "unknown_layer_key": (_set_layer("scale", 1.0), "unknown keys ['scale']"),
    "bool_for_int": (_set("bins", True), "got bool for bins"),
    "bool_for_version": (lambda m: m.update(format_version=True), "got bool for format_version"),
    "text_for_list": (_set("layers", "all"), "got str for layers"),
    "list_for_layer": (lambda m: m["parts"][0]["layers"].append([]), "got list for a layer"),
    "list": ("[]", "got list for the metadata"),
    "no_json": ("{", "expected JSON"),
    "nan": ('{"format_version": NaN}', "the constant NaN"),
    "repeated": ('{"format_version": 1, "format_version": 1}', "there twice"),
    "deep": ("[" * 100_000, "expected JSON"),
    "large": ('"' + "x" * (2 * 2**20) + '"', "expected at most 2097152"),
}


@pytest.mark.parametrize("case", SCHEMA)
def test_Q01_metadata_is_read_strictly(case, saved, refused, tmp_path):
    metadata, words = SCHEMA[case]
    assert words in refused(changed(saved, tmp_path / "x.safetensors", metadata))


def test_Q01_other_safetensors_files_are_refused(saved, refused, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(saved[2], path)
    assert "the metadata" in refused(path)
    save_file(saved[2], path, metadata={"format": "pt"})
    assert "unknown keys ['format']" in refused(path)
    save_file(saved[2] | {"extra": torch.zeros(1)}, path, metadata={"sage_processors": json.dumps(saved[1])})
    assert "unknown tensors ['extra']" in refused(path)
    few = {name: tensor for name, tensor in saved[2].items() if not name.endswith("plan")}
    save_file(few, path, metadata={"sage_processors": json.dumps(saved[1])})
    assert "missing tensors ['transformer.plan']" in refused(path)


# --- Q04: timesteps that were not seen ---


def test_Q04_a_level_that_no_earlier_run_saw_is_planned_from_the_step_before(tmp_path):
    """Few steps leave most bins empty: the finer run gets its scales from the file where that has any."""
    _, handle, run = learnt("ddpm")
    handle.save_scales(tmp_path / "x.safetensors")
    pipe, rerun = PIPES["ddpm"]()
    with pipe.set_attn_processor(EVERYTHING) as fresh:
        fresh.load_scales(tmp_path / "x.safetensors")
        rerun(steps=25)
        assert all(row["calls"] == 25 and calls_without_a_plan(row) == 0 for row in fresh.report().rows), str(
            fresh.report()
        )


def test_Q04_another_scheduler_uses_what_was_learnt(tmp_path):
    """Noise levels, not timesteps, are the key: other timesteps, betas and step counts start warm all the same."""
    trailing = {"timestep_spacing": "trailing"}  # starts at pure noise
    pipe, run = PIPES["ddpm"]()
    pipe.scheduler = diffusers.DDIMScheduler(**trailing)
    with pipe.set_attn_processor(EVERYTHING) as handle:
        run(steps=4)
        handle.save_scales(tmp_path / "x.safetensors")

    pipe.scheduler = diffusers.DDPMScheduler(beta_schedule="scaled_linear", **trailing)
    stock = run(steps=6)
    with pipe.set_attn_processor(EVERYTHING) as fresh:
        fresh.load_scales(tmp_path / "x.safetensors")
        ours = run(steps=6)
        assert all(calls_without_a_plan(row) == 0 for row in fresh.report().rows), str(fresh.report())
        # a run that starts where nothing was learnt scales its first step by itself
        pipe.scheduler = diffusers.DDIMScheduler(timestep_spacing="leading")
        run(steps=1)  # at timestep 0
        assert all(calls_without_a_plan(row) == 1 for row in fresh.report().rows), str(fresh.report())
    assert sp.metrics.sqnr_db(ours, stock) > 25


def test_adapters_are_those_that_a_layer_has_and_that_are_not_disabled():
    """PEFT names all active adapters on every layer, whichever it has."""

    class Lora(torch.nn.Module):
        def __init__(self, *, disabled=False, **scaling):
            super().__init__()
            self.active_adapters, self.scaling, self.disable_adapters = ["style", "face"], scaling, disabled

    model = torch.nn.Sequential(Lora(style=0.5, unused=2.0), Lora(face=1.0), Lora(style=7.0, disabled=True))
    assert scale_files._adapters(model) == ["face:1", "style:0.5"]
