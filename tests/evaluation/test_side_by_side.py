"""The picture of both pictures: cells hold the right pixels, the gain makes the difference visible."""

import numpy as np
import pytest
import torch

from sage_processors.evaluation.side_by_side import LABEL, MARGIN, amplification, side_by_side


def test_cells_hold_stock_ours_and_the_amplified_difference():
    stock = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.9
    ours = stock + 0.01
    canvas = side_by_side(stock, ours, ["one", "two"], 8, cell=64)
    pixels = np.asarray(canvas)
    assert canvas.size == (2 * (64 + MARGIN) + MARGIN, 3 * (LABEL + 64 + MARGIN))
    for r, expected in enumerate((stock, ours, (ours - stock).abs() * 8)):
        for c in range(2):
            top, left = LABEL + r * (LABEL + 64 + MARGIN), MARGIN + c * (64 + MARGIN)
            cell = pixels[top : top + 64 : 4, left : left + 64 : 4]  # nearest neighbour, 4x
            assert np.array_equal(cell, (expected[c] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
    labels = pixels[: LABEL - 1]
    assert labels.min() < 128 and not np.array_equal(labels[:, :64], labels[:, 72:136])  # each its own title


@pytest.mark.parametrize(("size", "gain"), [(0.6, 1), (0.3, 2), (0.01, 64), (1e-9, 65536), (0.0, 65536)])
def test_amplification_is_the_power_of_two_below_white(size, gain):
    stock = torch.zeros(1, 3, 32, 32)
    ours = stock + size
    ours[0, 0, 0, 0] = 1.0  # one outlier must not decide
    assert amplification(stock, ours) == gain


def test_shapes_and_titles_must_agree():
    a = torch.zeros(2, 3, 16, 16)
    for stock, ours, titles in ((a, a[:1], ["x", "y"]), (a, a, ["x"]), (a[0], a[0], ["x"] * 3)):
        with pytest.raises(ValueError, match=r"expected equal shapes \[N, 3, H, W\] and one title per picture"):
            side_by_side(stock, ours, titles, 1)
