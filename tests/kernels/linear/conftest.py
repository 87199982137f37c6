"""The 8-bit linear ops on each of their implementations."""

from __future__ import annotations

import pytest

from tests.kernels.linear.linear_cases import Linears


@pytest.fixture
def linears(tier, monkeypatch):
    """`quantize_activation` and `quantized_linear` on a tier: see linear_cases.Linears."""
    return Linears(tier, monkeypatch)
