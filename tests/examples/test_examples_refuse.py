"""Wrong input to an example is answered in one line, exit code 2, before anything is loaded or drawn."""

from __future__ import annotations

import pytest

import sage_processors as sp
from tests.examples.running import PATTERNS
from tests.examples.running import run as run_example


pytest.importorskip("transformers")
LOADING = sorted(set(PATTERNS) - {"app", "one_big_video"})  # one needs gradio, the other torchrun


@pytest.fixture
def said(monkeypatch, capsys, tmp_path):
    """Runs an example in an empty folder, in which it must leave nothing; the line that it ends with.

    loads: it loads something before, and libraries show that.
    """
    monkeypatch.chdir(tmp_path)

    def run(example: str, *arguments, loads: bool = False) -> str:
        with pytest.raises(SystemExit) as ended:
            run_example(example, monkeypatch, *arguments)
        shown = capsys.readouterr()
        assert ended.value.code == 2 and shown.out == "", shown
        if loads:
            assert "Traceback" not in shown.err and shown.err.splitlines()[-1].startswith("Error: "), shown.err
        else:
            assert shown.err.startswith("Error: ") and shown.err.count("\n") == 1, shown.err
        assert not list(tmp_path.iterdir())
        return shown.err

    return run


@pytest.mark.parametrize("example", LOADING)
def test_a_model_that_is_not_there(example, said):
    assert "--model: no/where could not be loaded" in said(example, "--model", "no/where")


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ("flux", ("--model", "../nowhere"), "--model: ../nowhere could not be loaded"),
        ("flux", ("--steps=0",), "argument --steps: 0 is not in the range 1 to"),
        ("flux", ("--steps", "many"), "argument --steps: invalid"),
        ("flux", ("--output", "no/x.png"), "folder no does not exist"),
        ("wan", ("--output", "x.doc"), "argument --output: x.doc: expected a"),
        ("flux", ("--recipe", "int1"), "argument --recipe: invalid choice: 'int1'"),
        ("flux", ("--scaling", "x"), "argument --scaling: invalid choice: 'x'"),
        ("flux", ("--linears", "int4"), "argument --linears: invalid choice: 'int4'"),
        ("text_to_video", ("--num_frames=-1",), "argument --num_frames: -1 is not in the range 1 to"),
        ("chat", ("--new-tokens=0",), "argument --new-tokens: 0 is not in the range 1 to"),
        ("long_prefill", ("--tokens=0",), "argument --tokens: 0 is not in the range 1 to"),
        ("vision_encoder", ("--batch", "many"), "argument --batch: invalid"),
        ("img2img", ("--image", "no.png"), "argument --image: no.png: [Errno 2]"),
        ("img2img", ("--image", __file__), "cannot identify image file"),
        ("controlnet", ("--model", "tiny_sd", "--controlnet", "no/where"), "could not be loaded"),
        ("many_pictures", ("--file", "no.txt"), "argument --file: no.txt: [Errno 2]"),
        ("llama_long_context", ("--file", "no.txt"), "argument --file: no.txt: [Errno 2]"),
        ("serving", ("--sizes", "128"), "expected a width and a height"),
        ("serving", ("--sizes", "0x128"), "expected a width and a height"),
        ("compiled", ("--backend", "gcc"), "argument --backend: invalid choice: 'gcc'"),
        ("low_memory", ("--linears", "none"), "16-bit weights can't be dropped"),
        ("calibrate_and_save", ("--policy", "no/x.json"), "folder no does not exist"),
        ("chat", ("--model", sp.pipelines.path("tiny_sd")), "could not be loaded"),
    ],
)
def test_what_an_example_asks_of_its_own(example, options, message, said):
    assert message in said(example, *options)


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        ("img2img", ("--lora", "no/where"), "could not be loaded"),
        ("img2img", ("--ip-adapter", "no/where"), "could not be loaded"),
        ("text_to_video", ("--height", 100), "divisible"),
        ("flux", ("--model", sp.pipelines.path("tiny_sd")), "could not be loaded"),
    ],
)
def test_what_shows_once_something_is_loaded(example, options, message, said):
    assert message in said(example, *options, loads=True)


def test_a_policy_of_another_model(said, tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        run_example("calibrate_and_save", monkeypatch, "--policy", tmp_path / "x.json")
    assert ended.value.code == 2 and [path.name for path in tmp_path.iterdir()] == ["x.json"]
