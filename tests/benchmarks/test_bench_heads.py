"""Both sides of bench_heads.py compute the same heads."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import qk_norm_rope
from sage_kernels.testing import relative_l2


pytest.importorskip("triton")


def test_heads_of_both_sides_are_the_same(bench):
    q, k = torch.randn(2, 33, 3, 16), torch.randn(2, 33, 3, 16)
    weights, (cos, sin) = (torch.rand(16) + 0.5, torch.rand(16) + 0.5), bench.make_angles(33, 16, "cpu")
    ours = qk_norm_rope([q], [k], [weights[0]], [weights[1]], eps=bench.EPS, cos=[cos], sin=[sin])
    for x, weight, got in zip((q, k), weights, ours, strict=True):
        assert relative_l2(got, bench.stock_heads(x, weight, cos, sin)) < 1e-6
    assert relative_l2(ours[0], q) > 0.1  # else nothing is done to them
