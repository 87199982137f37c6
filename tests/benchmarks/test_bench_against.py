"""bench_against.py times another version of our attention, and not today's a second time."""

from __future__ import annotations

import csv
import shutil
import sys

import pytest
import torch

from tests.support.repository import ROOT


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "kernels" / "benchmarks"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    import bench_against

    yield bench_against
    for name in [name for name in sys.modules if name.startswith(("sage_kernels_", "sage_processors_"))]:
        del sys.modules[name]


def small_inputs(case):
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.seq_q, case.heads), (case.seq_kv, case.kv_heads), (case.seq_kv, case.kv_heads))
    return tuple(torch.randn(case.batch, s, h, case.head_dim, generator=generator) for s, h in sizes)


@pytest.fixture
def checkout(tmp_path):
    """Today's packages with attention that is off by 1 %."""
    for place in ("kernels/sage_kernels", "sage_processors"):
        shutil.copytree(ROOT / place, tmp_path / "old" / place, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "old" / "kernels" / "sage_kernels" / "__init__.py"
    file.write_text(
        file.read_text() + "\n_own = sage_attention\ndef sage_attention(*a, **b):\n    return _own(*a, **b) * 1.01\n"
    )
    return tmp_path / "old"


def test_the_other_version_is_what_lies_there(bench, checkout, tmp_path):
    case = bench.Case("small", 1, 100, 200, 2, 1, 32)
    inputs = small_inputs(case)
    other = bench.load("old-1", checkout, tmp_path / "copies")
    today = bench.Version("", bench.sage_kernels.sage_attention, bench.planning)
    entrants, failures = bench.entrants_of(case, [today, other], bench.FP8_RECIPE, inputs)
    assert not failures
    assert [entrant.suffix for entrant in entrants] == ["", "@old-1"]
    mine, its = (entrant.function(*inputs) for entrant in entrants)
    torch.testing.assert_close(its, mine * 1.01)
    assert other.planning.__name__ == "sage_kernels_old_1.planning.state"
    assert {m for m in sys.modules if m.startswith("sage_kernels_old_1")}
    # its operators are its own
    assert hasattr(torch.ops, "sage_kernels_old_1")


def test_a_version_that_is_wrong_fails_before_it_is_timed(bench, checkout, tmp_path):
    case = bench.Case("small", 1, 100, 200, 2, 1, 32)
    file = checkout / "kernels" / "sage_kernels" / "__init__.py"
    file.write_text(file.read_text().replace("* 1.01", "* 1.1"))
    other = bench.load("old", checkout, tmp_path / "copies")
    entrants, failures = bench.entrants_of(case, [other], bench.DEFAULT_RECIPE, small_inputs(case))
    assert not entrants
    assert len(failures) == 1


def test_the_ratio_is_of_the_same_turn(bench, monkeypatch, tmp_path):
    """The median of ratios 1.5, 0.9 and 0.975, not the ratio of medians, 0.9: a GPU slows down from turn to turn."""
    case = bench.Case("small", 1, 100, 100, 1, 1, 32)
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results.csv")
    entrants = [
        bench.Entrant("sage_kernels", suffix, bench.DEFAULT_RECIPE, None, 0.01, times)
        for suffix, times in (("", [1.5, 1.8, 3.9]), ("@old", [1.0, 2.0, 4.0]))
    ]
    bench.report(case, entrants, save=True)
    with (tmp_path / "results.csv").open() as file:
        rows = {(row["case"], row["provider"], row["metric"]): row for row in csv.DictReader(file)}
    name = "small/against_old"
    ratio = rows.pop((name, "sage_kernels", "time_ratio"))
    assert set(rows) == {(name, "sage_kernels", "time"), (name, "sage_kernels@old", "time")}
    assert float(ratio["p20"]) < float(ratio["median"]) == 0.975 < float(ratio["p80"])
