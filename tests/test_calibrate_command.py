"""The fidelity commands end to end on the embedded pipelines, as small as they go."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import sage_processors as sp
from sage_kernels.results import read_rows
from sage_processors import calibrate_command, quality
from sage_processors.calibrate_command import HARD
from sage_processors.cli import app


def invoke(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def cases(path):
    return {row["case"] for row in read_rows(path)}


def test_rules_measures_plain_and_hard_variants(tmp_path):
    csv = tmp_path / "results.csv"
    small = ["--pipeline", "tiny_flux", "--images", 1, "--steps", 2, "--batch", 1, "--device", "cpu"]
    chosen = ["--variant", "timestep", "--variant", "dynamic"]
    done = invoke("bench", "rules", *small, *chosen, "--hard", "plain", "--hard", "hard_k30", "--csv", csv)
    assert done.exit_code == 0, done.output
    assert cases(csv) == {f"tiny_flux{x}/{v}" for x in ("", "_hard_k30") for v in ("dynamic", "timestep")}
    values = {row["case"]: float(row["median"]) for row in read_rows(csv) if row["metric"] == "psnr_db_mean"}
    assert all(value > 35 for value in values.values())
    assert done.output.count("PSNR minus that of timestep, paired by seed") == 2 and "one picture" in done.output
    assert {"hard", "hard_a16", "hard_a256", "hard_k30"} == set(HARD) - {""}


def test_differences_are_judged_by_pairs():
    """Pictures that differ by 30 dB, rules that differ by a tenth: only the pairs tell."""
    base = quality.Quality("timestep", "r", (40.0, 50.0, 60.0, 70.0), (1.0,) * 4)
    better = quality.Quality("dynamic", "r", (40.1, 50.2, 60.1, 70.2), (1.0,) * 4)
    same = quality.Quality("static", "r", (43.0, 45.0, 62.0, 70.0), (1.0,) * 4)
    table = calibrate_command._differences([better, base, same], "timestep")
    names, means, intervals, largest, verdicts = (list(column.cells) for column in table.columns)
    assert names == ["dynamic", "static"] and verdicts == ["better", "no difference shown"]
    assert means == ["+0.15", "+0.00"] and largest == ["+0.20", "-5.00"]
    low, high = (float(x) for x in intervals[1].split(" to "))
    assert low < -1 and high > 1


def test_calibrate_writes_a_policy_and_its_rows(tmp_path):
    csv, output = tmp_path / "results.csv", tmp_path / "policy.json"
    small = ["--pipeline", "tiny_flux", "--images", 1, "--steps", 2, "--batch", 1, "--device", "cpu"]
    done = invoke("calibrate", *small, "--target-psnr", 35, "--scaling", "timestep", "--output", output, "--csv", csv)
    assert done.exit_code == 0, done.output
    assert "met" in done.output and "NOT met" not in done.output
    assert sp.SageAttnProcessor.from_policy(output) == sp.SageAttnProcessor(min_tokens=quality.MIN_TOKENS)
    assert json.loads(output.read_text())["budget"] == {"target_psnr": 35.0} and cases(csv) == {"tiny_flux/policy"}


def test_calibrate_takes_a_recipe(tmp_path):
    output = tmp_path / "policy.json"
    small = ["--pipeline", "tiny_flux", "--images", 1, "--steps", 2, "--batch", 1, "--device", "cpu"]
    arguments = ["calibrate", *small, "--target-psnr", 10, "--scaling", "timestep", "--output", output]
    done = invoke(*arguments, "--recipe", "qk_int8_pv_fp8")
    assert done.exit_code == 0, done.output
    assert sp.SageAttnProcessor.from_policy(output).recipe == "qk_int8_pv_fp8"
    done = invoke(*arguments, "--recipe", "qk_int4")
    assert done.exit_code == 2 and "qk_int4" in done.output


def test_transfer_compares_own_and_foreign_tables(tmp_path):
    csv = tmp_path / "results.csv"
    name = "FlowMatchEulerDiscreteScheduler"
    done = invoke(
        "bench", "transfer", "--pipeline", "tiny_flux", "--source", f"{name}:3:shift=1",
        "--target", f"{name}:2:shift=3", "--images", 1, "--csv", csv, "--device", "cpu",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert cases(csv) == {f"tiny_flux_{name}:2:shift=3/timestep_{x}" for x in ("warm", "transferred")}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "rules", "--hard", "soft"], "soft: expected some of plain"),
        (["bench", "rules", "--variant", "fast"], "fast: expected some of dynamic"),
        (["bench", "transfer", "--source", "NoScheduler:5"], "'NoScheduler:5': expected a scheduler"),
        (["bench", "transfer", "--source", "DDIMScheduler:many"], "expected a scheduler"),
        (["calibrate", "--images", "1", "--steps", "1"], "both or neither"),
    ],
)
def test_bad_arguments(arguments, words):
    done = invoke(*arguments, "--pipeline", "tiny_flux", "--device", "cpu")
    assert done.exit_code == 2 and words in " ".join(done.output.replace("│", " ").split()), done.output
