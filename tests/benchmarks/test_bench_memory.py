"""bench_memory.py on a tiny model on the CPU, where only weights are counted."""

from __future__ import annotations

import csv

import pytest


pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("linears", ["int8", "fp8"])
def test_weights_that_were_dropped_are_gone(bench, linears, tmp_path):
    out = tmp_path / "rows.csv"
    assert bench.main(["--tiny", "--device", "cpu", "--linears", linears, "--csv", str(out)]) == 0
    with out.open(newline="") as file:
        stock, ours = csv.DictReader(file)
    assert {row["case"] for row in (stock, ours)} == {"flux_1024/tiny/dropped"}
    assert {row["metric"] for row in (stock, ours)} == {"weights_memory"} and ours["recipe"].endswith(linears)
    assert 0 < float(ours["rel_l2_error"]) < 0.1
