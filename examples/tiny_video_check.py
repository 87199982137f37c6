"""Check that a clip shows its caption: colours, direction of motion and outline, all from the pixels.

Nothing here is learnt: on drawn clips the answers are right (tests/pipelines/test_tiny_wan.py says how often), so a
wrong one is the clip's fault.
"""

from __future__ import annotations

import functools
import math

import tiny_videos
import torch
import torch.nn.functional as F


LEAST_AREA = 0.012  # of the picture: a shape; anything smaller is an edge where two colours mix to a third
STILL_EXTENT = 0.16  # how far a centre moves that stands still, where the picture spans [-1, 1]
TURNED = 0.82  # intersection over union of two masks below which a shape that stands still has turned
LOOKS = 5  # frames in which the outline is compared
TILTS = 24  # of an outline, over the whole circle
GRID, REACH = 40, 1.2  # points a side and half a side of the grid on which outlines of area 1 are compared


def nearest_color(clips: torch.Tensor) -> torch.Tensor:
    """Index into tiny_videos.GROUNDS of each pixel's nearest colour: [B, 3, T, H, W] in [-1, 1] -> [B, T, H, W]."""
    rgb = (clips.float() + 1) * 127.5
    palette = tiny_videos.PALETTE.to(clips.device)
    return torch.stack([(rgb - c[:, None, None, None]).square().sum(1) for c in palette]).argmin(0)


def obeyed(clips: torch.Tensor, scene: tiny_videos.Scene) -> dict[str, list[bool]]:
    """Compare clips [B, 3, T, H, W] in [-1, 1], T >= 3, with what they should show.

    Returns bool lists per clip: `color` (of all but background and bar the most frequent one is the shape's), `ground`
    (the most frequent of all is the background's; true where it was not said), `shape` (of all outlines the prompt's
    fits best), `motion`, and `all` of these.
    """
    clips, scene = clips.detach().cpu(), scene.to("cpu")
    nearest = nearest_color(clips)
    batch, colors = len(clips), len(tiny_videos.GROUNDS)
    area = torch.stack([(nearest == c).float().mean((1, 2, 3)) for c in range(colors)], 1)  # [B, colors]
    ground = area.argmax(1)
    others = area.scatter(1, ground[:, None], 0)
    hidden = (scene.bar - 1).clamp(min=0)[:, None]
    others = torch.where(scene.bar[:, None] > 0, others.scatter(1, hidden, 0), others)
    found = others.argmax(1)
    answers: dict[str, list[bool]] = {
        "color": ((found == scene.color) & (others.amax(1) > LEAST_AREA)).tolist(),
        "ground": ((ground == scene.said - 1) | (scene.said == 0)).tolist(),
        "shape": [],
        "motion": [],
    }
    for row in range(batch):
        mask = nearest[row] == scene.color[row]
        answers["shape"].append(outline(mask) == scene.shape[row].item())
        answers["motion"].append(motion(mask) == scene.motion[row].item())
    answers["all"] = [all(row) for row in zip(*answers.values(), strict=True)]
    return answers


def motion(mask: torch.Tensor) -> int | None:
    """Index into tiny_videos.MOTIONS of what a shape does, from its mask, bool [T, H, W]; None: none of them."""
    area = mask.float().mean((1, 2))
    seen = area > max(0.3 * area.max().item(), 0.25 * LEAST_AREA)
    if int(seen.sum()) < 3:
        return None
    shown = mask[seen].float()
    axis = (torch.arange(mask.shape[-1], dtype=torch.float32) + 0.5) * (2 / mask.shape[-1]) - 1
    weight = shown.sum((1, 2))
    track = torch.stack([(shown.sum(1) * axis).sum(1), (shown.sum(2) * axis).sum(1)], 1) / weight[:, None]  # x, y
    extent = (track.amax(0) - track.amin(0)).amax().item()
    if extent < STILL_EXTENT:
        both = (mask & mask[0]).sum((1, 2)) / (mask | mask[0]).sum((1, 2)).clamp(min=1)
        return tiny_videos.ROTATING if both.amin() < TURNED else tiny_videos.STILL
    way = track[-1] - track[0]
    path = (track[1:] - track[:-1]).norm(dim=1).sum()
    if way.norm() < 0.7 * path:
        return tiny_videos.BOUNCING
    along = way.abs().argmax().item()
    if way[along].abs() < 2.5 * way[1 - along].abs() or way.norm() < 0.3:
        return None
    sign = 1 if way[along] > 0 else -1
    return tiny_videos.DIRECTIONS.index((sign, 0) if along == 0 else (0, sign))


def outline(mask: torch.Tensor) -> int | None:
    """Index into tiny_videos.SHAPES of the outline that fits masks bool [T, H, W] best, over all tilts; None: none."""
    area = mask.float().mean((1, 2))
    whole = torch.nonzero(area > max(0.85 * area.max().item(), LEAST_AREA)).flatten()
    if len(whole) == 0:
        return None
    picked = mask[whole[:: max(1, -(-len(whole) // LOOKS))]]  # evenly over the clip, LOOKS at most
    fits = _fits(picked).mean(0)
    return int(fits.argmax()) if fits.amax() > 0.6 else None


@functools.lru_cache
def _outlines() -> torch.Tensor:
    """Every shape at every tilt, its area 1 and its centroid in the middle of a grid, bool [shapes · TILTS, GRID²]."""
    shapes = len(tiny_videos.SHAPES)
    which = torch.arange(shapes).repeat_interleave(TILTS)[:, None, None]
    tilt = (torch.arange(TILTS) * (2 * math.pi / TILTS)).repeat(shapes)[:, None, None]
    one = torch.ones_like(tilt)
    axis = torch.linspace(-1.1, 1.1, 111)
    y, x = axis[None, :, None], axis[None, None, :]
    inside = (tiny_videos.signed_distance(which, x, y, 0.0, 0.0, one, tilt) < 0).float()
    weight = inside.sum((1, 2), keepdim=True)
    radius = 1 / (weight.sqrt() * (axis[1] - axis[0]))
    center_x, center_y = ((inside * z).sum((1, 2), keepdim=True) / weight * radius for z in (x, y))
    axis = torch.linspace(-REACH, REACH, GRID)
    y, x = axis[None, :, None], axis[None, None, :]
    return (tiny_videos.signed_distance(which, x, y, -center_x, -center_y, radius, tilt) < 0).flatten(1)


def _fits(masks: torch.Tensor) -> torch.Tensor:
    """Best intersection over union of masks [N, H, W] with each shape of their area and centroid, [N, shapes]."""
    count, height, width = masks.shape
    masks = masks.float()
    y, x = ((torch.arange(n, dtype=torch.float32) + 0.5) * (2 / n) - 1 for n in (height, width))
    weight = masks.sum((1, 2))
    center = torch.stack([(masks.sum(1) * x).sum(1), (masks.sum(2) * y).sum(1)], 1) / weight[:, None]
    side = (weight * 4 / (height * width)).sqrt()  # of a square of the same area
    axis = torch.linspace(-REACH, REACH, GRID)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1) * side[:, None, None, None]
    moved = F.grid_sample(masks[:, None], grid + center[:, None, None], align_corners=False) > 0.5
    found, outlines = moved.flatten(1).float(), _outlines().float()
    both = found @ outlines.T
    union = found.sum(1, keepdim=True) + outlines.sum(1) - both
    return (both / union).view(count, len(tiny_videos.SHAPES), TILTS).amax(2)
