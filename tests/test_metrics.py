"""Metrics: equal to their formulas computed another way, and typed errors on bad input."""

import math
import sys

import pytest
import torch

from sage_processors import metrics


def pictures(seed: int = 0, n: int = 3, size: int = 24) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_psnr_formula_per_picture():
    reference = pictures() * 0.5
    step = torch.tensor([0.1, 0.01, 0.001]).view(3, 1, 1, 1)
    got = metrics.psnr(reference + step, reference)
    torch.testing.assert_close(got, torch.tensor([20.0, 40.0, 60.0]), atol=2e-3, rtol=0)


def test_psnr_is_each_pictures_own():
    a, b = pictures(0), pictures(1)
    alone = torch.stack([metrics.psnr(x[None], y[None])[0] for x, y in zip(a, b, strict=True)])
    torch.testing.assert_close(metrics.psnr(a, b), alone)
    assert alone.unique().numel() == 3


def test_identical_pictures():
    a = pictures()
    assert torch.isinf(metrics.psnr(a, a)).all() and (metrics.psnr(a, a) > 0).all()
    torch.testing.assert_close(metrics.ssim(a, a), torch.ones(3))


def test_half_precision_is_compared_after_widening():
    a, b = pictures(0).half(), pictures(1).half()
    torch.testing.assert_close(metrics.psnr(a, b), metrics.psnr(a.float(), b.float()))
    assert metrics.ssim(a, b).dtype == torch.float32


def test_ssim_of_constant_pictures():
    # without structure only the luminance term is left: (2·x·y + C1) / (x² + y² + C1), C1 = 0.01²
    x, y, c1 = 0.25, 0.75, 1e-4
    got = metrics.ssim(torch.full((1, 3, 24, 24), x), torch.full((1, 3, 24, 24), y))
    assert got.item() == pytest.approx((2 * x * y + c1) / (x * x + y * y + c1), rel=1e-6)


def test_ssim_falls_with_noise():
    a = pictures(0, n=1)
    noise = torch.randn(a.shape, generator=torch.Generator().manual_seed(3))
    values = [metrics.ssim((a + s * noise).clamp(0, 1), a).item() for s in (0.01, 0.1, 0.5)]
    assert values == sorted(values, reverse=True) and values[0] > 0.99 > values[2] + 0.3


def test_sqnr_formula():
    reference = torch.tensor([3.0, -4.0])
    assert metrics.sqnr_db(reference + torch.tensor([0.3, 0.4]), reference).item() == pytest.approx(20.0, abs=1e-5)
    assert metrics.sqnr_db(reference, reference).item() == math.inf
    assert metrics.sqnr_db(torch.ones(2), torch.zeros(2)).item() == -math.inf
    assert metrics.sqnr_db(torch.zeros(2), torch.zeros(2)).item() == math.inf


def test_sqnr_sums_in_fp64():
    reference = torch.full((8,), 300.0, dtype=torch.float16)  # 300² overflows fp16
    assert metrics.sqnr_db(reference * 0.5, reference).item() == pytest.approx(20 * math.log10(2), abs=1e-6)


def test_rel_l1_formula():
    reference = torch.tensor([1.0, -3.0])
    assert metrics.rel_l1(torch.tensor([1.1, -3.3]), reference).item() == pytest.approx(0.1, abs=1e-6)
    assert metrics.rel_l1(torch.zeros(2), torch.zeros(2)).item() == 0
    assert metrics.rel_l1(torch.ones(2), torch.zeros(2)).item() == math.inf


@pytest.mark.parametrize("metric", [metrics.psnr, metrics.ssim, metrics.sqnr_db, metrics.rel_l1])
def test_bad_pairs_raise(metric):
    a = pictures()
    with pytest.raises(ValueError, match=r"shape \(3, 3, 24, 24\).*\(2, 3, 24, 24\)"):
        metric(a, a[:2])
    with pytest.raises(ValueError, match="reference: got NaN"):
        metric(a, a * torch.nan)
    with pytest.raises(ValueError, match="NaN or infinity"):
        metric(a / 0, a)
    with pytest.raises(TypeError, match="torch.uint8"):
        metric((a * 255).to(torch.uint8), a)
    with pytest.raises(TypeError, match="got list"):
        metric(a.tolist(), a)
    with pytest.raises(ValueError, match="empty"):
        metric(a[:0], a[:0])


@pytest.mark.parametrize("metric", [metrics.psnr, metrics.ssim])
def test_bad_pictures_raise(metric):
    a = pictures()
    with pytest.raises(ValueError, match=r"\[N, C, H, W\]"):
        metric(a[0], a[0])
    with pytest.raises(ValueError, match=r"images: got values in \[.*expected \[0, 1\]"):
        metric(a + 0.5, a)
    with pytest.raises(ValueError, match="reference: got values"):
        metric(a, a - 0.5)


def test_ssim_of_tiny_pictures_raises():
    a = pictures(size=8)
    with pytest.raises(ValueError, match="8x8 pixels, expected at least 11x11"):
        metrics.ssim(a, a)


@pytest.mark.parametrize("metric", [metrics.psnr, metrics.ssim])
def test_missing_torchmetrics_names_the_command(metric, monkeypatch):
    for name in [n for n in sys.modules if n == "torchmetrics" or n.startswith("torchmetrics.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ImportError, match=r'pip install "sage-processors\[diffusers\]"'):
        metric(pictures(), pictures())
