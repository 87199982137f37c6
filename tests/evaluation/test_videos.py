"""Metrics of clips: right on known shifts, known noise and identical clips; typed errors on anything else."""

import sys

import pytest
import torch

from sage_processors.evaluation import quality, videos
from sage_processors.evaluation.feature_distance import distance_of_features
from tests.support.repository import ROOT


sys.path.append(str(ROOT / "notebooks"))


def clips(n: int = 2, frames: int = 4, size: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, frames, 3, size, size, generator=torch.Generator().manual_seed(seed)) * 0.5 + 0.25


def shifted(down: int, right: int, frames: int = 3, size: int = 48) -> torch.Tensor:
    """A random texture that moves by so many pixels a frame."""
    texture = torch.rand(3, size, size, generator=torch.Generator().manual_seed(1))
    return torch.stack([texture.roll((down * t, right * t), (1, 2)) for t in range(frames)])[None]


def test_frames_are_measured_one_by_one():
    reference = clips()
    step = torch.tensor([[0.1, 0.01, 0.001, 0.1], [0.001, 0.1, 0.01, 0.01]]).view(2, 4, 1, 1, 1)
    expected = torch.tensor([[20.0, 40, 60, 20], [60, 20, 40, 40]])
    torch.testing.assert_close(videos.psnr(reference + step, reference), expected, atol=2e-3, rtol=0)
    ssim = videos.ssim(reference + step, reference)
    assert ssim.shape == (2, 4) and ssim[0].argsort().tolist()[-1] == 2 and ssim[1].argmax() == 0


def test_quality_of_a_clip_is_the_mean_of_its_frames():
    reference = clips()
    step = torch.tensor([[0.1, 0.01, 0.001, 0.1], [0.001, 0.1, 0.01, 0.01]]).view(2, 4, 1, 1, 1)
    found = quality.compare("name", "recipe", reference + step, reference, (1, 0))
    assert found.psnr_db == pytest.approx((35, 40), abs=2e-3)
    assert found.ssim == pytest.approx(videos.ssim(reference + step, reference).mean(1).tolist())
    assert next(found.rows("tiny"))["batch"] == 2


def test_flicker_of_known_noise_is_root_two_of_it():
    reference = torch.full((1, 9, 3, 64, 64), 0.5)
    noise = 0.02 * torch.randn(reference.shape, generator=torch.Generator().manual_seed(2))
    # the RMS of n Gaussians is off by 1/sqrt(2n) of itself: 98,304 differences, of which neighbours share noise
    assert videos.flicker(reference + noise, reference).item() == pytest.approx(0.02 * 2**0.5, rel=0.01)


def test_what_all_frames_have_alike_does_not_flicker():
    reference = clips()
    offset = torch.rand(2, 1, 3, 24, 24, generator=torch.Generator().manual_seed(3)) * 0.2
    assert videos.flicker(reference + offset, reference).amax() < 1e-7
    assert videos.flicker(reference * 0.5, reference).amin() > 0.05  # less motion is a difference, too


@pytest.mark.parametrize(("down", "right"), [(2, -3), (-7, 7), (0, 0)])
def test_motion_finds_a_known_shift(down, right):
    found = videos.motion(shifted(down, right), block=8, reach=7)
    assert found.shape == (1, 2, 6, 6, 2)
    inside = found[:, :, 1:-1, 1:-1]  # what leaves the frame is found nowhere
    assert torch.equal(inside, torch.tensor([down, right]).expand_as(inside))


def test_motion_of_flat_frames_is_none_and_noise_of_eight_bits_moves_nothing():
    flat = torch.full((1, 3, 3, 32, 32), 0.5)
    assert not videos.motion(flat).any()
    rounding = (torch.rand(flat.shape, generator=torch.Generator().manual_seed(4)) - 0.5) / 255
    assert videos.motion_error(flat + rounding, flat).item() == 0


def test_motion_error_is_the_distance_between_two_motions():
    size = 128  # blocks at the edges, which find nothing, are few
    two, three, back = (shifted(0, n, frames=2, size=size) for n in (2, 3, -2))
    assert videos.motion_error(three, two).item() == pytest.approx(1, abs=0.3)
    assert videos.motion_error(back, two).item() == pytest.approx(4, abs=0.6)
    still = shifted(0, 0, frames=2, size=size)
    assert videos.motion_error(still, two).item() == pytest.approx(2, abs=0.3)  # only one of them moves


@pytest.mark.parametrize("metric", [videos.flicker, videos.motion_error])
def test_one_frame_has_no_flicker_and_no_motion(metric):
    one = clips(frames=1)
    with pytest.raises(ValueError, match="got 1 frames, expected at least 2"):
        metric(one, one)
    for alone in (videos.frame_change, videos.motion):
        with pytest.raises(ValueError, match="got 1 frames, expected at least 2"):
            alone(one)
    assert videos.psnr(one, one).shape == (2, 1)


@pytest.mark.parametrize("metric", [videos.psnr, videos.ssim, videos.flicker, videos.motion_error])
def test_bad_pairs_raise(metric):
    a = clips()
    for wrong, error, message in (
        (a[0], ValueError, r"expected \[N, T, C, H, W\]; use clips\[None\]"),
        (a[:, :2], ValueError, r"got shape \(2, 2, 3, 24, 24\), expected reference's \(2, 4"),
        (a * 3, ValueError, r"expected \[0, 1\]"),
        (a * float("nan"), ValueError, "NaN"),
        ((a * 255).byte(), TypeError, "expected floating point"),
        ([a], TypeError, "got list"),
    ):
        with pytest.raises(error, match=message):
            metric(wrong, a)


def test_frames_of_a_clip_count_together_in_the_standard_error():
    generator = torch.Generator().manual_seed(5)
    alone, reference = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (128, 512))
    copies = alone.repeat_interleave(6, 0)
    error = distance_of_features(alone, reference).standard_error
    assert distance_of_features(copies, reference, together=6).standard_error == pytest.approx(error, rel=0.05)
    assert distance_of_features(copies, reference).standard_error < 0.7 * error  # six copies know no more
    with pytest.raises(ValueError, match="together: got 5, expected an int of at least 1 that divides 768"):
        distance_of_features(copies, reference, together=5)
