"""Presets: one table of options, every one of which may be replaced; reports name the preset."""

from __future__ import annotations

import csv
import dataclasses
import pickle

import pytest
import torch
from diffusers import DiffusionPipeline

import sage_processors as sp
from sage_processors.calibration import policy_files
from sage_processors.diffusion import denoiser
from sage_processors.evaluation.quality import Variant, evaluate
from sage_processors.linears import modules
from sage_processors.presets import PRESETS, heading, overridden
from tests.diffusion.calls.test_processors import forward
from tests.support.repository import ROOT
from tests.support.tiny_models import MODELS


def test_a_preset_is_its_table_and_what_is_given_beside_it():
    assert sp.SageAttnProcessor().preset is None
    for name, options in PRESETS.items():
        alone = sp.SageAttnProcessor(name)
        assert dataclasses.replace(sp.SageAttnProcessor(**options), preset=name) == alone == sp.SageAttnProcessor(
            preset=name
        )  # fmt: skip
        assert overridden(alone) == []
        for option, value in {"linears": "fp8", "graphs": "off", "keep": {"first_steps": 2}, "min_tokens": 7}.items():
            config = sp.SageAttnProcessor(name, **{option: value})
            assert overridden(config) == [option]
            usual = getattr(sp.SageAttnProcessor(**{option: value}), option)
            assert getattr(config, option) == usual != getattr(alone, option)
    assert sp.SageAttnProcessor("small").linears.drop_weights and sp.SageAttnProcessor("fast").graphs == "auto"


def test_a_preset_survives_pickle_rules_and_policy_files(tmp_path):
    config = sp.SageAttnProcessor("fast", keep={"last_steps": 1})
    assert pickle.loads(pickle.dumps(config)) == config and "preset='fast'" in repr(config)
    ruled = config.with_rules(sp.LayerRule("*.0.*", recipe="16bit")).with_scaling("dynamic")
    assert ruled.preset == "fast" and overridden(ruled) == ["scaling", "keep", "layers"]
    assert config.for_layer("a.0.b").linears == config.linears
    path = tmp_path / "policy.json"
    policy_files.write_policy(path, ruled, [], budget={}, result={}, curve=[])
    assert sp.SageAttnProcessor.from_policy(path) == ruled


def test_the_report_begins_with_the_preset():
    model, _ = MODELS["flux"]()
    with sp.apply(model, sp.SageAttnProcessor("fast", graphs="off", min_tokens=0)) as handle:
        report = handle.report()
        first = 'Preset "fast" with other options for graphs, min_tokens'
        assert report.heading == report.as_dict()["heading"] == str(report).splitlines()[0] == first
    with sp.apply(model, sp.SageAttnProcessor("fast")) as handle:
        assert handle.report().heading == 'Preset "fast"'
    assert heading(sp.SageAttnProcessor()) == ""


def test_newest_rows_say_that_fp8_pv_is_no_faster_in_a_graph():
    """There it computes a running maximum. A row that says otherwise asks for a preset that has it."""
    newest: dict[tuple[str, str], dict[str, float]] = {}
    with (ROOT / "kernels/benchmarks/results.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["suite"], row["metric"], row["provider"]) != ("attention_fwd", "throughput", "sage_kernels"):
                continue
            case, _, kind = row["case"].partition("/")
            found = newest.setdefault((row["gpu"], case), {})
            if (row["recipe"], kind) == ("qk_int8_pv_bf16", ""):
                found[row["commit"]] = float(row["median"])
            elif (row["recipe"], kind) == ("qk_int8_pv_fp8", "running_max") and row["commit"] in found:
                found["ratio"] = float(row["median"]) / found[row["commit"]]
    ratios = {case: found["ratio"] for (_, case), found in newest.items() if "ratio" in found}
    assert len(ratios) > 20 and {"flux_1024", "flux_2048", "wan21_1_3b_480p81_self"} <= ratios.keys()
    assert max(ratios.values()) <= 1
    assert all("recipe" not in options for options in PRESETS.values())


@pytest.mark.parametrize("is_measured", [True, False])
def test_without_graphs_an_unknown_gpu_runs_linear_layers_in_16_bit(is_measured, monkeypatch):
    model, inputs = MODELS["flux"]()
    monkeypatch.setattr(denoiser, "is_measured", lambda device: is_measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = {"graphs": "off", "layers": {"*": {"linears": "int8"}}, "min_tokens": 0}
    with sp.apply(model, sp.SageAttnProcessor("fast", **options)) as handle:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(modules, "is_timed", lambda device: True)
        linears = handle._denoisers[0].linears
        linears.run_short_calls(True) if is_measured else None  # here all calls have too little work
        forward(model, inputs)
        report = handle.report()
    assert (report.linears.calls > 0) == is_measured and ("short" in report.linears.fallbacks) != is_measured
    assert report.calls == len(report.rows)


@pytest.mark.slow("draws with three pipelines")
@pytest.mark.parametrize("name", [*sp.pipelines.PIPELINES, *sp.pipelines.VIDEOS])
def test_fast_draws_the_same_pictures_as_stock(name):
    pipe = DiffusionPipeline.from_pretrained(sp.pipelines.path(name), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    config = sp.SageAttnProcessor("fast", min_tokens=0, linears=sp.Linears("int8", min_features=0))
    prompts, arguments = ["a red circle on a blue background"], sp.pipelines.call_arguments(name)
    found = evaluate(pipe, prompts, [0], [Variant("fast", config)], steps=4, arguments=arguments)["fast"]
    assert found.int8_calls and not found.fallback_calls
    assert found.psnr_db[0] >= 40
