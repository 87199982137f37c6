"""Distances of clips: PSNR and SSIM of frames, change from frame to frame, flicker, and motion.

Frames are compared by the metrics of pictures (metrics.py). Clips are [N, T, C, H, W], as diffusers returns them with
`output_type="pt"`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from . import metrics
from .feature_distance import features


BLOCK = 8  # side in pixels of a block whose motion is estimated
REACH = 7  # largest motion in pixels, in each direction
# A match must be better by this much, of the range of pixels, per pixel of distance. Without it, flat blocks, which
# match everywhere, would move by rounding noise of 8-bit pixels.
DISTANCE_COST = 1e-3


def psnr(clips: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the peak signal-to-noise ratio of each frame, dB, as `metrics.psnr`.

    Args:
        clips, reference: [N, T, C, H, W] floating point in [0, 1], same shape.
    Returns: [N, T] float32 on the inputs' device; +inf for identical frames.
    Raises: as `metrics.psnr`.
    """
    _check_pair(clips, reference)
    return metrics.psnr(clips.flatten(0, 1), reference.flatten(0, 1)).view(clips.shape[:2])


def ssim(clips: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity of each frame, 1 for identical frames, as `metrics.ssim`.

    Args: clips, reference: as for `psnr`, H and W at least 11. Returns: [N, T] float32. Raises: as `metrics.ssim`.
    """
    _check_pair(clips, reference)
    return metrics.ssim(clips.flatten(0, 1), reference.flatten(0, 1)).view(clips.shape[:2])


def frame_change(clips: torch.Tensor) -> torch.Tensor:
    """Return the mean change of a clip from frame to frame, |x[t+1] - x[t]|.

    Motion and flicker both add to it.

    Args:
        clips: [N, T, C, H, W] floating point in [0, 1], T at least 2.
    Returns: [N] float64, 1 = the range of pixels.
    Raises: TypeError, ValueError (shape, range, NaN, a single frame).
    """
    _check(clips, "clips", frames=2)
    return clips.double().diff(dim=1).abs().mean((1, 2, 3, 4))


def flicker(clips: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the RMS of the change from frame to frame minus the reference's change.

    That is, of (x[t+1] - x[t]) - (r[t+1] - r[t]). It is 0 for a difference that is the same in every frame, and
    sqrt(2)·σ for independent noise of deviation σ in each frame.

    Args:
        clips, reference: [N, T, C, H, W] floating point in [0, 1], same shape, T at least 2.
    Returns: [N] float64, 1 = the range of pixels.
    Raises: as `frame_change`, and ValueError for shapes that differ.
    """
    _check_pair(clips, reference, frames=2)
    difference = clips.double() - reference.to(clips.device).double()
    return difference.diff(dim=1).square().mean((1, 2, 3, 4)).sqrt()


def motion(clips: torch.Tensor, *, block: int = BLOCK, reach: int = REACH) -> torch.Tensor:
    """Return the motion of each block of a frame to the next frame, by block matching.

    The match has the smallest mean absolute difference of pixels, plus DISTANCE_COST per pixel of distance.

    Args:
        clips: [N, T, C, H, W] floating point in [0, 1], T at least 2, H and W at least `block`.
        block: side of a block in pixels, at least 1. reach: pixels searched in each direction, at least 1.
    Returns: [N, T - 1, H // block, W // block, 2] int64, pixels down and to the right. A frame is continued outside by
        the pixels at its edge.
    Raises: as `frame_change`, and ValueError for an invalid block or reach.
    """
    _check(clips, "clips", frames=2)
    for name, value in (("block", block), ("reach", reach)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}, expected an int of at least 1")
    count, frames, _, height, width = clips.shape
    if min(height, width) < block:
        raise ValueError(f"clips: got {height}x{width} pixels, expected at least one block of {block}x{block}")
    before, after = (x.flatten(0, 1).float() for x in (clips[:, :-1], clips[:, 1:]))
    around = F.pad(after, (reach,) * 4, mode="replicate")
    best = torch.full(
        (len(before), height // block, width // block), torch.inf, dtype=clips.dtype, device=clips.device
    )
    found = torch.zeros(*best.shape, 2, dtype=torch.int64, device=clips.device)
    for down in range(-reach, reach + 1):
        for right in range(-reach, reach + 1):
            moved = around[:, :, reach + down :, reach + right :][..., :height, :width]
            cost = F.avg_pool2d((moved - before).abs().mean(1, keepdim=True), block)[:, 0]
            cost = cost + DISTANCE_COST * (down * down + right * right) ** 0.5
            better = cost < best
            best = torch.where(better, cost, best)
            found[better] = torch.tensor([down, right], dtype=torch.int64, device=clips.device)
    return found.view(count, frames - 1, *found.shape[1:])


def motion_error(
    clips: torch.Tensor, reference: torch.Tensor, *, block: int = BLOCK, reach: int = REACH
) -> torch.Tensor:
    """Return the mean distance in pixels between the motions of clips and reference.

    The mean is over blocks that move in either of them.

    Args:
        clips, reference: [N, T, C, H, W] floating point in [0, 1], same shape. Others: as for `motion`.
    Returns: [N] float64, pixels per frame; 0 if nothing moves.
    Raises: as `motion`, and ValueError for shapes that differ.
    """
    _check_pair(clips, reference, frames=2)
    ours, other = (motion(x, block=block, reach=reach).double() for x in (clips, reference.to(clips.device)))
    moves = (ours != 0).any(-1) | (other != 0).any(-1)
    distance = (ours - other).square().sum(-1).sqrt() * moves
    return distance.sum((1, 2, 3)) / moves.sum((1, 2, 3)).clamp(min=1)


def frame_features(clips: torch.Tensor, model: nn.Module | None = None, *, batch: int = 64) -> torch.Tensor:
    """Return the feature vector of every frame, for `distance_of_features(…, together=T)`.

    Args: clips: [N, T, 3, H, W] floating point in [0, 1]. model, batch: as for `feature_distance.features`.
    Returns: [N·T, D] float64 on the CPU, the frames of a clip one after the other. Raises: as `features`.
    """
    _check(clips, "clips", frames=1)
    return features(clips.flatten(0, 1), model, batch=batch)


def _check(clips: torch.Tensor, name: str, *, frames: int) -> None:
    if not isinstance(clips, torch.Tensor):
        raise TypeError(f"{name}: got {type(clips).__name__}, expected a torch.Tensor")
    if clips.dim() != 5:
        raise ValueError(
            f"{name}: got shape {tuple(clips.shape)}, expected [N, T, C, H, W]; use {name}[None] for one clip"
        )
    if clips.shape[1] < frames:
        raise ValueError(f"{name}: got {clips.shape[1]} frames, expected at least {frames} to see a change")
    metrics.check_images(clips.flatten(0, 1), name)


def _check_pair(clips: torch.Tensor, reference: torch.Tensor, *, frames: int = 1) -> None:
    _check(clips, "clips", frames=frames)
    _check(reference, "reference", frames=frames)
    if clips.shape != reference.shape:
        raise ValueError(f"clips: got shape {tuple(clips.shape)}, expected reference's {tuple(reference.shape)}")
