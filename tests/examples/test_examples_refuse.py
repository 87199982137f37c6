"""Wrong input to an example is answered in one line, exit code 2, before anything is loaded or drawn."""

from __future__ import annotations

import runpy
import sys

import pytest

import sage_processors as sp
from tests.support.repository import ROOT


pytest.importorskip("transformers")
EXAMPLES = ("text_to_image.py", "text_to_video.py", "chat.py", "long_prefill.py")


@pytest.fixture
def said(monkeypatch, capsys, tmp_path):
    """Runs an example in an empty folder, in which it must leave nothing; the line that it ends with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(example: str, *arguments) -> str:
        monkeypatch.setattr(sys, "argv", [example, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
        shown = capsys.readouterr()
        assert ended.value.code == 2 and shown.out == "", shown
        assert shown.err.startswith("Error: ") and shown.err.count("\n") == 1, shown.err
        assert not list(tmp_path.iterdir())
        return shown.err

    return run


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", ["nowhere", "no/where", "../nowhere"])
def test_a_model_that_is_not_there(example, name, said):
    assert f"--model: {name} could not be loaded" in said(example, "--model", name)


@pytest.mark.parametrize(
    ("example", "option"),
    [
        ("text_to_image.py", "--steps"),
        ("text_to_video.py", "--steps"),
        ("text_to_video.py", "--num_frames"),
        ("text_to_video.py", "--height"),
        ("chat.py", "--new-tokens"),
        ("long_prefill.py", "--tokens"),
    ],
)
def test_numbers_that_make_nothing(example, option, said):
    for number in (0, -1):
        assert f"argument {option}: {number} is not in the range 1 to" in said(example, f"{option}={number}")
    assert f"argument {option}: invalid" in said(example, option, "many")


@pytest.mark.parametrize("example", EXAMPLES[:2])
def test_outputs_that_can_not_be_written(example, said):
    suffix = ".png" if example == "text_to_image.py" else ".gif"
    assert "folder no does not exist" in said(example, "--output", f"no/x{suffix}")
    for name in ("x.doc", "x"):
        assert f"argument --output: {name}: expected a" in said(example, "--output", name)


@pytest.mark.parametrize("example", EXAMPLES[:3])
def test_recipes_and_scalings_that_are_not_known(example, said):
    assert "argument --recipe: invalid choice: 'int1'" in said(example, "--recipe", "int1")
    if example != "chat.py":
        assert "argument --scaling: invalid choice: 'x'" in said(example, "--scaling", "x")


def test_a_size_that_the_pipeline_refuses(said):
    assert "divisible" in said("text_to_video.py", "--height", 100)


def test_a_pipeline_of_another_kind(said):
    assert "could not be loaded" in said("chat.py", "--model", sp.pipelines.path("tiny_sd"))
