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


def test_what_is_asked_of_most_has_its_rows_first_and_cudnn_has_one(bench, monkeypatch):
    """Each group is timed beside cuDNN and reported at once; all kernels were asked for before anything ran."""
    case = bench.Case("small", 1, 600, 1200, 2, 1, 32)
    generator = torch.Generator().manual_seed(0)

    def inputs(case, dtype=None):
        sizes = ((case.seq_q, case.heads), (case.seq_kv, case.kv_heads), (case.seq_kv, case.kv_heads))
        return [tuple(torch.randn(case.batch, s, h, 32, generator=generator) for s, h in sizes)]

    def sdpa(case, backend):
        def run(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

        return run

    events, timed = [], []

    def take_turns(case, entrants, sets_of):
        timed.append([entrant.suffix or entrant.provider for entrant in entrants])
        for entrant in entrants:
            assert entrant.times == []
            entrant.times += [1.0, 2.0, 3.0]

    def report(case, entrant, cudnn, best, inputs, save):
        events.append((entrant.suffix or entrant.provider, entrant.recipe))
        assert cudnn == 2.0

    monkeypatch.setattr(bench, "compile_ahead", lambda kinds, device: events.extend(kind.recipe for kind in kinds))
    monkeypatch.setattr(bench, "make_sets", inputs)
    monkeypatch.setattr(bench, "torch_sdpa", sdpa)
    monkeypatch.setattr("bench.take_turns", take_turns)
    monkeypatch.setattr("bench.report", report)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert bench.run_case(case, False) == []
    beside = ["torch_sdpa_cudnn", "sage_kernels", "/skip50", "/skip50_compensated", "/skip0"]
    rest = [(suffix, recipe) for recipe in RECIPES for suffix in ("/skip75", "/measuring", "/measuring_all")]
    assert events == [
        *(recipe for recipe in RECIPES for _ in range(2)), ("torch_sdpa_cudnn", ""),
        *((name, recipe) for recipe in RECIPES for name in beside[1:]), *rest,
    ]  # fmt: skip
    assert timed == [beside, beside, ["torch_sdpa_cudnn", *(suffix for suffix, _ in rest)]]
