"""bench_rules.py: no rows where nothing ran, and differences that only pairs tell."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.evaluation import quality


pytest.importorskip("diffusers")
SMALL = ["tiny_flux", "--images", "1", "--steps", "2", "--batch", "1", "--device", "cpu"]


def run(bench, *arguments):
    app = typer.Typer()
    app.command()(bench.main)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*SMALL, *map(str, arguments)])
    return done.exit_code, " ".join(done.output.split())


def test_nothing_is_recorded_when_nothing_ran(bench, tmp_path, monkeypatch):
    exact = quality.Variant("dynamic", sp.SageAttnProcessor(scaling="dynamic", min_tokens=100_000))
    monkeypatch.setattr(quality, "study_variants", lambda: (exact,))
    code, said = run(bench, "--hard", "plain", "--csv", tmp_path / "r.csv")
    assert code == 1 and "no attention call of dynamic ran in INT8" in said and not (tmp_path / "r.csv").exists()


def test_differences_are_judged_by_pairs(bench):
    """Pictures that differ by 30 dB, rules that differ by a tenth: only the pairs tell."""
    seen = (1.0,) * 6
    base = quality.Quality("timestep", "r", (40.0, 50.0, 60.0, 70.0, 40.0, 50.0), seen)
    better = quality.Quality("dynamic", "r", (40.1, 50.2, 60.1, 70.2, 40.1, 50.2), seen)
    same = quality.Quality("static", "r", (43.0, 45.0, 62.0, 70.0, 43.0, 47.0), seen)
    table = bench.differences([better, base, same], "timestep", "psnr_db")
    names, means, intervals, largest, verdicts = ([*column.cells] for column in table.columns)
    assert names == ["dynamic", "static"] and verdicts == ["better", "no difference shown"]
    assert means == ["+0.15", "+0.00"] and largest == ["+0.20", "-5.00"]
    low, high = (float(x) for x in intervals[1].split(" to "))
    assert low < -1 and high > 1
