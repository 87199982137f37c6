"""bench_batching.py on a tiny model on the CPU: rows of all providers that run there."""

from __future__ import annotations

import csv

import pytest


pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="triton is not installed")


def test_rows_of_a_tiny_model(on_the_path, tmp_path):
    import bench_batching

    out = tmp_path / "rows.csv"
    sizes = ["--prompts", "3", "--longest", "40", "--new", "3", "--step", "64"]
    assert bench_batching.main(["--tiny", "--device", "cpu", "--csv", str(out), *sizes]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == {"batching_llama8b_l2_3x40/tiny"}
    found = {(row["provider"], row["recipe"], row["metric"]): row for row in rows}
    assert len(found) == 2 * 3  # PyTorch's flash attention runs on GPUs alone
    held = {who: float(row["median"]) for (who, _, metric), row in found.items() if metric == "kv_bytes"}
    assert held["sage_kernels"] < held["stock_sdpa"] / 2
    ours = found["sage_kernels", "preset_fast", "tokens_per_second"]
    stock = found["stock_sdpa", "", "tokens_per_second"]
    assert float(ours["ratio_vs_cudnn"]) == pytest.approx(float(ours["median"]) / float(stock["median"]), rel=0.02)
