"""Metrics: equal to their formulas computed another way, and typed errors on bad input."""

import math
import sys

import pytest
import torch

from sage_processors.evaluation import metrics


def pictures(seed: int = 0, n: int = 3, size: int = 24) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def test_psnr_formula_per_picture():
    reference = pictures() * 0.5
    step = torch.tensor([0.1, 0.01, 0.001]).view(3, 1, 1, 1)
    got = metrics.psnr(reference + step, reference)
    torch.testing.assert_close(got, torch.tensor([20.0, 40.0, 60.0]), atol=2e-3, rtol=0)


def test_identical_pictures():
    a = pictures()
    assert torch.isinf(metrics.psnr(a, a)).all() and (metrics.psnr(a, a) > 0).all()
    torch.testing.assert_close(metrics.ssim(a, a), torch.ones(3))


def test_half_precision_is_compared_after_widening():
    a, b = pictures(0).half(), pictures(1).half()
    torch.testing.assert_close(metrics.psnr(a, b), metrics.psnr(a.float(), b.float()))
    assert metrics.ssim(a, b).dtype == torch.float32


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
    with pytest.raises(ImportError, match=r'pip install -e "\.\[diffusers\]" in a checkout'):
        metric(pictures(), pictures())


def windowed(x: torch.Tensor) -> torch.Tensor:
    """Gaussian means over every 11x11 window of [N, C, H, W], fp64, sigma 1.5."""
    line = torch.exp(-((torch.arange(11, dtype=torch.float64) - 5) ** 2) / (2 * 1.5**2))
    window = torch.outer(line, line) / line.sum() ** 2
    channels = x.shape[1]
    return torch.nn.functional.conv2d(x, window.expand(channels, 1, 11, 11), groups=channels)


def similarity(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(SSIM, its contrast-structure part) per picture, from the definition.

    As in torchmetrics, SSIM also counts windows around the pixels at the edge, beyond which the picture is mirrored.
    """
    a, b = (torch.nn.functional.pad(x, (5, 5, 5, 5), mode="reflect") for x in (a, b))
    a, b, c1, c2 = a.double(), b.double(), 0.01**2, 0.03**2
    mean_a, mean_b = windowed(a), windowed(b)
    var_a, var_b = windowed(a * a) - mean_a**2, windowed(b * b) - mean_b**2
    covariance = windowed(a * b) - mean_a * mean_b
    structure = (2 * covariance + c2) / (var_a + var_b + c2)
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return (luminance * structure).mean((1, 2, 3)), structure[..., 5:-5, 5:-5].mean((1, 2, 3))


def noisy_pair(size: int, amount: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    a = torch.nn.functional.interpolate(pictures(4, n=2, size=size // 4), size, mode="bilinear")
    return (a + amount * torch.randn(a.shape, generator=generator)).clamp(0, 1), a


def test_ssim_from_its_definition():
    a, b = noisy_pair(48)
    torch.testing.assert_close(metrics.ssim(a, b).double(), similarity(a, b)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("scales", [1, 2, 3])
def test_ms_ssim_from_its_definition(scales):
    a, b = noisy_pair(64)
    weights = torch.tensor(metrics.MS_SSIM_WEIGHTS[:scales], dtype=torch.float64)
    weights, expected, x, y = weights / weights.sum(), torch.ones(2, dtype=torch.float64), a.double(), b.double()
    for scale in range(scales):
        ssim, structure = similarity(x, y)
        expected *= (ssim if scale == scales - 1 else structure) ** weights[scale]
        x, y = (torch.nn.functional.avg_pool2d(z, 2) for z in (x, y))
    torch.testing.assert_close(metrics.ms_ssim(a, b, scales=scales).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("side", "most"), [(10, 0), (11, 1), (21, 1), (22, 2), (44, 3), (64, 3), (98, 3), (99, 4), (175, 4), (176, 5)]
)
def test_ms_ssim_says_how_many_scales_fit(side, most):
    assert metrics.ms_ssim_scales(side, 200) == metrics.ms_ssim_scales(200, side) == most
    a = torch.rand(1, 1, side, 200)
    if most:
        assert metrics.ms_ssim(a, a, scales=most).item() == pytest.approx(1)
    if most < 5:
        remedy = f"pass scales={most}" if most else "use psnr"
        with pytest.raises(ValueError, match=rf"{side}x200 pixels, expected at least .* {remedy}"):
            metrics.ms_ssim(a, a, scales=most + 1)


def test_mean_interval_of_a_known_spread():
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)) * 3 + 50
    found = metrics.mean_interval(values)
    expected = 1.96 * values.double().std().item() / 20
    assert found.value == pytest.approx(values.double().mean().item())
    assert found.value - found.low == pytest.approx(expected, rel=0.1)
    assert found.high - found.value == pytest.approx(expected, rel=0.1)
    assert metrics.mean_interval(values) == found != metrics.mean_interval(values, seed=1)


def test_paired_interval_sees_what_means_hide():
    generator = torch.Generator().manual_seed(0)
    baseline = 50 + 15 * torch.randn(16, generator=generator)
    values = baseline + 0.5 + 0.1 * torch.randn(16, generator=generator)
    found = metrics.paired_interval(values.tolist(), baseline.tolist())
    assert 0.4 < found.low < found.value < found.high < 0.6
    alone = [metrics.mean_interval(x) for x in (values, baseline)]
    assert alone[0].low < alone[1].value < alone[0].high  # the means alone show nothing
    with pytest.raises(ValueError, match="values: got 15, expected as many as baseline's 16"):
        metrics.paired_interval(values[1:].tolist(), baseline.tolist())


def test_lpips_without_torchvision_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="LPIPS needs torchvision, which is not installed: pip install torchvision"):
        metrics.lpips(pictures(), pictures())
    with pytest.raises(ValueError, match=r"backbone: got 'resnet', expected one of \['alex', 'squeeze', 'vgg'\]"):
        metrics.lpips(pictures(), pictures(), backbone="resnet")
    with pytest.raises(ValueError, match="got 1 channels, expected 3"):
        metrics.lpips(pictures()[:, :1], pictures()[:, :1])


@pytest.fixture
def torchvision_of_random_weights(monkeypatch):
    """What lpips uses of torchvision: AlexNet's layers, here with random weights, and the name of their file."""
    import types

    import torchmetrics.functional.image.lpips as backend

    def alexnet(weights):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            conv, relu, pool = torch.nn.Conv2d, torch.nn.ReLU, torch.nn.MaxPool2d
            layers = [conv(3, 64, 11, 4, 2), relu(), pool(3, 2), conv(64, 192, 5, 1, 2), relu(), pool(3, 2)]
            layers += [conv(192, 384, 3, 1, 1), relu(), conv(384, 256, 3, 1, 1), relu()]
            layers += [conv(256, 256, 3, 1, 1), relu()]
        return types.SimpleNamespace(features=torch.nn.Sequential(*layers))

    weights = types.SimpleNamespace(DEFAULT=types.SimpleNamespace(url="https://example.org/models/alexnet-0.pth"))
    models = types.SimpleNamespace(
        alexnet=alexnet, AlexNet_Weights=weights, get_model_weights=lambda name: {"alexnet": weights}[name]
    )
    module = types.ModuleType("torchvision")
    module.models, module.__spec__ = models, types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torchvision", module)
    monkeypatch.setattr(backend, "_TORCHVISION_AVAILABLE", True)


def test_lpips_needs_the_file_and_never_fetches_it(torchvision_of_random_weights, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    a, b = noisy_pair(64)
    with pytest.raises(ValueError, match=r"alexnet-0\.pth, which is not there; download https://example.org"):
        metrics.lpips(a, b)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "alexnet-0.pth").touch()
    values = metrics.lpips(a, b)
    assert values.shape == (2,) and (values > 0).all() and (metrics.lpips(b, b) == 0).all()
    torch.testing.assert_close(metrics.lpips(a[1:], b[1:]), values[1:])
    assert (metrics.lpips(noisy_pair(64, 0.3)[0], b) > values).all()
