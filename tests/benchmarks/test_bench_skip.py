"""What bench_skip.py times is attention to the tiles of its lists, as many as it says."""

from __future__ import annotations

import pytest
import torch

from sage_kernels.skipping import unpack
from sage_kernels.testing import relative_l2
from tests.support.repository import ROOT


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "kernels" / "benchmarks"))
    import bench_skip

    return bench_skip


RECIPES = ("qk_int8_pv_bf16", "qk_int8_pv_fp8")


@pytest.mark.parametrize(("share", "recipe"), [(0.0, RECIPES[0]), (0.5, RECIPES[0]), (0.5, RECIPES[1])])
def test_random_lists_are_what_is_visited(bench, share, recipe):
    case = bench.Case("small", 1, 300, 1200, 2, 1, 32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, s, h, 32, generator=generator) for s, h in ((300, 2), (1200, 1), (1200, 1))
    )  # fmt: skip
    lists = bench.random_lists(case, share, recipe, "cpu")
    before = lists.lists.clone()
    run = bench.listed_attention(case, lists, recipe, q, k, v)
    out = run(q, k, v)
    assert torch.equal(lists.lists, before)  # however often it is called
    assert float(unpack(before, 10).double().mean()) == share
    first = max(0, 300 - bench.GATE_ROWS)
    assert relative_l2(out[:, first:], bench.exact_rows(case, lists, q, k, v)) < (0.02 if "bf16" in recipe else 0.05)
    measuring = bench.listed_attention(case, lists, recipe, q, k, v, steps=1)
    now = int(lists.now)
    measuring(q, k, v)
    assert int(lists.now) == now + 1
