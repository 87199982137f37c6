"""Report of how far clips are from stock clips of the same seeds, as rows of a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from picture_report import PSNR_CEILING, Row, distance_row

from sage_processors.evaluation import videos
from sage_processors.evaluation.feature_distance import distance_of_features
from sage_processors.evaluation.metrics import mean_interval


@dataclass(frozen=True)
class Clips:
    """Distances of a set of clips to stock clips of the same seeds, and their features.

    Attributes:
        label: how they were drawn.
        psnr_db, ssim: fp64 [N, T], of each frame (dB, at most 120).
        flicker, frame_change, motion_error: fp64 [N], see the functions in videos.py.
        features: fp64 [N·T, 32], of the embedded classifier, the frames of a clip one after the other.
    """

    label: str
    psnr_db: torch.Tensor
    ssim: torch.Tensor
    flicker: torch.Tensor
    frame_change: torch.Tensor
    motion_error: torch.Tensor
    features: torch.Tensor

    @classmethod
    def measure(cls, label: str, clips: torch.Tensor, stock: torch.Tensor, model=None) -> Clips:
        """Compare clips [N, T, 3, H, W] in [0, 1], T at least 2, with stock clips of the same shape.

        model: a loaded classifier, or None to load it. Raises: TypeError, ValueError (also below 11 pixels).
        """
        return cls(
            label,
            videos.psnr(clips, stock).clamp(max=PSNR_CEILING).double().cpu(),
            videos.ssim(clips, stock).double().cpu(),
            videos.flicker(clips, stock).cpu(),
            videos.frame_change(clips).cpu(),
            videos.motion_error(clips, stock).cpu(),
            videos.frame_features(clips, model),
        )

    @classmethod
    def join(cls, parts: Sequence[Clips]) -> Clips:
        """Join sets with the same label and number of frames into one. Raises: ValueError."""
        if not parts or len({(part.label, part.psnr_db.shape[1]) for part in parts}) != 1:
            raise ValueError(
                f"parts: got {[p.label for p in parts]}, expected at least one, all of one label and length"
            )
        names = [field.name for field in dataclasses.fields(cls) if field.name != "label"]
        joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(parts[0], **joined)


def report(
    sets: Iterable[Clips],
    stock: torch.Tensor,
    stock_features: torch.Tensor,
    real_features: torch.Tensor | None = None,
) -> list[Row]:
    """Return all numbers of several sets of clips as rows.

    Args:
        sets: each with as many clips as stock.
        stock: `frame_change` of the stock clips, fp64 [N]. stock_features: fp64 [N·T, 32] of the stock clips.
        real_features: fp64 [M, 32] of frames of true clips; None: no feature-FD.
    Returns: first stock's own mean frame_change, and its standard deviation over clips. Then for each set the means
        over clips of psnr_db, ssim, flicker, frame_change_excess (over stock, paired) and motion_error, with 95 %
        intervals; the worst frame's psnr_db; feature_fd, and feature_fd_excess (over stock, paired, jackknife over
        clips).
    Raises: ValueError for a set with another number of clips than stock.
    """
    count = len(stock)
    together = len(stock_features) // count
    rows = [
        Row("stock", "frame_change_mean", "1", *mean_interval(stock), count),
        Row("stock", "frame_change_spread", "1", *(stock.std(correction=0).item(),) * 3, count),
    ]
    if real_features is not None:
        found = distance_of_features(stock_features, real_features, together=together)
        rows.append(distance_row("stock", found, count))
    for clips in sets:
        if len(clips.flicker) != count:
            raise ValueError(f"sets: got {len(clips.flicker)} clips of {clips.label!r}, expected stock's {count}")
        named = (
            ("psnr_db_mean", "dB", clips.psnr_db.mean(1)),
            ("ssim_mean", "1", clips.ssim.mean(1)),
            ("flicker_mean", "1", clips.flicker),
            ("frame_change_excess", "1", clips.frame_change - stock),
            ("motion_error_mean", "px", clips.motion_error),
        )
        rows += [Row(clips.label, name, unit, *mean_interval(values), count) for name, unit, values in named]
        worst = clips.psnr_db.min().item()
        rows.append(Row(clips.label, "psnr_db_worst", "dB", worst, worst, worst, count))
        if real_features is not None:
            found = distance_of_features(clips.features, real_features, stock_features, together=together)
            rows.append(distance_row(clips.label, found, count))
            if found.excess is not None:
                rows.append(Row(clips.label, "feature_fd_excess", "1", *found.excess, count))
    return rows
