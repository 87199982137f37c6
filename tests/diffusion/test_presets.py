"""Presets: one table of options, every one of which may be replaced; reports name the preset."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

import sage_processors as sp
from sage_processors.calibration import policy_files
from sage_processors.presets import PRESETS, heading, overridden
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


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("fats",), {}, ValueError, "preset: got 'fats', expected one of .*'fast'.*; the closest is 'fast'"),
        (("qk_int8_pv_bf16",), {}, ValueError, "preset: got 'qk_int8_pv_bf16', expected one of"),
        ((8,), {}, TypeError, "preset: got int, expected one of"),
        (("fast",), {"linear": "int8"}, TypeError, "unknown option 'linear'.*; the closest is 'linears'"),
        (("fast",), {"preset": "small"}, TypeError, "multiple values for argument 'preset'"),
        (("fast", "int8"), {}, TypeError, "positional"),
        (("fast",), {"scaling": "per_token", "skip": {}}, ValueError, "expected a planned scaling"),
    ],
)
def test_a_wrong_preset_or_option_is_refused_with_the_closest_name(arguments, options, error, words):
    with pytest.raises(error, match=words):
        sp.SageAttnProcessor(*arguments, **options)


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
