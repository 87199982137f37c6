"""bench_launch_layers.py switches off what it says, in its own process alone, and its gate closes."""

from __future__ import annotations

import sys

import pytest
import torch

import sage_kernels
from sage_kernels.ops import attention, decode, replay
from sage_kernels.results import read_rows


pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed")


def test_rows_of_all_variants(bench, tmp_path):
    names = ["llama8b_decode_b1_4k", "flux_1024"]
    arguments = ["--tiny", "--device", "cpu", "--rounds", "1", "--out", str(tmp_path / "rows.csv")]
    assert bench.main([*arguments, "--case", names[0], "--case", names[1]]) == 0
    rows = read_rows(tmp_path / "rows.csv")
    assert [row["case"] for row in rows] == [f"{name}/tiny/{variant}" for name in names for variant in bench.VARIANTS]
    assert {(row["metric"], row["unit"]) for row in rows} == {("tokens_per_second", "1/s"), ("time", "ms")}


@pytest.mark.parametrize("name", ["everything", "without_replay", "without_way_round", "without_any"])
def test_calls_go_through_the_dispatcher_only_where_they_should(bench, name, monkeypatch):
    """Which op, if any, is on the way to the computation."""
    ways = []

    def run(*arguments, **options):
        ways.append("_implementation" in {frame.f_code.co_qualname.split(".")[0] for frame in stack()})
        return original(*arguments, **options)

    def stack():
        frame = sys._getframe(2)
        while frame is not None:
            yield frame
            frame = frame.f_back

    original = attention._compute
    monkeypatch.setattr(attention, "_compute", run)
    before = vars(attention).copy(), vars(decode).copy(), vars(replay).copy()
    q = torch.randn(1, 8, 2, 16)
    with bench.Variant(name, bench.VARIANTS[name]).on():
        sage_kernels.sage_attention(q, q, q)
    assert ways == [name in ("without_way_round", "without_any")]
    assert before == (vars(attention), vars(decode), vars(replay))  # all is as it was


def test_a_variant_with_other_bits_gets_no_row(bench):
    def turn():
        is_off = attention.is_plain_call is not replay.is_plain_call
        return bench.Turn(1.0, torch.full((2,), float(is_off)))

    variants, failures = bench.take_turns(turn, 1, torch.device("cpu"))
    assert {failure.partition(":")[0] for failure in failures} == {"without_way_round", "without_any"}
    assert len(variants) == len(bench.VARIANTS)
