"""bench_rules.py: rows of every rule and variant, and differences that only pairs tell."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

import sage_processors as sp
from sage_kernels.results import read_rows
from sage_processors.evaluation import quality


pytest.importorskip("diffusers")
SMALL = ["tiny_flux", "--images", "1", "--steps", "2", "--batch", "1", "--device", "cpu"]


def run(bench, *arguments):
    app = typer.Typer()
    app.command()(bench.main)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*SMALL, *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.slow("draws pictures for two variants")
def test_plain_and_hard_variants_have_rows(bench, tmp_path):
    csv = tmp_path / "results.csv"
    chosen = ["--variant", "timestep", "--variant", "dynamic", "--hard", "plain", "--hard", "hard_k30"]
    code, said = run(bench, *chosen, "--csv", csv)
    assert code == 0, said
    rows = read_rows(csv)
    cases = {f"tiny_flux{x}/{v}" for x in ("", "_hard_k30") for v in ("dynamic", "timestep")}
    values = {row["case"]: float(row["median"]) for row in rows if row["metric"] == "psnr_db_mean"}
    sqnr = {row["case"]: float(row["median"]) for row in rows if row["metric"] == "attention_sqnr_db"}
    assert cases == values.keys() == sqnr.keys() and all(value > 35 for value in values.values())
    for what in ("PSNR minus that of timestep, paired by seed", "attention's SQNR minus that of timestep, paired by"):
        assert said.count(what) == 2
    assert said.count("1 of 6 pairs: too few to say") == 4
    assert all(35 < value < 70 and f"{value:.2f}" in said for value in sqnr.values())


def test_nothing_is_recorded_when_nothing_ran(bench, tmp_path, monkeypatch):
    exact = quality.Variant("dynamic", sp.SageAttnProcessor(scaling="dynamic", min_tokens=100_000))
    monkeypatch.setattr(quality, "study_variants", lambda: (exact,))
    code, said = run(bench, "--hard", "plain", "--csv", tmp_path / "r.csv")
    assert code == 1 and "no attention call of dynamic ran in INT8" in said and not (tmp_path / "r.csv").exists()


def test_what_did_not_run_in_int8_has_no_psnr_in_a_table(bench):
    idle = quality.Quality("dynamic", "r", (120.0,), (1.0,), 0, 3)
    ran = quality.Quality("timestep", "r", (50.0,), (0.9,), 3)
    cells = [list(column.cells) for column in bench.quality_table("x", [idle, ran]).columns]
    assert cells[1] == [quality.NOTHING_RAN, "50.00"] and cells[2] == ["–", "50.00"]


def columns(table):
    return [list(column.cells) for column in table.columns]


def test_differences_are_judged_by_pairs(bench):
    """Pictures that differ by 30 dB, rules that differ by a tenth: only the pairs tell."""
    seen = (1.0,) * 6
    base = quality.Quality("timestep", "r", (40.0, 50.0, 60.0, 70.0, 40.0, 50.0), seen)
    better = quality.Quality("dynamic", "r", (40.1, 50.2, 60.1, 70.2, 40.1, 50.2), seen)
    same = quality.Quality("static", "r", (43.0, 45.0, 62.0, 70.0, 43.0, 47.0), seen)
    table = bench.differences([better, base, same], "timestep", "psnr_db")
    names, means, intervals, largest, verdicts = columns(table)
    assert names == ["dynamic", "static"] and verdicts == ["better", "no difference shown"]
    assert means == ["+0.15", "+0.00"] and largest == ["+0.20", "-5.00"]
    low, high = (float(x) for x in intervals[1].split(" to "))
    assert low < -1 and high > 1


def test_differences_of_attention_are_those_of_batches_and_need_six(bench):
    """Equal rules have five differences of one sign once in 16 times, and an interval that does not hold 0."""

    def measured(name, *sqnr_db):
        return quality.Quality(name, "r", (50.0,) * 12, (1.0,) * 12, attention_sqnr_db=sqnr_db)

    base, idle = measured("timestep", 46.0, 47.0, 48.0, 49.0, 50.0, 51.0), measured("idle")
    worse = measured("static", 45.9, 46.8, 47.9, 48.8, 49.9, 50.8)
    names, means, _, _, verdicts = columns(bench.differences([base, worse, idle], "timestep", "attention_sqnr_db"))
    assert names == ["static"] and means == ["-0.15"] and verdicts == ["worse"]
    five = [measured(result.name, *result.attention_sqnr_db[:5]) for result in (base, worse)]
    table = bench.differences(five, "timestep", "attention_sqnr_db")
    assert list(table.columns[-1].cells) == ["5 of 6 pairs: too few to say"]
