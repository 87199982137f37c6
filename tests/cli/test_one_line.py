"""Wrong input is answered in one line on stderr and exit code 2, by every command, before anything is drawn."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.cli import main as cli


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def said(*arguments) -> str:
    """The one line that a command answers with."""
    done = CliRunner(env={"COLUMNS": "40", "HF_HUB_OFFLINE": "1"}).invoke(cli.app, [str(a) for a in arguments])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (done.output, done.exception)
    assert done.stdout == "" and done.stderr.count("\n") == 1 and done.stderr.startswith("Error: "), done.output
    return done.stderr


MODEL_COMMANDS = [
    ["demo"], ["report"], ["warm-up"], ["calibrate", "--target-psnr", "40"], ["time"], ["rate"],
]  # fmt: skip


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_a_model_that_is_not_there(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no/where" in said(*command, "no/where")
    assert "../nowhere" in said(*command, "../nowhere")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--steps", "-3"], "--steps"),
        (["demo", "--images", "0"], "--images"),
        (["demo", "--seed", str(2**63)], "--seed"),
        (["calibrate", "--steps", "0"], "--steps"),
        (["demo", "--recipe", "int1"], "recipe: got 'int1', expected one of"),
        (["report", "tiny_sd", "--scaling", "x"], "scaling: got 'x', expected one of"),
        (["warm-up", "tiny_sd", "--min-tokens", "-1"], "min_tokens: got -1"),
        (["warm-up", "tiny_sd", "--dtype", "int4"], "int4: expected one of bfloat16"),
        (
            ["calibrate", "tiny_flux", "--target-psnr", "40", "--linears", "int4"],
            "--linears: int4: expected one of int8, fp8",
        ),
        (["calibrate", "tiny_flux", "--target-psnr", "40", "--scaling", "x"], "--scaling: x: expected"),
        (["calibrate"], "such as --target-psnr 40"),
        (["time", "tiny_flux", "--preset", "faster"], "faster"),
        (["rate", "tiny_flux", "--output", "no/where"], "expected a folder"),
        (["rate", "tiny_flux", "--reference", "x"], "--reference: x: expected one of stock, float32"),
        (["demo", "--images", "100000000"], "--images"),
        (["demo", "--device", "abacus"], "abacus"),
        (["demo", "--what"], "No such option"),
        (["demonstrate"], "No such command"),
        (["report"], "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in said(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"], ids=["empty", "other"])
def test_broken_weights(content, tmp_path):
    folder = tmp_path / "pipe"
    shutil.copytree(sp.pipelines.path("tiny_flux"), folder)
    next((folder / "transformer").glob("*.safetensors")).write_bytes(content)
    assert "could not be loaded" in said("demo", folder, "--output", tmp_path / "x.png", "--device", "cpu")


def test_a_pipeline_of_a_class_that_is_not_known(tmp_path):
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "NoPipeline", "unet": ["diffusers", "NoUNet"]})
    )
    assert "could not be loaded" in said("report", tmp_path)
