"""feature-FD: the distance against closed forms, and what the classifier sees."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from sage_processors import pipelines
from sage_processors.evaluation import feature_distance as fd
from tests.support.repository import ROOT


sys.path.append(str(ROOT / "examples"))


def normal(count: int, dims: int, seed: int) -> torch.Tensor:
    return torch.randn(count, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def white(count: int, dims: int, seed: int = 0) -> torch.Tensor:
    """Vectors whose sample mean is 0 and whose sample covariance is the identity, to rounding."""
    x = normal(count, dims, seed)
    x = x - x.mean(0)
    return torch.linalg.qr(x).Q * math.sqrt(count - 1)


def drawn(count: int, seed: int, pixels: int = 64) -> torch.Tensor:
    import tiny_data

    generator = torch.Generator().manual_seed(seed)
    scene = tiny_data.sample_scene(count, torch.device("cpu"), generator)
    return tiny_data.draw(scene, pixels, generator) * 0.5 + 0.5


def test_distance_of_known_gaussians():
    # covariances that commute: |m1 - m2|² + sum (s1 - s2)²
    x, y = white(50, 6, 0), white(70, 6, 1)
    s1, s2 = torch.tensor([1.0, 2, 3, 4, 5, 1e-3]).double(), torch.tensor([2.0, 2, 1, 7, 5, 0]).double()
    shift = torch.arange(6).double()
    expected = shift.square().sum() + (s1 - s2).square().sum()
    assert fd.frechet_distance(x * s1 + shift, y * s2) == pytest.approx(expected.item(), rel=1e-12)


def test_distance_is_the_eigenvalue_form():
    a, b = normal(200, 9, 2) @ normal(9, 9, 3), normal(90, 9, 4) @ normal(9, 9, 5) + 1
    first, second = torch.cov(a.T), torch.cov(b.T)
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.sqrt() @ vectors.T
    overlap = torch.linalg.eigvalsh(root @ second @ root).clamp_min(0).sqrt().sum()
    expected = (a.mean(0) - b.mean(0)).square().sum() + first.trace() + second.trace() - 2 * overlap
    assert fd.frechet_distance(a, b) == pytest.approx(expected.item(), rel=1e-10)
    assert fd.frechet_distance(b, a) == pytest.approx(expected.item(), rel=1e-10)


def test_distance_of_equal_sets_is_nothing_even_without_full_rank():
    x = normal(64, 8, 0)
    flat = torch.cat([x, x], 1)  # 16 features of rank 8
    variance = flat.var(0).sum().item()
    assert 0 <= fd.frechet_distance(flat, flat) <= 1e-13 * variance
    assert (
        0 <= fd.frechet_distance(flat + 1e4, flat.flip(0) + 1e4) <= 1e-9 * variance
    )  # 1e4: fp64 loses 4 digits of it


@pytest.mark.parametrize(
    ("first", "error", "match"),
    [
        (torch.zeros(8, 8), ValueError, "first: got 8 pictures, expected at least 9"),
        (torch.zeros(9), ValueError, r"first: got shape \(9,\), expected \[N, D\]"),
        (torch.full((20, 8), math.nan), ValueError, "first: got NaN"),
        (torch.zeros(20, 8, dtype=torch.int64), TypeError, "first: got torch.int64"),
        ([[0.0] * 8] * 20, TypeError, "first: got list"),
        (torch.zeros(20, 7), ValueError, "second: got vectors of length 8, expected first's 7"),
    ],
)
def test_distance_refuses(first, error, match):
    with pytest.raises(error, match=match):
        fd.frechet_distance(first, torch.rand(20, 8))


def test_excess_over_a_baseline_is_known_better_than_either():
    reference, pictures = normal(4000, 6, 99), normal(256, 6, 0)
    moved = fd.distance_of_features(pictures + 0.2, reference, pictures)
    same = fd.distance_of_features(pictures, reference, pictures)
    assert same.excess == (0, 0, 0) and moved.excess.low > 0
    assert moved.excess.value == pytest.approx(moved.value - same.value)
    slightly = fd.distance_of_features(pictures + 1e-3 * normal(256, 6, 1), reference, pictures)
    assert slightly.excess.high - slightly.excess.low < slightly.standard_error
    with pytest.raises(ValueError, match=r"baseline: got shape \(255, 6\), expected \(256, 6\)"):
        fd.distance_of_features(pictures, reference, pictures[1:])


def test_the_classifier_is_what_its_record_says():
    record, model = fd.classifier_metrics(), fd.load_classifier()
    assert (pipelines.folder(fd.CLASSIFIER) / "model.safetensors").stat().st_size <= 2**20
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    images, answers = _drawn_with_labels(512)
    logits = model.answers(fd.features(images).float())
    for label, share in record["held_out_accuracy"].items():
        right = (logits[label].argmax(1) == answers[label]).float().mean().item()
        # three standard errors of a share of 512
        assert abs(right - share) < 3 * math.sqrt(max(share * (1 - share), 0.01) / 512), label
    assert record["held_out_accuracy"]["shape"] > 0.95 and record["held_out_accuracy"]["color"] > 0.95


def _drawn_with_labels(count: int):
    import tiny_data

    generator = torch.Generator().manual_seed(12345)
    scene = tiny_data.sample_scene(count, torch.device("cpu"), generator)
    images = tiny_data.draw(scene, 64, generator) * 0.5 + 0.5
    return images.clamp(0, 1), {label: getattr(scene, label) for label in fd.LABELS}


def test_feature_fd_grows_with_damage():
    reference, images = drawn(384, 1), drawn(128, 2)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(3))
    damaged = [(images + s * noise).clamp(0, 1) for s in (0.03, 0.1, 0.3)]
    values = [fd.feature_fd(x, reference, images) for x in (images, *damaged)]
    assert [x.value for x in values] == sorted(x.value for x in values) and values[-1].value > 5 * values[0].value
    assert values[0].excess.value == 0 and values[2].excess.low > 0
    assert str(values[0]).startswith("feature-FD ") and values[0].features == 32


def test_features_do_not_depend_on_the_batch():
    images = drawn(7, 5)
    torch.testing.assert_close(fd.features(images, batch=3), fd.features(images), atol=1e-5, rtol=1e-5)
