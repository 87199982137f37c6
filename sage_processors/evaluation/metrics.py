"""Distances of pictures (PSNR, SSIM, MS-SSIM, LPIPS) and of any tensors (SQNR, relative L1).

The metrics of pictures are torchmetrics', imported on first use. The others need torch alone. Distances between sets
of pictures are in feature_distance.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..installation import pip_install


SSIM_WINDOW = 11  # side of torchmetrics' default Gaussian window, in pixels: the smallest picture
# Wang, Simoncelli and Bovik 2003, table of weights per scale, finest first
MS_SSIM_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
LPIPS_BACKBONES = {"alex": "alexnet", "vgg": "vgg16", "squeeze": "squeezenet1_1"}  # name -> torchvision's name


def psnr(images: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio of each picture, 10·log10(1 / MSE).

    MSE is the mean over channels and pixels.

    Args:
        images, reference: [N, C, H, W] floating point in [0, 1], same shape.
    Returns: [N] float32, dB, on the inputs' device; +inf for identical pictures.
    Raises: TypeError (no tensor, or not floating point), ValueError (shape, NaN or infinity, values outside [0, 1]),
        ImportError, naming the pip command, without torchmetrics.
    """
    functional = torchmetrics_image("PSNR")
    images, reference = _check_image_pair(images, reference)
    value = functional.peak_signal_noise_ratio(images, reference, data_range=1.0, reduction="none", dim=(1, 2, 3))
    return value.reshape(-1).float()


def ssim(images: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity of each picture (Gaussian window of 11 pixels, sigma 1.5).

    It is 1 for identical pictures.

    Args:
        images, reference: [N, C, H, W] floating point in [0, 1], same shape, H and W at least 11.
    Returns: [N] float32, no unit, on the inputs' device.
    Raises: as `psnr`, and ValueError for pictures smaller than the window.
    """
    functional = torchmetrics_image("SSIM")
    images, reference = _check_image_pair(images, reference)
    if min(images.shape[-2:]) < SSIM_WINDOW:
        raise ValueError(
            f"images: got {images.shape[-2]}x{images.shape[-1]} pixels, expected at least {SSIM_WINDOW}x{SSIM_WINDOW},"
            " the window SSIM slides over; compare larger pictures or use psnr"
        )
    # one picture at a time: a large batch in fp64 does not fit the CPU's cache and takes several times longer
    values = [
        functional.structural_similarity_index_measure(image[None], other[None], data_range=1.0)
        for image, other in zip(images, reference, strict=True)
    ]
    return torch.stack(values).float()


def ms_ssim(images: torch.Tensor, reference: torch.Tensor, *, scales: int = 5) -> torch.Tensor:
    """Return the structural similarity of each picture at several resolutions, each half the one before.

    Args:
        images, reference: [N, C, H, W] floating point in [0, 1], same shape.
        scales: number of resolutions, 1 to 5. 5 is the published measure. Fewer use the weights of the finest ones,
            scaled to a sum of 1, and are another measure: report the number with the value. The smaller side must be
            at least 176 pixels for 5, 99 for 4, 44 for 3, 22 for 2, 11 for 1.
    Returns: [N] float32, no unit, on the inputs' device; 1 for identical pictures.
    Raises: as `psnr`, and ValueError for too small pictures, naming the largest number of scales that fits.
    """
    functional = torchmetrics_image("MS-SSIM")
    images, reference = _check_image_pair(images, reference)
    if isinstance(scales, bool) or not isinstance(scales, int) or not 1 <= scales <= len(MS_SSIM_WEIGHTS):
        raise ValueError(f"scales: got {scales!r}, expected 1 to {len(MS_SSIM_WEIGHTS)}")
    most = ms_ssim_scales(*images.shape[-2:])
    if scales > most:
        remedy = f"pass scales={most}" if most else "compare larger pictures or use psnr"
        raise ValueError(
            f"images: got {images.shape[-2]}x{images.shape[-1]} pixels, expected at least "
            f"{_smallest_side(scales)} on each side for {scales} scales; {remedy}"
        )
    weights = MS_SSIM_WEIGHTS[:scales]
    weights = tuple(weight / sum(weights) for weight in weights)
    # one picture at a time: see ssim
    values = [
        functional.multiscale_structural_similarity_index_measure(
            image[None], other[None], data_range=1.0, betas=weights, kernel_size=SSIM_WINDOW
        )
        for image, other in zip(images, reference, strict=True)
    ]
    return torch.stack(values).float().reshape(-1)


def ms_ssim_scales(height: int, width: int) -> int:
    """Return the largest number of scales of `ms_ssim` for pictures of this size, 0 to 5."""
    return sum(min(height, width) >= _smallest_side(scales) for scales in range(1, len(MS_SSIM_WEIGHTS) + 1))


def _smallest_side(scales: int) -> int:
    """Return the smallest side in pixels that these scales need.

    The coarsest picture must have room for a window, and torchmetrics has a bound of its own.
    """
    return SSIM_WINDOW * max(2 ** (scales - 1), (scales - 1) ** 2)


def lpips(images: torch.Tensor, reference: torch.Tensor, *, backbone: str = "alex") -> torch.Tensor:
    """Return the learned perceptual distance (LPIPS) of each picture, with weights from a local file.

    Args:
        images, reference: [N, 3, H, W] floating point in [0, 1], same shape.
        backbone: "alex", "vgg" or "squeeze". Its ImageNet weights must be in torch.hub's checkpoints folder already:
            nothing is ever downloaded.
    Returns: [N] float32, no unit, on the inputs' device; 0 for identical pictures.
    Raises: as `psnr`, and ImportError without torchvision, ValueError naming the file if the weights are missing.
    """
    if backbone not in LPIPS_BACKBONES:
        raise ValueError(f"backbone: got {backbone!r}, expected one of {sorted(LPIPS_BACKBONES)}")
    images, reference = _check_image_pair(images, reference)
    if images.shape[1] != 3:
        raise ValueError(f"images: got {images.shape[1]} channels, expected 3 (RGB)")
    functional = torchmetrics_image("LPIPS")
    if importlib.util.find_spec("torchvision") is None:
        raise missing_package("LPIPS", "torchvision", "pip install torchvision")
    import torchvision  # type: ignore[import-not-found,unused-ignore]

    url = torchvision.models.get_model_weights(LPIPS_BACKBONES[backbone]).DEFAULT.url
    file = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not file.is_file():
        raise ValueError(
            f"backbone: {backbone!r} needs the file {file}, which is not there; download {url} to it yourself, "
            "or use ms_ssim, which needs no weights"
        )
    values = [
        functional.learned_perceptual_image_patch_similarity(
            image[None].float(), other[None].float(), net_type=backbone, normalize=True
        )
        for image, other in zip(images, reference, strict=True)
    ]
    return torch.stack(values).detach().float().reshape(-1)


class Interval(NamedTuple):
    """A value and the ends of its 95 % confidence interval, in the value's own unit."""

    value: float
    low: float
    high: float


def mean_interval(values: Sequence[float] | torch.Tensor, *, draws: int = 2000, seed: int = 0) -> Interval:
    """Return the mean over pictures with its 95 % interval, by the percentile bootstrap in fp64.

    Args:
        values: one finite number per picture, at least one (the interval of one alone is empty).
        draws: number of resamplings, at least 100. seed: of the resampling; equal seeds give equal intervals.
    Returns: Interval in the unit of the values.
    Raises: ValueError.
    """
    values = torch.as_tensor(values, dtype=torch.float64, device="cpu").flatten()
    if values.numel() == 0 or not bool(torch.isfinite(values).all()):
        raise ValueError(f"values: got {values.numel()} with NaN or infinity, expected at least one, all finite")
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 100:
        raise ValueError(f"draws: got {draws!r}, expected an int of at least 100")
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(values.numel(), (draws, values.numel()), generator=generator, device="cpu")
    means = values[picks].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu")).tolist()
    return Interval(values.mean().item(), low, high)


def paired_interval(values: Sequence[float], baseline: Sequence[float], **options) -> Interval:
    """Return the mean of values - baseline, picture by picture, with its 95 % interval.

    Compare two sets of the same seeds this way, not by their means: pictures differ from each other several times more
    than two ways to draw one of them, and that cancels here.

    Args: values, baseline: one number per picture, in the same order. options: of `mean_interval`.
    Raises: ValueError (lengths that differ, and as mean_interval).
    """
    if len(values) != len(baseline):
        raise ValueError(f"values: got {len(values)}, expected as many as baseline's {len(baseline)}")
    return mean_interval([a - b for a, b in zip(values, baseline, strict=True)], **options)


def sqnr_db(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the signal-to-quantisation-noise ratio, 10·log10(sum reference² / sum (values − reference)²).

    Args:
        values, reference: any shape, floating point, same shape.
    Returns: 0-d float64, dB, summed in fp64; +inf if equal, -inf if the reference is all zero and the values are not.
    Raises: TypeError, ValueError (shape, empty, NaN or infinity).
    """
    values, reference = _check_pair(values, reference, "values")
    noise = (values.double() - reference.double()).square().sum()
    signal = reference.double().square().sum()
    # both all zero: equal, so +inf and not the NaN of 0 / 0
    return torch.where(noise == 0, torch.full_like(noise, torch.inf), 10 * torch.log10(signal / noise))


def rel_l1(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the relative L1 error, sum |values − reference| / sum |reference|, summed in fp64.

    Args:
        values, reference: any shape, floating point, same shape.
    Returns: 0-d float64, no unit; 0 if equal, +inf if only the reference is all zero.
    Raises: TypeError, ValueError (shape, empty, NaN or infinity).
    """
    values, reference = _check_pair(values, reference, "values")
    error = (values.double() - reference.double()).abs().sum()
    size = reference.double().abs().sum()
    return torch.where(error == 0, torch.zeros_like(error), error / size)


def torchmetrics_image(metric: str):
    """Import torchmetrics' functional image metrics. Raises: ImportError naming the pip command."""
    try:
        import torchmetrics.functional.image as functional
    except ImportError as error:
        raise missing_package(metric, "torchmetrics") from error
    return functional


def missing_package(user: str, package: str, command: str = pip_install("diffusers")) -> ImportError:
    """Return the error to raise if a package that `user` needs is not installed."""
    return ImportError(f"{user} needs {package}, which is not installed: {command}")


def check_images(images: torch.Tensor, name: str = "images") -> None:
    """Raise an error unless images are finite floating point [N, C, H, W] in [0, 1], N >= 1.

    Raises: TypeError, ValueError.
    """
    _check_tensor(name, images)
    if images.dim() != 4:
        raise ValueError(f"{name}: got shape {tuple(images.shape)}, expected [N, C, H, W]; use {name}[None] for one")
    if images.numel() == 0:
        raise ValueError(f"{name}: got an empty tensor of shape {tuple(images.shape)}, expected at least one picture")
    low, high = images.aminmax()
    if low < 0 or high > 1:
        raise ValueError(f"{name}: got values in [{low:.4g}, {high:.4g}], expected [0, 1]")


def _check_tensor(name: str, tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: got {tensor.dtype}, expected floating point (divide 8-bit pixels by 255)")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name}: got NaN or infinity, expected finite values")


def _check_pair(values, reference, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    _check_tensor(name, values)
    _check_tensor("reference", reference)
    if values.shape != reference.shape:
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected reference's {tuple(reference.shape)}")
    if values.numel() == 0:
        raise ValueError(f"{name}: got an empty tensor of shape {tuple(values.shape)}, expected at least one element")
    return values.detach(), reference.detach().to(values.device)


def _check_image_pair(images, reference) -> tuple[torch.Tensor, torch.Tensor]:
    images, reference = _check_pair(images, reference, "images")
    check_images(images)
    check_images(reference, "reference")
    # fp64: variances in a window are differences of nearly equal numbers; in fp32 SSIM's fourth digit would be wrong
    return images.double(), reference.double()
