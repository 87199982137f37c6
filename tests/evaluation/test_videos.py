"""Metrics of clips: right on known shifts, known noise and identical clips; typed errors on anything else."""

import sys

import pytest
import torch

from sage_processors.evaluation import quality, videos
from sage_processors.evaluation.feature_distance import distance_of_features
from tests.support.repository import ROOT


sys.path.append(str(ROOT / "notebooks"))
from picture_report import markdown, title  # noqa: E402
from video_report import Clips, report  # noqa: E402


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


def test_identical_clips():
    a = clips()
    assert torch.isinf(videos.psnr(a, a)).all()
    torch.testing.assert_close(videos.ssim(a, a), torch.ones(2, 4))
    for metric in (videos.flicker, videos.motion_error):
        assert torch.equal(metric(a, a), torch.zeros(2, dtype=torch.float64))


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


def test_frame_change_of_a_blinking_clip():
    blinking = torch.tensor([0.25, 0.5, 0.25, 0.5]).view(1, 4, 1, 1, 1).expand(1, 4, 3, 16, 16)
    assert videos.frame_change(blinking).tolist() == [0.25]
    assert videos.frame_change(blinking[:, ::2]).tolist() == [0]


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


@pytest.mark.parametrize("options", [{"block": 0}, {"reach": 1.5}, {"block": True}, {"block": 25}])
def test_motion_refuses_blocks_that_do_not_fit(options):
    with pytest.raises(ValueError, match=r"expected"):
        videos.motion(clips(), **options)


def test_frames_of_a_clip_count_together_in_the_standard_error():
    generator = torch.Generator().manual_seed(5)
    alone, reference = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (128, 512))
    copies = alone.repeat_interleave(6, 0)
    error = distance_of_features(alone, reference).standard_error
    assert distance_of_features(copies, reference, together=6).standard_error == pytest.approx(error, rel=0.05)
    assert distance_of_features(copies, reference).standard_error < 0.7 * error  # six copies know no more
    with pytest.raises(ValueError, match="together: got 5, expected an int of at least 1 that divides 768"):
        distance_of_features(copies, reference, together=5)


def measured(label: str, drawn: torch.Tensor, stock: torch.Tensor) -> Clips:
    class Means(torch.nn.Module):
        def forward(self, images):
            return images.mean((2, 3))

    return Clips.measure(label, drawn, stock, Means())


def test_report_has_every_number_with_its_interval_over_clips():
    stock = clips(n=12, frames=3, size=16)
    noise = 0.01 * torch.randn(stock.shape, generator=torch.Generator().manual_seed(6))
    own, near = measured("stock", stock, stock), measured("near", stock + noise, stock)
    halves = [measured("near", (stock + noise)[part], stock[part]) for part in (slice(0, 5), slice(5, 12))]
    rows = {(row.label, row.metric): row for row in report([near], own.frame_change, own.features, own.features)}
    joined = report([Clips.join(halves)], own.frame_change, own.features, own.features)
    assert joined == list(rows.values())
    psnr = rows["near", "psnr_db_mean"]
    assert psnr.value == pytest.approx(40, abs=0.3) and psnr.low < psnr.value < psnr.high and psnr.images == 12
    assert rows["near", "flicker_mean"].value == pytest.approx(0.01 * 2**0.5, rel=0.05)
    # uncorrelated noise changes frames more, and by as much in every clip: the pairing leaves a narrow interval
    excess = rows["near", "frame_change_excess"]
    assert 0 < excess.low < excess.value < rows["stock", "frame_change_spread"].value
    assert rows["stock", "feature_fd"].value == pytest.approx(0, abs=1e-12)
    assert rows["near", "feature_fd_excess"].value > 0
    table = markdown(list(rows.values()), "clips")
    assert table.splitlines()[0].endswith("| clips |") and title("motion_error_mean") in table
    with pytest.raises(ValueError, match="got 12 clips of 'near', expected stock's 11"):
        report([near], own.frame_change[:11], own.features)
    with pytest.raises(ValueError, match="expected at least one, all of one label and length"):
        Clips.join([own, near])
