"""Every command with output to read prints it as JSON too: data alone on stdout; and the ways to start the command."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.cli import main as cli
from sage_processors.cli import run


SMALL = ["tiny_flux", "--images", 1, "--steps", 1, "--batch", 1, "--device", "cpu"]


def data(*arguments, code: int = 0) -> dict:
    """What the command printed on stdout with --json, which must be JSON as a whole and without NaN."""

    def refuse(constant):
        raise AssertionError(constant)

    done = CliRunner(env={"COLUMNS": "80", "HF_HUB_OFFLINE": "1"}).invoke(cli.app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout, parse_constant=refuse)


def test_demo_tells_report_quality_and_picture(tmp_path):
    path = tmp_path / "x.png"
    found = data("demo", *SMALL[:5], "--device", "cpu", "--output", path)
    assert (
        found["report"]["verdict"].startswith("100 % of attention calls in INT8") and len(found["report"]["rows"]) == 5
    )
    assert 45 < found["quality"]["psnr_db"][0] < 200 and found["quality"]["int8_calls"] == found["report"]["calls"]
    assert found["picture"] == str(path) and path.is_file() and len(found["prompts"]) == len(found["seeds"]) == 1


def test_warm_up_tells_that_a_cpu_needs_nothing():
    assert data("warm-up", "tiny_flux", "--device", "cpu") == {
        "device": "cpu",
        "kernels": 0,
        "seconds": 0.0,
        "cached": 0,
    }


def test_wrong_input_leaves_stdout_empty():
    done = CliRunner().invoke(cli.app, ["report", "nowhere", "--json"])
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_the_package_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sage_processors", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("sage_processors", run_name="__main__")  # as `python -m sage_processors`
    assert (stop.value.code, capsys.readouterr().out) == (0, f"sage-processors {sp.__version__}\n")


def test_shells_can_complete_the_commands(monkeypatch, capsys):
    asked = {"_SAGE_PROCESSORS_COMPLETE": "complete_bash", "COMP_WORDS": "sage-processors d", "COMP_CWORD": "1"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["sage-processors"])
    with pytest.raises(SystemExit):
        run()
    assert set(capsys.readouterr().out.split()) == {"demo", "doctor"}
