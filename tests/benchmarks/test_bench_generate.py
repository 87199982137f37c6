"""bench_generate.py on a tiny model on the CPU: rows of all providers, in turn and with new caches."""

from __future__ import annotations

import csv

import pytest


pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="triton is not installed")


def test_rows_of_a_tiny_model(bench, tmp_path):
    batch, wanted = 3, [*bench.USUAL, "small", "small_int8_head"]
    out, sizes = tmp_path / "rows.csv", ["--context", "70", "--new", "14", "--batch", str(batch)]
    assert bench.main(["--tiny", "--device", "cpu", "--csv", str(out), *sizes, "--providers", *wanted]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == {f"llama8b_b{batch}_70/tiny"}
    times = {(row["provider"], row["recipe"]): row for row in rows if row["metric"] == "time"}
    assert len(times) == len(wanted)
    fastest = min(float(row["median"]) for (who, _), row in times.items() if who.startswith("stock"))
    for row in times.values():
        assert float(row["p20"]) <= float(row["median"]) <= float(row["p80"])
        assert float(row["ratio_vs_cudnn"]) == pytest.approx(fastest / float(row["median"]), rel=0.01, abs=6e-4)
