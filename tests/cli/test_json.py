"""Every command with output to read prints it as JSON too: data alone on stdout; and the ways to start the command."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.calibration import search as calibration
from sage_processors.cli import main as cli
from tests.support.repository import ROOT


SMALL = ["tiny_flux", "--images", 1, "--steps", 1, "--batch", 1, "--device", "cpu"]


def data(*arguments, code: int = 0) -> dict:
    """What the command printed on stdout with --json, which must be JSON as a whole and without NaN."""

    def refuse(constant):
        raise AssertionError(constant)

    done = CliRunner(env={"COLUMNS": "80", "HF_HUB_OFFLINE": "1"}).invoke(cli.app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, (done.output, done.exception)
    return json.loads(done.stdout, parse_constant=refuse)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | paths | environment
    )


def test_demo_tells_report_quality_and_picture(tmp_path):
    path = tmp_path / "x.png"
    found = data("demo", *SMALL[:5], "--device", "cpu", "--output", path)
    assert (
        found["report"]["verdict"].startswith("100 % of attention calls in INT8") and len(found["report"]["rows"]) == 5
    )
    assert 45 < found["quality"]["psnr_db"][0] < 200 and found["quality"]["int8_calls"] == found["report"]["calls"]
    assert found["picture"] == str(path) and path.is_file() and len(found["prompts"]) == len(found["seeds"]) == 1


def test_report_tells_every_layer():
    found = data("report", "tiny_sd")
    assert len(found["rows"]) == 8 and {row["status"] for row in found["rows"]} == {"active"}
    assert found["verdict"].startswith("Nothing ran")


def test_warm_up_tells_that_a_cpu_needs_nothing():
    assert data("warm-up", "tiny_flux", "--device", "cpu") == {
        "device": "cpu",
        "kernels": 0,
        "seconds": 0.0,
        "cached": 0,
    }


def test_calibrate_tells_what_it_found_also_where_the_budget_is_not_met(tmp_path, monkeypatch):
    output, found, search = tmp_path / "policy.json", [], calibration.calibrate

    def remembered(*arguments, **options):
        found.append(search(*arguments, **options))
        return found[0]

    monkeypatch.setattr(calibration, "calibrate", remembered)
    arguments = ["calibrate", *SMALL, "--scaling", "timestep", "--output", output, "--target-psnr", 119]
    said = data(*arguments, code=1)
    assert said["met"] is False and said["policy"] == str(output) and said["curve"][0]["label"]
    assert said["result"]["int8_share"] == found[0].result["int8_share"] and said["budget"] == {"target_psnr": 119.0}
    met = dataclasses.replace(found[0], met=True)  # test_calibrate_command.py searches for one
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: met)
    assert data(*arguments) == said | {"met": True}


def test_bench_rules_tells_results_and_differences():
    found = data("bench", "rules", *SMALL, "--variant", "timestep", "--variant", "dynamic", "--hard", "plain")
    rules = found["tiny_flux"]
    assert {result["name"] for result in rules["results"]} == {"timestep", "dynamic"}
    (first, *_) = rules["differences"]
    assert (first["scaling"], first["baseline"], first["field"]) == ("dynamic", "timestep", "psnr_db")
    assert first["low"] <= first["mean"] <= first["high"]


def test_wrong_input_leaves_stdout_empty():
    done = CliRunner().invoke(cli.app, ["report", "nowhere", "--json"])
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["sage_processors", "sage_processors.cli", "sage_processors.cli.main"])
@pytest.mark.slow("a process each; the quick one runs the module in this process")
def test_modules_are_the_command_in_a_process_of_their_own(module):
    done = run(sys.executable, "-m", module, "--version")
    assert (done.returncode, done.stdout) == (0, f"sage-processors {sp.__version__}\n")


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
        cli.main()
    assert set(capsys.readouterr().out.split()) == {"demo", "doctor"}
