"""The fidelity commands end to end on the embedded pipelines, as small as they go."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import sage_processors as sp
from sage_kernels.results import read_rows
from sage_processors.calibration import search as calibration
from sage_processors.cli import calibrate as calibrate_command
from sage_processors.cli.calibrate import HARD
from sage_processors.cli.main import app
from sage_processors.evaluation import quality


def invoke(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def cases(path):
    return {row["case"] for row in read_rows(path)}


@pytest.mark.slow("draws pictures for two variants")
def test_rules_measures_plain_and_hard_variants(tmp_path):
    csv = tmp_path / "results.csv"
    small = ["tiny_flux", "--images", 1, "--steps", 2, "--batch", 1, "--device", "cpu"]
    chosen = ["--variant", "timestep", "--variant", "dynamic"]
    done = invoke("bench", "rules", *small, *chosen, "--hard", "plain", "--hard", "hard_k30", "--csv", csv)
    assert done.exit_code == 0, done.output
    assert cases(csv) == {f"tiny_flux{x}/{v}" for x in ("", "_hard_k30") for v in ("dynamic", "timestep")}
    values = {row["case"]: float(row["median"]) for row in read_rows(csv) if row["metric"] == "psnr_db_mean"}
    assert all(value > 35 for value in values.values())
    for what in ("PSNR minus that of timestep, paired by seed", "attention's SQNR minus that of timestep, paired by"):
        assert done.output.count(what) == 2
    assert done.output.count("1 of 6 pairs: too few to say") == 4
    sqnr = {row["case"]: float(row["median"]) for row in read_rows(csv) if row["metric"] == "attention_sqnr_db"}
    assert sqnr.keys() == values.keys() and all(35 < value < 70 for value in sqnr.values())
    assert all(f"{value:.2f}" in done.output for value in sqnr.values())
    assert {"hard", "hard_a16", "hard_a256", "hard_k30"} == set(HARD) - {""}


def test_differences_are_judged_by_pairs():
    """Pictures that differ by 30 dB, rules that differ by a tenth: only the pairs tell."""
    seen = (1.0,) * 6
    base = quality.Quality("timestep", "r", (40.0, 50.0, 60.0, 70.0, 40.0, 50.0), seen)
    better = quality.Quality("dynamic", "r", (40.1, 50.2, 60.1, 70.2, 40.1, 50.2), seen)
    same = quality.Quality("static", "r", (43.0, 45.0, 62.0, 70.0, 43.0, 47.0), seen)
    table = calibrate_command._differences([better, base, same], "timestep", "psnr_db")
    names, means, intervals, largest, verdicts = (list(column.cells) for column in table.columns)
    assert names == ["dynamic", "static"] and verdicts == ["better", "no difference shown"]
    assert means == ["+0.15", "+0.00"] and largest == ["+0.20", "-5.00"]
    low, high = (float(x) for x in intervals[1].split(" to "))
    assert low < -1 and high > 1


def test_differences_of_attention_are_those_of_batches_and_need_six():
    """Equal rules have five differences of one sign once in 16 times, and an interval that does not hold 0."""

    def measured(name, *sqnr_db):
        return quality.Quality(name, "r", (50.0,) * 12, (1.0,) * 12, attention_sqnr_db=sqnr_db)

    base, idle = measured("timestep", 46.0, 47.0, 48.0, 49.0, 50.0, 51.0), measured("idle")
    worse = measured("static", 45.9, 46.8, 47.9, 48.8, 49.9, 50.8)
    table = calibrate_command._differences([base, worse, idle], "timestep", "attention_sqnr_db")
    names, means, _, _, verdicts = (list(column.cells) for column in table.columns)
    assert names == ["static"] and means == ["-0.15"] and verdicts == ["worse"]
    five = [measured(result.name, *result.attention_sqnr_db[:5]) for result in (base, worse)]
    table = calibrate_command._differences(five, "timestep", "attention_sqnr_db")
    assert list(table.columns[-1].cells) == ["5 of 6 pairs: too few to say"]


def test_calibrate_writes_a_policy_and_its_rows(tmp_path):
    csv, output = tmp_path / "results.csv", tmp_path / "policy.json"
    small = ["tiny_flux", "--images", 1, "--steps", 1, "--batch", 1, "--device", "cpu"]
    done = invoke("calibrate", *small, "--target-psnr", 35, "--scaling", "timestep", "--output", output, "--csv", csv)
    assert done.exit_code == 0, done.output
    assert "met" in done.output and "NOT met" not in done.output
    assert sp.SageAttnProcessor.from_policy(output) == sp.SageAttnProcessor(min_tokens=quality.MIN_TOKENS)
    assert json.loads(output.read_text())["budget"] == {"target_psnr": 35.0} and cases(csv) == {"tiny_flux/policy"}
    assert [row["median"] for row in read_rows(csv) if row["metric"] == "int8_share"] == ["1.0"]


def test_options_of_calibrate_reach_the_search(tmp_path, monkeypatch):
    asked = {}

    def search(pipe, prompts, **options):
        asked.update(options, dtype=pipe.dtype)
        raise ValueError("that is enough")

    monkeypatch.setattr(calibration, "calibrate", search)
    small = ["tiny_flux", "--images", 1, "--device", "cpu", "--target-psnr", 10, "--output", tmp_path / "p.json"]
    more = ["--recipe", "qk_int8_pv_fp8", "--dtype", "bfloat16", "--linears", "int8", "--skip-limit", 0.1]
    done = invoke("calibrate", *small, *more)
    assert done.exit_code == 2 and "that is enough" in done.output, done.output
    assert (asked["recipes"], asked["dtype"], asked["linears"]) == (["qk_int8_pv_fp8"], torch.bfloat16, ["int8"])
    assert asked["skip_limits"] == [0.1] and asked["config"].linears.min_features == 0
    done = invoke("calibrate", *small, "--recipe", "qk_int4")
    assert done.exit_code == 2 and "qk_int4" in done.output


@pytest.mark.slow("draws pictures with two schedulers")
def test_transfer_compares_own_and_foreign_tables(tmp_path):
    csv = tmp_path / "results.csv"
    name = "FlowMatchEulerDiscreteScheduler"
    done = invoke(
        "bench", "transfer", "tiny_flux", "--source", f"{name}:2:shift=1",
        "--target", f"{name}:2:shift=3", "--images", 1, "--batch", 1, "--csv", csv, "--device", "cpu",
        "--dtype", "bfloat16",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert cases(csv) == {f"tiny_flux_bfloat16_{name}:2:shift=3/timestep_{x}" for x in ("warm", "transferred")}
    assert "8/8 steps" in done.output  # 2 steps of: a warm-up, and 3 pictures
    assert any(row["metric"] == "attention_sqnr_db_mean" for row in read_rows(csv))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "rules", "--hard", "soft"], "soft: expected one of plain"),
        (["bench", "rules", "--variant", "fast"], "fast: expected one of dynamic"),
        (["bench", "rules", "--dtype", "int8"], "int8: expected one of bfloat16, float16, float32"),
        (["bench", "transfer", "--source", "NoScheduler:5"], "'NoScheduler:5': expected a scheduler"),
        (["bench", "transfer", "--source", "DDIMScheduler:many"], "expected a scheduler"),
        (["calibrate", "--images", "1", "--steps", "1"], "give one of them alone"),
    ],
)
def test_bad_arguments(arguments, words):
    done = invoke(*arguments, "tiny_flux", "--device", "cpu")
    assert done.exit_code == 2 and words in " ".join(done.output.replace("│", " ").split()), done.output
