"""What `make sanitize` makes of the tools' reports; the tool here is a script that writes some."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.kernels.codegen import sanitize


TOOL = """#!/bin/sh
echo "$2" >> {folder}/calls
[ "$OMP_NUM_THREADS" = 1 ] || exit 4  # so many processes with all threads each do not come to an end
case "$2" in
racecheck) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
*) echo "========= ERROR SUMMARY: {errors} errors";;
esac
[ "$2" = memcheck ] && [ -e {folder}/breaks ] && exit 3
exit 0
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(errors): the outcome, and how often a tool was called."""
    (tmp_path / "tests" / "outcomes").mkdir(parents=True)
    kernels = tmp_path / "kernels.py"
    kernels.write_text("")
    monkeypatch.setattr(sanitize, "ROOT", tmp_path)
    monkeypatch.setattr(sanitize, "__file__", str(kernels))
    monkeypatch.setenv("COMPUTE_SANITIZER", str(tmp_path / "tool"))

    def run(errors=0):
        (tmp_path / "tool").write_text(TOOL.format(folder=tmp_path, errors=errors))
        (tmp_path / "tool").chmod(0o755)
        (tmp_path / "calls").write_text("")
        failed = sanitize.run_tools()
        outcome = json.loads((tmp_path / "tests" / "outcomes" / "sanitizer.json").read_text())
        assert failed == (outcome["cases"]["E08"] == "failed")
        return outcome, len((tmp_path / "calls").read_text().split())

    return run


def test_a_run_that_was_cut_off_is_continued(run, tmp_path):
    (tmp_path / "breaks").write_text("")
    outcome, calls = run()
    assert outcome["cases"] == {**dict.fromkeys(sanitize.TOOLS, "passed"), "memcheck": "failed", "E08": "failed"}
    assert calls == len(sanitize.TOOLS) * sanitize.PARTS
    (tmp_path / "breaks").unlink()
    outcome, calls = run()
    assert set(outcome["cases"].values()) == {"passed"}
    assert calls == sanitize.PARTS  # memcheck's


def test_errors_of_all_parts_are_counted(run):
    outcome, _ = run(errors=2)
    assert outcome["errors"] == {
        "memcheck": 2 * sanitize.PARTS, "initcheck": 2 * sanitize.PARTS, "racecheck": 0,
        "synccheck": 2 * sanitize.PARTS,
    }  # fmt: skip
    assert outcome["cases"]["E08"] == "failed"


def test_a_part_that_hangs_is_named_and_ended(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "COMPILING_SECONDS", 1)
    waits = {"1/3": 60, "0/3": 0, "2/3": 60}
    parts = {
        name: subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        for name, seconds in waits.items()
    }
    start = time.monotonic()
    assert not sanitize.have_ended(parts)
    assert time.monotonic() - start < 30 and "1/3, 2/3" in capsys.readouterr().out
    assert all(process.returncode is not None for process in parts.values())
    assert sanitize.have_ended({"0/1": subprocess.Popen([sys.executable, "-c", ""])})
    assert not sanitize.have_ended({"0/1": subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])})


def test_no_linear_layer_has_tiles_that_its_kernel_waits_for_for_ever():
    """Whole tiles are a multiple of the programs where others are shared: types.Sizes of the Hopper matmul."""
    layers = [each for each in sanitize.selection() if isinstance(each, sanitize.LinearLaunch) and each.shared]
    assert len(layers) == 6
    for each in layers:
        block_m, block_n, *_ = sanitize.linear_tile(each)
        whole = -(-each.rows // block_m) * -(-sanitize.COLUMNS // block_n) - each.shared
        assert whole > 0 and whole % sanitize.PROCESSORS == 0, each
