"""What docs/recipes.md says of mixed precision in words, by the rows of bench_mixed.py."""

from __future__ import annotations

import pytest

from sage_kernels.results import read_rows
from tests.support.repository import ROOT


ROWS = [
    row
    for row in read_rows(ROOT / "kernels" / "benchmarks" / "results.csv")
    if (row["suite"], row["recipe"], row["seq_k"]) == ("attention_error", "mixed", "4096")
]
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
