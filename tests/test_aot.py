"""Every kernel of the tile table compiles for GPUs that are not here, to the instructions it was written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
# Of some 500 instructions of a key loop. More means that the tile is too large for the register file.
MAX_SPILLS = 6


@pytest.fixture(scope="module", params=TARGETS)
def rows(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "codegen.py", request.param],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_scores_run_on_int8_matrix_units(rows):
    attention = [row for row in rows if row["kernel"] != "prepare"]
    assert len(attention) == 4  # two head widths, planned and per token
    assert all(row["int8_matrix"] for row in attention)


def test_key_loop_does_not_spill(rows):
    for row in rows:
        # the first loop is the one that planned scales run; those that follow enclose it
        spills = row["loops"][0]["spills"] if row.get("loops") else 0
        assert spills <= MAX_SPILLS, row


@pytest.mark.parametrize("rows", ["sm_90"], indirect=True)
def test_hopper_runs_the_warp_specialised_kernel_within_shared_memory(rows):
    (row,) = [row for row in rows if row["kernel"] == "hopper"]
    assert (row["width"], row["scaling"]) == (128, "planned")
    assert row["shared"] <= 227 * 1024 and row["registers"] == 168  # the launch's cap; the warpgroups re-divide it
