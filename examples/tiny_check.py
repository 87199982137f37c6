"""Check that a picture shows its caption: nearest palette colours, and the best fitting shape template."""

from __future__ import annotations

from pathlib import Path

import tiny_data
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from PIL import Image


PIXELS = 128


def classify_pixels(images: torch.Tensor) -> torch.Tensor:
    """Index into tiny_data.COLORS of the nearest colour per pixel: [B, 3, H, W] in [-1, 1] -> int64 [B, H, W].

    A colour is the segment from its base to its second tone, so a patterned background counts as one colour.
    """
    rgb = (images.float() + 1) * 127.5
    best = []
    for base, tone in tiny_data.PALETTE.values():
        a = torch.tensor(base, dtype=torch.float32, device=images.device)[:, None, None]
        ab = torch.tensor(tone, dtype=torch.float32, device=images.device)[:, None, None] - a
        t = (((rgb - a) * ab).sum(1, keepdim=True) / (ab * ab).sum()).clamp(0, 1)
        best.append((rgb - a - t * ab).square().sum(1))
    return torch.stack(best).argmin(0)


def check_images(images: torch.Tensor, shape: torch.Tensor, color: torch.Tensor, ground_color: torch.Tensor) -> dict:
    """Compare pictures with their captions.

    Args: images [B, 3, H, W] in [-1, 1]; shape, color, ground_color int64 [B], ground_color -1 where it was not said.
    Returns bool lists per picture: `color` (shape colour present in a plausible amount and at least 75 % of the rest
    has the background's colour) and `shape` (of all shapes, the prompt's fits the coloured region best, IoU >= 0.6).
    """
    images, shape, color, ground_color = (t.detach().cpu() for t in (images, shape, color, ground_color))
    nearest = classify_pixels(images)
    mask = nearest == color[:, None, None]
    area = mask.float().mean((1, 2))
    rest = (~mask).float().sum((1, 2)).clamp(min=1)
    ground = ((nearest == ground_color[:, None, None]) & ~mask).float().sum((1, 2)) / rest
    color_ok = (area > 0.01) & (area < 0.6) & ((ground >= 0.75) | (ground_color < 0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small operations: with more threads than free cores they take minutes
    try:
        fits = torch.stack([_best_fit(m) for m in mask])
    finally:
        torch.set_num_threads(threads)
    shape_ok = (fits.argmax(1) == shape) & (fits.amax(1) >= 0.6)
    return {"color": color_ok.tolist(), "shape": shape_ok.tolist()}


def _best_fit(mask: torch.Tensor) -> torch.Tensor:
    """Best intersection over union of a bool mask [H, W] with each shape of the same area and centroid, over tilts."""
    pixels = mask.shape[0]
    if not mask.any():
        return torch.zeros(len(tiny_data.SHAPES))
    axis = (torch.arange(pixels, dtype=torch.float32) + 0.5) * (2 / pixels) - 1
    y, x = axis[None, :, None], axis[None, None, :]
    tilt = torch.linspace(-tiny_data.MAX_TILT, tiny_data.MAX_TILT, 5)[:, None, None]
    count = len(tilt)
    center = ((mask * x[0]).sum() / mask.sum(), (mask * y[0]).sum() / mask.sum())
    scores = []
    for index in range(len(tiny_data.SHAPES)):
        which = torch.full((count, 1, 1), index)
        # A first template tells the shape's area and centroid at unit radius; the second has the mask's.
        unit = tiny_data.signed_distance(which, 2 * x, 2 * y, 0.0, 0.0, torch.ones(count, 1, 1), tilt) < 0
        weight = unit.sum((1, 2), keepdim=True)
        radius = (mask.sum() / weight).sqrt() / 2
        off_x = (unit * 2 * x).sum((1, 2), keepdim=True) / weight * radius
        off_y = (unit * 2 * y).sum((1, 2), keepdim=True) / weight * radius
        fit = tiny_data.signed_distance(which, x, y, center[0] - off_x, center[1] - off_y, radius, tilt) < 0
        scores.append(((fit & mask).sum((1, 2)) / (fit | mask).sum((1, 2))).max())
    return torch.stack(scores)


def check_folder(folder: Path, device: torch.device, grid: Path, quick: bool = False) -> dict:
    """Sample a saved pipeline as a user would and measure how often the pictures show their prompts.

    Writes all pictures to the PNG `grid`. `quick` takes 2 denoising steps instead of 25, to test this code itself.
    Returns the rates of `check_images` per way of calling the pipeline; raises RuntimeError on non-finite pixels.
    """
    on_gpu = device.type == "cuda"
    steps, count = 2 if quick else 25, 32 if on_gpu else 2
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float16 if on_gpu else torch.float32)
    pipe.to(device).set_progress_bar_config(disable=True)
    scene = tiny_data.sample_scene(count, torch.device("cpu"), torch.Generator().manual_seed(1))
    words = tiny_data.captions()
    prompts = [words[i] for i in scene.caption_index().tolist()]
    ground = torch.where(scene.ground > 0, scene.ground_color, -1)
    if "unet" in pipe.components:
        cases = {"guidance_7.5": {}, "guidance_3": {"guidance_scale": 3.0}}
    else:
        small = {"height": 128, "width": 128}
        cases = {"text_32": {**small, "max_sequence_length": 32}, "text_512": small, "pixels_256": {}}
    rates, grids = {}, []
    for case, options in cases.items():
        n = min(count, 8) if case == "pixels_256" else count
        seeds = [torch.Generator().manual_seed(i) for i in range(n)]
        images = pipe(
            prompts[:n], num_inference_steps=steps, generator=seeds, output_type="pt", **options
        ).images.float()
        if not torch.isfinite(images).all():
            raise RuntimeError(f"{folder}: {case} draws non-finite pixels in {pipe.dtype}")
        ok = check_images(images * 2 - 1, scene.shape[:n], scene.color[:n], ground[:n])
        rates[case] = {k: sum(v) / n for k, v in ok.items()}
        grids.append(F.interpolate(images, PIXELS, mode="area").cpu())
    save_grid(torch.cat(grids), grid)
    exact = DiffusionPipeline.from_pretrained(folder)
    exact.set_progress_bar_config(disable=True)
    image = exact("a red circle", height=128, width=128, num_inference_steps=2, output_type="pt").images
    if not torch.isfinite(image).all() or image.shape[-1] != PIXELS:
        raise RuntimeError(f"{folder}: fp32 on the CPU draws {tuple(image.shape)} with non-finite pixels")
    return {"steps": steps, "images": count, "rates": rates, "prompts": prompts}


def save_grid(images: torch.Tensor, path: Path) -> None:
    """Write pictures [N, 3, H, W] in [0, 1] as one PNG, eight in a row."""
    images = torch.cat([images, torch.ones(-len(images) % 8, *images.shape[1:])])
    n, _, height, width = images.shape
    grid = images.view(n // 8, 8, 3, height, width).permute(0, 3, 1, 4, 2).reshape(n // 8 * height, 8 * width, 3)
    Image.fromarray((grid.clamp(0, 1) * 255).round().byte().numpy()).save(path)
