"""The commands on models of transformers: what they report of one, and how they measure one that is not ours."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner


transformers = pytest.importorskip("transformers")
pytest.importorskip("diffusers")  # its loggers keep the output of the command that imports it, which a test closes

import sage_processors as sp  # noqa: E402
from sage_processors.cli import main as cli  # noqa: E402
from sage_processors.evaluation import language  # noqa: E402
from tests.support import real_models  # noqa: E402
from tests.support.tiny_language_models import MODELS  # noqa: E402


def invoke(*arguments, code=0) -> str:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "200", "HF_HUB_OFFLINE": "1"})
    assert result.exit_code == code, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


def folder_of(name: str, path):
    """A folder with the config of a tiny model, and no weights."""
    model, _ = MODELS[name]()
    model.config.architectures = [type(model).__name__]  # as save_pretrained of a model does
    model.config.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["llama", "siglip", "t5"])
def test_report_lists_every_layer_of_a_model_of_transformers(name, tmp_path):
    output = invoke("report", folder_of(name, tmp_path))
    rows = json.loads(invoke("report", tmp_path, "--json"))["rows"]
    model, inputs = MODELS[name]()
    model.set_attn_implementation("sage_int8")
    expected = sp.attention_report(model).rows
    assert [row["layer"] for row in rows] == [row["layer"] for row in expected]
    number = sum(row["status"] == "active" for row in expected)
    assert f"{number} layers active: sage_int8, qk_int8_pv_bf16, per_token, hadamard" in output and number >= 2
    assert output.startswith("Nothing ran") and not list(tmp_path.glob("*.safetensors"))


def test_report_takes_a_recipe_and_gives_data(tmp_path):
    folder = folder_of("llama", tmp_path)
    found = json.loads(invoke("report", folder, "--recipe", "int_flash_half", "--json"))
    assert [row["implementation"] for row in found["rows"]] == ["sage_int_fa_half"] * 2 and found["calls"] == 0
    assert "3 layers active" in invoke("report", "tiny_lm")


def test_the_forecast_of_a_model_of_transformers_is_what_apply_sets():
    rows = json.loads(invoke("report", "tiny_lm", "--json"))["rows"]
    model, _ = language.load("tiny_lm")
    with sp.apply(model, sp.SageAttnProcessor()) as handle:
        applied = handle.report().rows
    names = ("layer", "implementation", "numbers", "recipe", "rotation")
    told, true = ([{key: row[key] for key in names if key in row} for row in found] for found in (rows, applied))
    assert told == true and {row["implementation"] for row in true} == {"sage_int8"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--scaling", "per_block"), "--scaling: per_block: models of transformers have per_token"),
        (("--scaling", "x"), "--scaling: x: models of transformers have per_token"),
        (("--recipe", "mixed"), "--recipe: mixed: expected one of"),
    ],
)
def test_report_refuses_what_models_of_transformers_have_not(options, said, tmp_path):
    assert said in invoke("report", folder_of("llama", tmp_path), *options, code=2)


def test_report_of_a_model_without_our_kind_of_attention(tmp_path):
    transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4).save_pretrained(
        tmp_path
    )
    output = invoke("report", tmp_path)
    assert "Nothing of this MambaModel can run in INT8" in output


@pytest.mark.real
def test_report_of_a_real_model():
    real_models.load("smollm2")
    output = invoke("report", real_models.folder("smollm2"))
    assert "30 layers active: sage_int8, qk_int8_pv_bf16, per_token, hadamard" in output
