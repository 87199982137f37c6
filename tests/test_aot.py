"""Every kernel of the tile table compiles for GPUs that are not here, to the instructions it was written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


triton = pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "codegen.json"
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
# Registers that one turn of a plain key loop of some 500 instructions may put away and take back, by kernel.
SPILLS = {"hopper": 6, "tma": 0, "pointers": 0}


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "codegen.py", request.param],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


def attention(kernels):
    return {key: facts for key, facts in kernels.items() if "/attention/" in key}


def test_scores_run_on_int8_matrix_units(kernels):
    found = attention(kernels)
    assert len(found) >= 6  # three head widths, planned and per token
    assert all(facts["int8_matrix"] for facts in found.values())


def test_plain_key_loop_does_not_spill(kernels):
    for key, facts in attention(kernels).items():
        # the first loop of a kernel is the one over wholly visible tiles. With a mask of keys it reads a list, and
        # spills on sm_80; another tile would not, but a padded sample would lose the bits it has alone.
        if facts.get("loops") and key != "sm_80/attention/128/planned/keys":
            assert facts["loops"][0]["spills"] <= SPILLS[facts["kernel"]], (key, facts)


@pytest.mark.parametrize("kernels", ["sm_80", "sm_90"], indirect=True)
def test_keeping_the_first_max_shortens_the_plain_loop(kernels):
    for key, facts in kernels.items():
        if key.endswith("/first_max"):
            running = kernels[key.replace("first_max", "running_max")]
            assert facts["loops"][0]["instructions"] <= 0.9 * running["loops"][0]["instructions"], key


def test_attention_over_the_cache_runs_on_int8_matrix_units_without_spills(kernels):
    found = {key: facts for key, facts in kernels.items() if "/decode/" in key}
    assert len(found) == 7 and all(facts["int8_matrix"] for facts in found.values())
    for key, facts in found.items():
        if facts.get("loops") and key != "sm_80/decode/64/8":  # four there: its tile was chosen for the others
            assert facts["loops"][0]["spills"] == 0, (key, facts)


def test_table_of_registers_and_loop_counts_is_the_committed_one(kernels):
    """A change here is a change of the machine code: look at it, then `make codegen`."""
    table = json.loads(TABLE.read_text())
    if table["meta"]["triton"] != triton.__version__:
        pytest.skip(f"the table is of Triton {table['meta']['triton']}, this is {triton.__version__}")
    for key, facts in kernels.items():
        assert facts == table["kernels"][key], key


@pytest.mark.parametrize("kernels", ["sm_90"], indirect=True)
def test_hopper_runs_the_warp_specialised_kernel_within_shared_memory(kernels):
    found = {key: facts for key, facts in kernels.items() if facts["kernel"] == "hopper"}
    variants = ("", "/keys", "/causal", "/first_max", "/running_max")
    assert set(found) == {f"sm_90/attention/128/planned{variant}" for variant in variants}
    for facts in found.values():
        assert facts["shared"] <= 227 * 1024 and facts["registers"] == 168  # the launch's cap; warpgroups re-divide it
