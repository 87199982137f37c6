"""The benchmark of first forwards, at a size for a CPU: the rows it leaves."""

from __future__ import annotations

import pytest

from sage_kernels.results import read_rows


pytest.importorskip("diffusers")


def test_rows_of_a_tiny_model(bench, tmp_path, monkeypatch, capsys):
    def in_this_process(options, what, recipe):
        arguments = ["--measure", what, "--recipe", recipe, "--tiny", "--device", "cpu"]
        inner = bench.parse(arguments)
        inner.recipe, inner.linears = recipe, options.linears
        return bench.measure(inner)

    monkeypatch.setattr(bench, "run_alone", in_this_process)
    csv = tmp_path / "rows.csv"
    wanted = ["--recipe", "qk_int8_pv_fp8", "--linears", "int8"]
    assert bench.main(["--tiny", "--device", "cpu", "--csv", str(csv), *wanted]) == 0
    rows, name = read_rows(csv), "qk_int8_pv_fp8+linears_int8"
    case, metrics = "flux_2048/2_blocks/tiny", ("first_forward", "worst_later_forward")
    expected = [(case, "torch_sdpa_cudnn", "", metric) for metric in metrics]
    expected += [(case, "sage_kernels", name, metric) for metric in metrics]
    expected += [(f"{case}/warmed_up", "sage_kernels", name, metric) for metric in (*metrics, "warm_up")]
    expected += [(f"{case}/compiled", "sage_kernels", name, metric) for metric in metrics]
    assert [(row["case"], row["provider"], row["recipe"], row["metric"]) for row in rows] == expected
    assert all(row["suite"] == "cold_start" and row["unit"] == "s" and float(row["median"]) >= 0 for row in rows)
    assert "0 kernels" in capsys.readouterr().out
