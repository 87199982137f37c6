"""What bench_skip.py times is attention to the tiles of its lists, as many as it says."""

from __future__ import annotations

import pytest
import torch

from sage_kernels.facts.skipping import unpack
from sage_kernels.testing import relative_l2


pytest.importorskip("triton")


RECIPES = ("qk_int8_pv_bf16", "qk_int8_pv_fp8")


@pytest.mark.parametrize(
    ("share", "recipe", "compensates"),
    [(0.0, RECIPES[0], False), (0.5, RECIPES[0], False), (0.5, RECIPES[0], True), (0.5, RECIPES[1], False)],
)
def test_random_lists_are_what_is_visited(bench, share, recipe, compensates):
    case = bench.Case("small", 1, 300, 1200, 2, 1, 32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, s, h, 32, generator=generator) for s, h in ((300, 2), (1200, 1), (1200, 1))
    )  # fmt: skip
    lists = bench.random_lists(bench.Shape(1, 2, 300, 1200, 32), share, recipe, "cpu", compensates)
    before = lists.lists.clone()
    run = bench.calling(case, lists, recipe, q, k, v)
    out = run(q, k, v)
    assert torch.equal(lists.lists, before)  # however often it is called
    assert float(unpack(before, 10).double().mean()) == share
    first = max(0, 300 - bench.GATE_ROWS)
    assert relative_l2(out[:, first:], bench.attend_listed(q, k, v, lists, first)) < (
        0.02 if "bf16" in recipe else 0.05
    )
    measuring = bench.calling(case, lists, recipe, q, k, v, steps=1)
    now = int(lists.now)
    measuring(q, k, v)
    assert int(lists.now) == now + 1
