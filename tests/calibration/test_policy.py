"""Policy files: what is read is what was written, and nothing else gets in."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

import sage_processors as sp
from sage_processors.calibration import policy_files as policy
from tests.diffusion.steps.test_windows import flux_pipe


LAYER = "transformer.transformer_blocks.0.attn"
CONFIG = sp.SageAttnProcessor(
    min_tokens=7,
    on_unsupported="raise",
    scaling=sp.Scaling("sigma_power", gamma=-0.5, margin=0.75, history=7),
    linears=sp.Linears("fp8", min_features=3),
    keep=sp.Keep(first_steps=1, last_steps=2, noise=(0.0, 0.125)),
    skip=sp.Skip(noise=(0.25, 0.5)),
    layers={
        LAYER: {"recipe": "16bit", "skip_limit": (0.5, 0.0, 0.125), "keep_noise": ()},
        "*single*": {"scaling": "per_token", "linears": "none"},
        "*": {"recipe": "16bit", "skip_limit": 0.25},
    },
)


@pytest.fixture
def written(tmp_path):
    """(path, content) of a policy for the tiny Flux pipeline."""
    pipe, _, _ = flux_pipe()
    with sp.apply(pipe, CONFIG) as handle:
        models = policy.describe_models(handle)
    path = tmp_path / "policy.json"
    policy.write_policy(path, CONFIG, models, budget={"target_psnr": 42.0}, result={"met": True}, curve=[{"a": 1.5}])
    return path, json.loads(path.read_text())


def test_every_option_survives(written):
    path, content = written
    assert sp.SageAttnProcessor.from_policy(path) == CONFIG
    assert policy.read_policy(str(path))[1] == content
    assert content["budget"] == {"target_psnr": 42.0} and content["curve"] == [{"a": 1.5}]
    default = path.with_name("default.json")
    policy.write_policy(default, sp.SageAttnProcessor(), [], budget={}, result={}, curve=[])
    assert sp.SageAttnProcessor.from_policy(default) == sp.SageAttnProcessor()


def test_the_same_policy_has_the_same_bytes_and_no_leftovers(written):
    path, content = written
    again = path.with_name("again.json")
    policy.write_policy(
        again, CONFIG, content["models"], budget={"target_psnr": 42.0}, result={"met": True}, curve=[{"a": 1.5}]
    )
    assert again.read_bytes() == path.read_bytes()
    assert path.read_text() == json.dumps(content, indent=1, sort_keys=True) + "\n"  # whatever order options come in
    assert sorted(p.name for p in path.parent.iterdir()) == ["again.json", "policy.json"]


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError):
        policy.write_policy(tmp_path / "p.json", CONFIG, [], budget={}, result={"psnr_db": float("nan")}, curve=[])
    assert list(tmp_path.iterdir()) == []


def test_a_policy_fits_its_model_applied_or_not(written):
    path, _ = written
    pipe, _, _ = flux_pipe()
    assert sp.SageAttnProcessor.from_policy(path, pipe) == CONFIG
    with sp.apply(pipe, sp.SageAttnProcessor()) as handle:
        assert sp.SageAttnProcessor.from_policy(path, pipe) == CONFIG
        assert sp.handle_of(pipe) is handle
    with sp.apply(pipe, sp.SageAttnProcessor.from_policy(path, pipe)) as handle:
        assert {row["fallbacks"].get("kept", 0) for row in handle.report().rows} == {0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(model_class="Other"), "model_class"),
        (lambda m: m.update(config_hash="0" * 64), "config_hash"),
        (lambda m: m["layers"].pop(), "layers"),
        (lambda m: m.update(name="unet"), "name"),
    ],
)
def test_a_policy_of_another_model_is_refused(written, change, words):
    path, content = written
    change(content["models"][0])
    path.write_text(json.dumps(content))
    pipe, _, _ = flux_pipe()
    with pytest.raises(ValueError, match=f"target: got {words} .*another model"):
        sp.SageAttnProcessor.from_policy(path, pipe)
    assert sp.SageAttnProcessor.from_policy(path) == CONFIG
    content["models"] = []
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="target: got 1 denoisers, expected 0"):
        sp.SageAttnProcessor.from_policy(path, pipe)


def edited(content, **changes):
    return json.dumps(content | changes)


def grouped(content, group, **changes):
    """A policy with other options in one group."""
    return edited(content, options=content["options"] | {group: content["options"][group] | changes})


def limited(content, limit):
    rule = content["options"]["layers"][-1] | {"skip_limit": limit}
    return edited(content, options=content["options"] | {"layers": [rule]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lambda c: "", "expected JSON"),
        (lambda c: "[]", "got list for the policy"),
        (lambda c: json.dumps(c)[:-5], "expected JSON"),
        (lambda c: json.dumps(c).replace('"target_psnr": 42.0', '"target_psnr": NaN'), "NaN"),
        (lambda c: json.dumps(c)[:-1] + ', "budget": {}}', "twice"),
        (lambda c: edited(c, format_version=9), "format_version 9, expected 8"),
        (lambda c: edited(c, format_version=6), "format_version 6, expected 8; write it again"),
        (lambda c: edited(c, format_version=True), "got bool for format_version"),
        (lambda c: edited(c, format_version=[5]), "got list for format_version"),
        (lambda c: edited(c, extra=1), "unknown keys"),
        (lambda c: edited(c, models=[1]), "got int for an entry of models"),
        (lambda c: edited(c, options={}), "options that differ"),
        (lambda c: edited(c, options=c["options"] | {"__class__": "x"}), "options that differ"),
        (lambda c: grouped(c, "scaling", margin=-1), "margin: got -1"),
        (lambda c: grouped(c, "keep", more=1), "options of keep that differ in .'more'"),
        (lambda c: edited(c, options=c["options"] | {"linears": {}}), "options of linears that differ in"),
        (lambda c: edited(c, options=c["options"] | {"layers": [{"pattern": "*"}]}), "options of layers that differ"),
        (lambda c: limited(c, 10**4000), "beyond an int64"),
        (lambda c: limited(c, float("nan")), "NaN"),
        (lambda c: "[" * 100_000, "expected JSON"),
    ],
)
def test_damaged_policies_are_refused(written, text, words):
    path, content = written
    path.write_text(text(content))
    with pytest.raises(ValueError, match=words):
        sp.SageAttnProcessor.from_policy(path)


def test_options_of_a_wrong_type_are_type_errors(written):
    path, content = written
    path.write_text(edited(content, options=content["options"] | {"scaling": 3}))
    with pytest.raises(TypeError, match="scaling"):
        sp.SageAttnProcessor.from_policy(path)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_pickles_archives_and_huge_files_are_refused_unread(tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="expected JSON"):
        sp.SageAttnProcessor.from_policy(bad)
    torch.save({"a": Bomb()}, bad)
    with pytest.raises(ValueError, match="expected JSON"):
        sp.SageAttnProcessor.from_policy(bad)
    with bad.open("wb") as file:
        file.truncate(2**40)  # sparse: reading it whole would end the process
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        sp.SageAttnProcessor.from_policy(bad)


def test_Q42_a_file_of_the_very_limit_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"12345")
    assert policy.read_small(path, 5) == b"12345"
    with pytest.raises(ValueError, match="a file of more than 4 bytes"):
        policy.read_small(path, 4)


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        (3, TypeError, "path: got int"),
        ("policy.safetensors", ValueError, "a name that ends in .json"),
        ("missing.json", FileNotFoundError, "which does not exist"),
    ],
)
def test_bad_paths(path, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        sp.SageAttnProcessor.from_policy(path)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match="no regular file"):
        sp.SageAttnProcessor.from_policy(tmp_path / "folder.json")


def test_config_hash_sees_the_config_and_the_class():
    first, second = flux_pipe()[1], flux_pipe()[1]
    assert policy.config_hash(first) == policy.config_hash(second)
    second.register_to_config(patch_size=9)
    assert policy.config_hash(first) != policy.config_hash(second)
    assert policy.config_hash(torch.nn.Linear(1, 1)) != policy.config_hash(torch.nn.ReLU())
