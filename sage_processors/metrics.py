"""How far two tensors or pictures are apart: PSNR and SSIM of images, SQNR and relative L1 of anything.

PSNR and SSIM are torchmetrics' (imported on first use); everything else needs torch alone.
"""

from __future__ import annotations

import torch


SSIM_WINDOW = 11  # side of torchmetrics' default Gaussian window, in pixels; a smaller picture has no window to slide


def psnr(images: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio of each picture: 10·log10(1 / MSE), MSE over channels and pixels.

    Args:
        images, reference: [N, C, H, W] floating point in [0, 1], same shape.
    Returns: [N] float32, dB, on the inputs' device; +inf where the two pictures are identical.
    Raises: TypeError (no tensor, or not floating point), ValueError (shape, NaN or infinity, values outside [0, 1]),
        ImportError naming the pip command when torchmetrics is missing.
    """
    functional = _torchmetrics_image()
    images, reference = _check_images(images, reference)
    value = functional.peak_signal_noise_ratio(images, reference, data_range=1.0, reduction="none", dim=(1, 2, 3))
    return value.reshape(-1).float()


def ssim(images: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Structural similarity of each picture (Gaussian window of 11 pixels, sigma 1.5), 1 when identical.

    Args:
        images, reference: [N, C, H, W] floating point in [0, 1], same shape, H and W at least 11.
    Returns: [N] float32, no unit, on the inputs' device.
    Raises: as `psnr`, and ValueError for pictures smaller than the window.
    """
    functional = _torchmetrics_image()
    images, reference = _check_images(images, reference)
    if min(images.shape[-2:]) < SSIM_WINDOW:
        raise ValueError(
            f"images: got {images.shape[-2]}x{images.shape[-1]} pixels, expected at least {SSIM_WINDOW}x{SSIM_WINDOW},"
            " the window SSIM slides over; compare larger pictures or use psnr"
        )
    # one picture at a time: fp64 convolution of a large batch falls out of the cache and takes several times longer
    values = [
        functional.structural_similarity_index_measure(image[None], other[None], data_range=1.0)
        for image, other in zip(images, reference, strict=True)
    ]
    return torch.stack(values).float()


def sqnr_db(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Signal to quantisation noise: 10·log10(sum reference² / sum (values − reference)²), summed in fp64.

    Args:
        values, reference: any shape, floating point, same shape.
    Returns: 0-d float64, dB; +inf when equal, -inf when the reference is all zero and the values are not.
    Raises: TypeError, ValueError (shape, empty, NaN or infinity).
    """
    values, reference = _check_pair(values, reference, "values")
    noise = (values.double() - reference.double()).square().sum()
    signal = reference.double().square().sum()
    # 0/0 is a perfect copy of silence, not a NaN
    return torch.where(noise == 0, torch.full_like(noise, torch.inf), 10 * torch.log10(signal / noise))


def rel_l1(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative L1 error: sum |values − reference| / sum |reference|, summed in fp64.

    Args:
        values, reference: any shape, floating point, same shape.
    Returns: 0-d float64, no unit; 0 when equal, +inf when only the reference is all zero.
    Raises: TypeError, ValueError (shape, empty, NaN or infinity).
    """
    values, reference = _check_pair(values, reference, "values")
    error = (values.double() - reference.double()).abs().sum()
    size = reference.double().abs().sum()
    return torch.where(error == 0, torch.zeros_like(error), error / size)


def _torchmetrics_image():
    try:
        import torchmetrics.functional.image as functional
    except ImportError as error:
        raise ImportError(
            'PSNR and SSIM need torchmetrics, which is not installed: pip install "sage-processors[diffusers]"'
        ) from error
    return functional


def _check_pair(values, reference, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    for argument, tensor in ((name, values), ("reference", reference)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{argument}: got {type(tensor).__name__}, expected a torch.Tensor")
        if not tensor.is_floating_point():
            raise TypeError(f"{argument}: got {tensor.dtype}, expected floating point (divide 8-bit pixels by 255)")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{argument}: got NaN or infinity, expected finite values")
    if values.shape != reference.shape:
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected reference's {tuple(reference.shape)}")
    if values.numel() == 0:
        raise ValueError(f"{name}: got an empty tensor of shape {tuple(values.shape)}, expected at least one element")
    return values.detach(), reference.detach().to(values.device)


def _check_images(images, reference) -> tuple[torch.Tensor, torch.Tensor]:
    images, reference = _check_pair(images, reference, "images")
    if images.dim() != 4:
        raise ValueError(f"images: got shape {tuple(images.shape)}, expected [N, C, H, W]; use images[None] for one")
    for argument, tensor in (("images", images), ("reference", reference)):
        low, high = tensor.aminmax()
        if low < 0 or high > 1:
            raise ValueError(f"{argument}: got values in [{low:.4g}, {high:.4g}], expected [0, 1]")
    # fp64: windowed variances are differences of nearly equal numbers, in fp32 that costs SSIM its fourth digit
    return images.double(), reference.double()
