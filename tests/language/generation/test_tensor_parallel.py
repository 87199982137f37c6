"""Language models whose heads are split over two processes by transformers' tensor parallelism."""

from __future__ import annotations

import pytest

from tests.support.two_processes import two_processes


@pytest.mark.slow("two processes")
def test_two_processes_decode_what_one_does(tmp_path_factory):
    """Heads are quantised each for itself: only the order of sums over heads and features differs, in fp32."""
    rows = two_processes("language/generation/tensor_parallel", tmp_path_factory)
    assert len(rows) == 2
    for row in rows:
        assert row["stock"] < 1e-5 and row["apart"] < 1e-5
        assert 1e-4 < min(row["together"]) and max(row["together"]) < 0.05  # INT8, of the prompt and of the decode
        # split weights stay in 16 bit, which the report says, and no graph holds their collectives
        assert "15 linear layers are of another kind and left to it: DTensor" in row["linears"]
        assert row["with_linears"] == row["together"] and row["obstacle"] == "parallel"
