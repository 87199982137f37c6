"""The benchmark of first forwards, at a size for a CPU: what it measures, where, and the rows it leaves."""

from __future__ import annotations

import subprocess

import pytest

from sage_kernels.results import read_rows
from tests.support.repository import ROOT


pytest.importorskip("diffusers")
BENCHMARKS = ROOT / "kernels" / "benchmarks"


def test_cases_say_how_many_blocks_they_have(bench):
    names = [bench.chosen_case("flux_2048", layers, tiny=False).name for layers in (1, 3, 99)]
    assert names == ["flux_2048/2_blocks", "flux_2048/6_blocks", "flux_2048"]
    assert bench.chosen_case("flux_2048", 1, tiny=False).config["num_attention_heads"] == 24  # of true width


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


def test_each_measurement_has_a_process_and_an_empty_cache_and_its_failure_is_said(bench, monkeypatch):
    caches, compiling = [], []

    def run(command, *, env, **_):
        caches.append(env["TRITON_CACHE_DIR"])
        compiling.extend(command[3:4] * (env.get("TRITON_ALWAYS_COMPILE") == "1"))
        assert command[1] == bench.__file__
        code = int("ours" in command)
        return subprocess.CompletedProcess(command, code, stdout='a line\n{"times": [2.0, 1.0]}\n', stderr="no GPU")

    monkeypatch.setattr(bench.subprocess, "run", run)
    options = bench.parse(["--tiny"])
    assert bench.run_alone(options, "stock", "qk_int8_pv_bf16") == {"times": [2.0, 1.0]}
    with pytest.raises(RuntimeError, match="ours, qk_int8_pv_bf16: no GPU"):
        bench.run_alone(options, "ours", "qk_int8_pv_bf16")
    bench.run_alone(options, "compiled", "qk_int8_pv_bf16")
    assert len(set(caches)) == 3 and compiling == ["compiled"]
