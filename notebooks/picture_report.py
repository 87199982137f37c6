"""Tables and plots of how far pictures are from stock pictures of the same seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sage_processors.evaluation import metrics
from sage_processors.evaluation.feature_distance import distance_of_features, features
from sage_processors.evaluation.metrics import Interval, mean_interval


PSNR_CEILING = 120.0  # dB; without it, identical pictures would make every mean infinite


@dataclass(frozen=True)
class Pictures:
    """Distances of a set of pictures to stock pictures of the same seeds, and their features.

    Attributes:
        label: how they were drawn. psnr_db (dB, at most 120), ssim, ms_ssim: fp64 [N].
        features: fp64 [N, 32], of the embedded classifier. scales: of ms_ssim, 1 to 5.
    """

    label: str
    psnr_db: torch.Tensor
    ssim: torch.Tensor
    ms_ssim: torch.Tensor
    features: torch.Tensor
    scales: int

    @classmethod
    def measure(cls, label: str, images: torch.Tensor, stock: torch.Tensor, model=None) -> Pictures:
        """Compare images [N, 3, H, W] in [0, 1] with stock images of the same shape.

        MS-SSIM uses as many scales as fit. model: a loaded classifier, or None to load it. Raises: TypeError,
        ValueError (also below 11 pixels).
        """
        psnr = metrics.psnr(images, stock).clamp(max=PSNR_CEILING).double().cpu()
        ssim = metrics.ssim(images, stock).double().cpu()
        scales = metrics.ms_ssim_scales(*images.shape[-2:])
        ms_ssim = metrics.ms_ssim(images, stock, scales=scales).double().cpu()
        return cls(label, psnr, ssim, ms_ssim, features(images, model), scales)

    @classmethod
    def join(cls, parts: Sequence[Pictures]) -> Pictures:
        """Join sets with the same label and scales into one. Raises: ValueError."""
        if not parts or len({(part.label, part.scales) for part in parts}) != 1:
            raise ValueError(
                f"parts: got {[p.label for p in parts]}, expected at least one, all of one label and scales"
            )
        names = ("psnr_db", "ssim", "ms_ssim", "features")
        joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(parts[0], **joined)


class Row(NamedTuple):
    """One number of a report, with the ends of its 95 % interval, equal to it if there is none."""

    label: str
    metric: str
    unit: str
    value: float
    low: float
    high: float
    images: int

    @property
    def interval(self) -> Interval:
        """Value and ends as an Interval."""
        return Interval(self.value, self.low, self.high)


def report(
    sets: Iterable[Pictures], stock_features: torch.Tensor, real_features: torch.Tensor | None = None
) -> list[Row]:
    """Return all numbers of several picture sets as rows.

    Args:
        sets: each with as many pictures as stock.
        stock_features: fp64 [N, 32] of the stock pictures. real_features: fp64 [M, 32] of true pictures. Without them,
            or with no more pictures than features, there is no feature-FD: it would not be defined.
    Returns: first the feature_fd of "stock" itself. Then for each set the means over pictures of psnr_db, ssim and
        ms_ssim (bootstrap intervals), the worst psnr_db, feature_fd to the true pictures (jackknife interval), and
        feature_fd_excess over stock (paired).
    """
    rows = []
    real = real_features if len(stock_features) > stock_features.shape[1] else None
    if real is not None:
        rows.append(distance_row("stock", distance_of_features(stock_features, real)))
    for pictures in sets:
        count = len(pictures.psnr_db)
        named = (
            ("psnr_db_mean", "dB", pictures.psnr_db),
            ("ssim_mean", "1", pictures.ssim),
            (f"ms_ssim{pictures.scales}_mean", "1", pictures.ms_ssim),
        )
        rows += [Row(pictures.label, name, unit, *mean_interval(values), count) for name, unit, values in named]
        worst = pictures.psnr_db.min().item()
        rows.append(Row(pictures.label, "psnr_db_worst", "dB", worst, worst, worst, count))
        if real is not None:
            distance = distance_of_features(pictures.features, real, stock_features)
            rows.append(distance_row(pictures.label, distance))
            if distance.excess is not None:
                rows.append(Row(pictures.label, "feature_fd_excess", "1", *distance.excess, count))
    return rows


def distance_row(label: str, distance, count: int | None = None) -> Row:
    """Return a feature-FD as a row. count: for the column "pictures"; None: the vectors compared."""
    spread = 1.96 * distance.standard_error
    # with few pictures no group can be left out: the standard error is NaN, and there is no interval
    low, high = (distance.value - spread, distance.value + spread) if spread == spread else (distance.value,) * 2
    return Row(label, "feature_fd", "1", distance.value, low, high, distance.images if count is None else count)


TITLES = {
    "psnr_db_mean": "PSNR, dB",
    "psnr_db_worst": "worst PSNR, dB",
    "ssim_mean": "SSIM",
    "ms_ssim": "MS-SSIM",
    "flicker_mean": "flicker",
    "frame_change_mean": "change per frame",
    "frame_change_spread": "its deviation",
    "frame_change_excess": "change per frame above stock's",
    "motion_error_mean": "motion error, px",
    "obeyed_mean": "prompts obeyed",
    "feature_fd": "feature-FD to true pictures",
    "feature_fd_excess": "feature-FD above stock's",
}
_TWO = ("psnr_db_mean", "psnr_db_worst")
_FOUR = ("motion_error_mean", "obeyed_mean", "feature_fd", "feature_fd_excess")
DIGITS = {name: 2 if name in _TWO else 4 if name in _FOUR else 5 for name in TITLES}


def _kind(metric: str) -> str:
    return "ms_ssim" if metric.startswith("ms_ssim") else metric


def title(metric: str) -> str:
    """Return the heading of a metric's column, such as "MS-SSIM (4 scales)" for ms_ssim4_mean."""
    text = TITLES[_kind(metric)]
    return f"{text} ({metric.removeprefix('ms_ssim').removesuffix('_mean')} scales)" if text == "MS-SSIM" else text


def markdown(rows: Sequence[Row], counted: str = "pictures") -> str:
    """Return a Markdown table with a line per label and a column per metric.

    A cell is "value [low, high]", or the value alone if it has no interval. counted: heading of the last column, the
    number of pictures or clips.
    """
    columns = list(dict.fromkeys(row.metric for row in rows))
    columns.sort(key=lambda metric: list(TITLES).index(_kind(metric)))
    found = {(row.label, row.metric): row for row in rows}
    lines = []
    for label in dict.fromkeys(row.label for row in rows):
        cells = [_cell(found.get((label, metric))) for metric in columns]
        count = next(row.images for row in rows if row.label == label)
        lines.append([label, *cells, str(count)])
    return markdown_table(["drawn with", *map(title, columns), counted], lines)


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of texts. Raises: ValueError for a line of another length than the header."""
    lines = [header, ["---"] * len(header), *lines]
    if any(len(line) != len(header) for line in lines):
        raise ValueError(f"lines: got lengths {sorted({len(line) for line in lines})}, expected {len(header)} each")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    digits = DIGITS[_kind(row.metric)]
    if row.low == row.high:
        return f"{row.value:.{digits}f}"
    return f"{row.value:.{digits}f} [{row.low:.{digits}f}, {row.high:.{digits}f}]"


def plot(axes, rows: Sequence[Row], metric: str) -> None:
    """Draw a metric as bars with error bars into matplotlib Axes. Raises: ValueError without rows."""
    from drawing import bars

    chosen = [row for row in rows if row.metric == metric]
    if not chosen:
        raise ValueError(f"metric: got {metric!r}, expected one of {sorted({row.metric for row in rows})}")
    bars(
        axes, [row.label for row in chosen], [row.interval for row in chosen],
        unit=title(metric), digits=DIGITS[_kind(metric)],
    )  # fmt: skip
