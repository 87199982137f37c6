"""Reproducible matplotlib figures, in colours for colour-blind readers and with units on the axes.

matplotlib is imported on first use. pyplot is not used: no window opens, and the caller's own figures are not changed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from sage_processors.evaluation.metrics import Interval, missing_package
from sage_processors.files.whole_file import write_whole
from sage_processors.installation import pip_install


# Okabe and Ito 2008, neighbours of different brightness; grey in place of their yellow, hard to see on white. Then
# four of Paul Tol's "muted", as a figure has up to eleven series
COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#8C8C8C"),
    *("#882255", "#999933", "#332288", "#DDCC77"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DPI = 100
PNG_COLORS = 96  # a palette makes the file a third of the size
_STYLE = {
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "sage-processors",
    "figure.facecolor": "white",
}


def figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 4.0, **options):
    """Return a matplotlib Figure and the array [rows, columns] of its Axes.

    width, height: inches. options: of Figure.subplots. Raises: ImportError without matplotlib.
    """
    with _style():
        from matplotlib.figure import Figure

        made = Figure(figsize=(width, height), layout="constrained")
        return made, made.subplots(rows, columns, squeeze=False, **options)


def save(made, path: str | Path, *, colors: int = PNG_COLORS) -> Path:
    """Write a figure as PNG or SVG, by the path's suffix, and return the path.

    colors: of a PNG, at most 256; more than PNG_COLORS for pictures with a colour scale.

    The file holds no date or version, so equal figures are equal files.
    Raises: ValueError for another suffix or a missing folder.
    """
    path = Path(path)
    metadata = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}.get(path.suffix)
    if metadata is None or not path.parent.is_dir():
        raise ValueError(f"path: got {str(path)!r}, expected a .png or .svg in a folder that exists")
    drawn = io.BytesIO()
    with _style():
        made.savefig(drawn, dpi=DPI, metadata=metadata, format=path.suffix[1:])
    if path.suffix == ".png":
        from PIL import Image  # matplotlib needs it too

        with Image.open(drawn) as image:
            small = image.convert("RGB").quantize(colors, dither=Image.Dither.NONE)
        drawn = io.BytesIO()
        small.save(drawn, format="png", optimize=True)
    write_whole(path, drawn.getvalue())
    return path


def style_of(index: int) -> dict:
    """Return colour and marker of a figure's index-th line. The first 96 lines all differ.

    Every other marker is hollow, so that a line that lies on another one still shows.
    """
    color, marker = COLORS[index % len(COLORS)], MARKERS[(index + index // len(COLORS)) % len(MARKERS)]
    return {"color": color, "marker": marker, "mfc": "none" if index % 2 else color}


def bars(axes, labels: Sequence[str], values: Sequence[Interval | float], *, unit: str, digits: int = 1) -> None:
    """Draw horizontal bars with their numbers, the first label on top, and error bars for Intervals.

    Args: axes: matplotlib Axes. values: as many as labels, at least one. unit: label of the axis.
    Raises: ValueError for unequal or no values.
    """
    if len(labels) != len(values) or not labels:
        raise ValueError(f"values: got {len(values)} for {len(labels)} labels, expected one each and at least one")
    whole = [v if isinstance(v, Interval) else Interval(v, v, v) for v in values]
    places = range(len(labels))
    axes.barh(places, [v.value for v in whole], color=COLORS[0], height=0.7)
    spread = [[v.value - v.low for v in whole], [v.high - v.value for v in whole]]
    axes.errorbar([v.value for v in whole], places, xerr=spread, fmt="none", ecolor="#333333", capsize=3, lw=1)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.grid(axis="y", visible=False)
    for place, v in zip(places, whole, strict=True):
        axes.annotate(
            f"{v.value:.{digits}f}",
            (v.high, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.margins(x=0.12)


def _style():
    try:
        import matplotlib
    except ImportError as error:
        raise missing_package("a figure", "matplotlib", pip_install("notebooks")) from error
    return matplotlib.rc_context(_STYLE)
