"""Tables and figures of clips for the notebook video.py, run by run.

A run is a pipeline at one size of clips on one device. Its numbers can't be compared with another run's, since stock
clips of another device are different clips.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import drawing
import measure
import picture_report
from picture_report import Row

from sage_processors.evaluation.metrics import Interval


class Run(NamedTuple):
    """Origin of numbers: pipeline with the size of clips, device, and denoising steps."""

    pipeline: str
    device: str
    steps: int

    def __str__(self) -> str:
        # as measure.load draws them
        return f"{self.pipeline} on {self.device} in {'fp32' if self.device == 'cpu' else 'bf16'}, {self.steps} steps"


Numbers = dict[tuple[str, str], Row]  # of a label and a metric


def by_run(table: Iterable[dict[str, str]]) -> dict[Run, dict[str, Numbers]]:
    """Return {run: {recipe or "stock": numbers}}, in the table's order. The last of equal keys counts."""
    found: dict[Run, dict[str, Numbers]] = {}
    for line in table:
        (row,) = measure.as_rows([line])
        own = found.setdefault(Run(line["pipeline"], line["device"], int(line["steps"])), {})
        own.setdefault(line["recipe"], {})[row.label, row.metric] = row
    return found


def recipes(own: dict[str, Numbers]) -> dict[str, list[Row]]:
    """Return the rows of every recipe of a run, with stock's row in front."""
    stock = list(own.get("stock", {}).values())
    return {recipe: [*stock, *numbers.values()] for recipe, numbers in own.items() if recipe != "stock"}


def shown(row: Row | None, digits: int, unit: float = 1.0) -> str:
    """Return "value [low, high]", each times `unit`.

    It is the value alone without an interval, and "–" for None.
    """
    if row is None:
        return "–"
    value, low, high = (f"{x * unit:.{digits}f}" for x in row.interval)
    return value if row.low == row.high else f"{value} [{low}, {high}]"


def compared(found: dict[Run, dict[str, Numbers]], metric: str):
    """Draw a figure of one metric: a panel per run, a line per scaling, a colour per recipe, error bars."""
    names = sorted({recipe for own in found.values() for recipe in own if recipe != "stock"})
    labels = {
        run: list(dict.fromkeys(label for recipe in names for label, of in own.get(recipe, {}) if of == metric))
        for run, own in found.items()
    }
    heights = [len(of_run) + 1 for of_run in labels.values()]
    figure, axes = drawing.figure(
        len(found), 1, width=8, height=1.2 + 0.36 * sum(heights), sharex=True, height_ratios=heights
    )
    for place, (run, own) in zip(axes.flat, found.items(), strict=True):
        for index, recipe in enumerate(names):
            rows = [(i, own.get(recipe, {}).get((label, metric))) for i, label in enumerate(labels[run])]
            here = [(i + 0.22 * (index - (len(names) - 1) / 2), row.interval) for i, row in rows if row]
            if here:
                points(place, [(value, Interval(at, at, at)) for at, value in here], recipe, drawing.style_of(index))
        place.set_yticks(range(len(labels[run])), labels[run])
        place.set_ylim(len(labels[run]) - 0.4, -0.6)
        clips = next(row.images for numbers in own.values() for row in numbers.values())
        place.set_title(f"{run}, {clips} clips", fontsize="medium")
    axes.flat[-1].set_xlabel(picture_report.title(metric))
    legend(figure)
    return figure


def points(axes, pairs: Sequence[tuple[Interval, Interval]], label: str, style: dict) -> None:
    """Draw markers at (x, y) with their intervals into matplotlib Axes."""
    spread = [[[c.value - c.low for c in ends], [c.high - c.value for c in ends]] for ends in zip(*pairs, strict=True)]
    (x, y) = ([c.value for c in ends] for ends in zip(*pairs, strict=True))
    axes.errorbar(x, y, xerr=spread[0], yerr=spread[1], ls="none", capsize=2, lw=1, label=label, **{"ms": 5, **style})


def legend(figure) -> None:
    """Draw one legend below all panels of a matplotlib Figure: every label once, three per line."""
    found: dict[str, object] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=min(len(found), 3))


def obedience(own: dict[str, Numbers]) -> str:
    """Return Markdown: the share of prompts that stock and each variant obey, and the difference."""
    stock = own["stock"]["stock", "obeyed_mean"]
    lines = []
    for recipe, numbers in own.items():
        for (label, metric), row in numbers.items():
            if metric == "obeyed_mean":
                points_off = "–" if row is stock else f"{100 * (row.value - stock.value):+.2f}"
                name = label if row is stock else f"{recipe}, {label}"
                lines.append([name, shown(row, 2, 100), points_off, str(row.images)])
    return picture_report.markdown_table(["drawn with", "prompts obeyed, %", "above stock, points", "clips"], lines)
