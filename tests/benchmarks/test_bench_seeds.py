"""The benchmark of INT-FlashAttention's tables: what it emulates, what its rows say in the docs' words."""

from __future__ import annotations

import sys

import pytest
import torch

from sage_kernels import RECIPES
from sage_kernels.results import read_rows
from sage_kernels.testing import exact_attention, relative_l1
from tests.support.repository import ROOT
from tools.kernel_tables import recipe_errors


BENCHES = ROOT / "kernels" / "benchmarks"
sys.path.append(str(BENCHES))

import bench_seeds  # noqa: E402


ROWS = read_rows(BENCHES / "results.csv")


def test_rows_are_of_every_recipe_and_error():
    rows = [row for row in ROWS if row["case"].startswith("int_flash/")]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    assert {row["recipe"] for row in rows} == {*RECIPES, *bench_seeds.EMULATED}
    assert {(row["provider"] == "emulated") == (row["recipe"] in bench_seeds.EMULATED) for row in rows} == {True}
    for inputs, scale, head_dim, seq in bench_seeds.cases(bench_seeds.LENGTHS):
        found = [r for r in rows if r["case"] == f"int_flash/{inputs}/{scale}" and r["seq_k"] == str(seq)]
        metrics = {r["metric"] for r in found if r["head_dim"] == str(head_dim)}
        assert metrics >= {"rel_l1", "cosine_distance", "mre"}, (inputs, scale, seq)
        assert ("centred_l1" in metrics) == inputs.startswith("biased")


def test_table_has_a_line_for_each_recipe_and_needs_rows():
    lines = recipe_errors(ROWS).splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == list(RECIPES)
    assert "No rows yet" in recipe_errors([])


@pytest.mark.parametrize("name", bench_seeds.EMULATED)
def test_what_is_emulated_is_attention_and_coarser_than_what_it_stands_beside(name):
    q, k, v = bench_seeds.make_inputs("normal", 1024, 64)
    exact, _ = exact_attention(q, k, v)
    out = bench_seeds.emulated(name, q, k, v, 64**-0.5)
    beside = {bench_seeds.TRUNCATED: "int_flash_full_fp32_sum", bench_seeds.E5M2: "qk_fp8_pv_fp8"}[name]
    rounded = bench_seeds.sage_attention(q, k, v, recipe=beside)
    assert relative_l1(rounded, exact) < relative_l1(out, exact) < 0.15


def test_errors_are_what_their_names_say():
    exact = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]]).double()
    out = exact + torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0]]).double()
    found = {x["metric"]: x for x in bench_seeds.errors(out, exact)}
    assert float(found["rel_l1"]["median"]) == pytest.approx(1.0 / 14, abs=1e-5)
    assert float(found["mre"]["median"]) == pytest.approx(0.05, abs=1e-4)
    assert 0 < float(found["cosine_distance"]["median"]) < 1e-3
    centred = bench_seeds.errors(out, exact, torch.ones(4).double())[0]
    assert centred["metric"] == "centred_l1" and float(centred["median"]) == pytest.approx(1.0 / 6, abs=1e-5)
