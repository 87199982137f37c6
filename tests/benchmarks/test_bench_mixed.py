"""What docs/recipes.md says of mixed precision in words, by the rows of bench_mixed.py."""

from __future__ import annotations

import pytest

from sage_kernels.results import read_rows
from tests.support.repository import ROOT


EVERY = read_rows(ROOT / "kernels" / "benchmarks" / "results.csv")
OF_4096 = [row for row in EVERY if (row["suite"], row["recipe"], row["seq_k"]) == ("attention_error", "mixed", "4096")]
ROWS = [row for row in OF_4096 if not row["case"].endswith("_rows")]  # of blocks of 64 query rows
ERRORS = {
    tuple(row["case"].split("/")[1:]): float(row["median"]) for row in ROWS if row["commit"] == ROWS[-1]["commit"]
}


def recovered(family: str, base: str) -> float:
    return 1 - ERRORS[family, base, "block_mean", "0.05"] / ERRORS[family, base, "block_mean", "0"]


@pytest.mark.parametrize("base", ["int4", "mxfp4", "nvfp4"])
def test_five_percent_take_away_three_quarters_where_blocks_stand_out_and_next_to_nothing_elsewhere(base):
    assert min(recovered(family, base) for family in ("clustered", "heavy_tailed", "clustered_biased")) >= 0.75
    assert max(recovered(family, base) for family in ("iid", "needle")) <= 0.1


def test_plain_int8_is_more_exact_than_fp4_with_some_blocks_in_16_bit():
    for family in dict.fromkeys(family for family, *_ in ERRORS):
        assert ERRORS[family, "int8", "block_mean", "0"] < ERRORS[family, "nvfp4", "block_mean", "0.05"], family


def test_blocks_of_192_rows_take_less_of_the_error_away():
    coarse = {row["case"]: float(row["median"]) for row in OF_4096 if row["case"].endswith("/192_rows")}
    case = "mixed/clustered/int8/block_mean/{}/192_rows"
    assert 0.5 <= 1 - coarse[case.format("0.05")] / coarse[case.format("0")] < recovered("clustered", "int8")


def test_five_percent_of_the_blocks_take_twice_the_plain_recipes_time():
    """Rows of the general kernel, the only one there is; those of be7c85d are of a Hopper kernel that was removed."""
    case = "D128_N8192_full_BH16"
    run = [row for row in EVERY if row["commit"] == "c0260d6"]
    rates = {
        kind: [float(row["median"]) for row in run if row["case"] == case + kind]
        for kind in ("", "/per_token", "/int8/0.05")
    }
    assert all(rates.values()) and len(set(map(len, rates.values()))) == 1
    for cudnn, plain, mixed in zip(*rates.values(), strict=True):
        assert 1.95 <= plain / mixed <= 2.1 and mixed < cudnn
