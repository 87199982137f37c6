"""Table, figure and sentences on skipped key tiles for the notebook video.py.

The table is that of measure_skipping.py. "dense" is INT8 without skipping: the cost of skipping is relative to it.
Runs are those of clip_tables.py. The run of the same clips with prompts that change has a name that ends in
"_switched".
"""

from __future__ import annotations

import drawing
import picture_report
from clip_tables import Numbers, Run, legend, points, shown
from picture_report import Row

from sage_processors.evaluation.metrics import Interval


DENSE, CALIBRATED, SWITCHED = "dense", "calibrated", "_switched"
SHARE = "key tiles left out, %"
FREE = 1.0  # dB: a loss that a reader may call none


def loss(numbers: Numbers, label: str) -> float:
    """Return the mean PSNR of dense minus that of `label`, dB."""
    return numbers[DENSE, "psnr_db_mean"].value - numbers[label, "psnr_db_mean"].value


def steady_of(run: Run) -> Run:
    """Return the run of the same clips with prompts that stay the same."""
    return run._replace(pipeline=run.pipeline.removesuffix(SWITCHED))


def variants(numbers: Numbers) -> list[str]:
    """Return the labels with a share of skipped tiles, in the table's order."""
    return list(dict.fromkeys(label for label, metric in numbers if metric == "skipped_mean"))


def table(numbers: Numbers) -> str:
    """Return Markdown with a line per variant of a run.

    Rows "promised_…" are not in it, as they are of other clips.
    """
    lines = []
    for label in variants(numbers):
        row = {metric: found for (of, metric), found in numbers.items() if of == label}
        shares = [shown(row[name], 1, 100) for name in ("skipped_mean", "lost_max")]
        quality = [shown(row["psnr_db_mean"], 2), f"{loss(numbers, label):.2f}", shown(row["flicker_mean"], 5)]
        obeyed = shown(row.get("obeyed_mean"), 1, 100)
        lines.append([label, *shares, *quality, obeyed, str(row["skipped_mean"].images)])
    header = ["drawn with", SHARE, "most that a row would lose, %", "PSNR, dB", "less than dense, dB", "flicker"]
    return picture_report.markdown_table([*header, "prompts obeyed, %", "clips"], lines)


def figure(found: dict[Run, Numbers], stock: dict[Run, Numbers], loss_db: float):
    """Draw PSNR, flicker and obeyed prompts over the skipped share, with a colour per run.

    A star is calibrate's choice.

    stock: stock's numbers of each run. loss_db: PSNR that calibrate was allowed to lose against dense.
    """
    panels = (
        ("psnr_db_mean", "PSNR, dB", 1),
        ("flicker_mean", "flicker", 1),
        ("obeyed_mean", "of prompts that stay, obeyed, %", 100),
    )
    made, axes = drawing.figure(1, len(panels), width=12, height=4.4)
    # one title for both kinds of prompts; lines say which device they are of where there are several
    made.suptitle("; ".join(dict.fromkeys(str(steady_of(run)) for run in found)), fontsize="medium")
    several = len({run.device for run in found}) > 1
    for place, (metric, title, unit) in zip(axes.flat, panels, strict=True):
        for index, (run, numbers) in enumerate(found.items()):
            pairs = {
                label: (_times(numbers[label, "skipped_mean"], 100), _times(numbers[label, metric], unit))
                for label in variants(numbers)
                if (label, metric) in numbers
            }
            name = "prompts that stay" if run == steady_of(run) else "prompts that change"
            name += f", {run.device}" * several
            special = pairs.pop(CALIBRATED, None)
            if pairs:
                points(place, list(pairs.values()), name, drawing.style_of(index))
            if special:
                star = {"marker": "*", "ms": 12, "mec": "black", "mew": 0.6, "zorder": 4}
                points(place, [special], f"{name}, calibrated", {"color": drawing.COLORS[index]} | star)
            if ("stock", metric) in stock[run]:
                place.axhline(unit * stock[run]["stock", metric].value, color="#8C8C8C", ls="--", label="stock")
            if metric == "psnr_db_mean" and (CALIBRATED, "promised_psnr_db") in numbers:
                budget = numbers[DENSE, metric].value - loss_db
                place.axhline(budget, color="#8C8C8C", ls=":", label="what calibrate was asked for")
        place.set(xlabel=SHARE, ylabel=title)
    legend(made)
    return made


def _times(row: Row, unit: float) -> Interval:
    return Interval(*(unit * x for x in row.interval))


def sentences(steady: Numbers, changed: Numbers, stock: Numbers, loss_db: float, listed: float) -> list[str]:
    """Describe the numbers in words.

    Args: steady, changed: of the same clips, with prompts that stay and that change. stock: of those that stay.
        loss_db: what calibrate was allowed to lose against dense. listed: share of the steps that have lists.
    """

    def both(label: str, numbers: Numbers) -> str:
        return f"{100 * numbers[label, 'skipped_mean'].value:.1f} % left out for {loss(numbers, label):.2f} dB"

    limits = [label for label in variants(steady) if label not in (DENSE, CALIBRATED)]
    free = [label for label in limits if loss(steady, label) < FREE]
    most = max(free, key=lambda label: steady[label, "skipped_mean"].value, default=None)
    found = [
        f"No single limit costs less than {FREE:g} dB against dense."
        if most is None
        else f"Of single limits that cost less than {FREE:g} dB against dense, `{most}` leaves out most: "
        f"{both(most, steady)}, and {both(most, changed)} where prompts change.",
        f"What calibrate found: {both(CALIBRATED, steady)}, and {both(CALIBRATED, changed)} where prompts change.",
    ]
    psnr, promised = steady[CALIBRATED, "psnr_db_mean"], steady[CALIBRATED, "promised_psnr_db"]
    budget, off = steady[DENSE, "psnr_db_mean"].value - loss_db, psnr.value - promised.value
    found.append(
        f"It was asked for {budget:.2f} dB, {loss_db:g} less than dense, and promised {promised.value:.2f} dB by "
        f"{promised.images} clips of fresh prompts. On these {psnr.images} clips it is {shown(psnr, 2)} dB, "
        f"{abs(off):.2f} dB {'above' if off > 0 else 'below'} the promise."
    )
    share, whole = (steady[CALIBRATED, name].value for name in ("skipped_mean", "promised_skipped"))
    found.append(
        f"It promised {100 * whole:.1f} % of the pairs of tiles of all calls. Here {100 * share:.1f} % of those of "
        f"calls with lists were left out; lists are there in {100 * listed:.0f} % of the steps, so that this is "
        f"{100 * share * listed:.1f} % of all."
    )
    more = {label: loss(changed, label) - loss(steady, label) for label in (*limits, CALIBRATED)}
    worst = max(more, key=lambda label: more[label])
    found.append(f"Prompts that change add at most {more[worst]:.2f} dB to what leaving out costs (`{worst}`).")
    lost = [max(numbers[label, "lost_max"].value for label in variants(numbers)) for numbers in (steady, changed)]
    found.append(
        f"The most that a row would have lost by a list of earlier steps, found when it was measured anew, is "
        f"{100 * lost[0]:.0f} % of its probability, and {100 * lost[1]:.0f} % where prompts change."
    )
    obeyed = stock["stock", "obeyed_mean"]
    width = 100 * (obeyed.high - obeyed.low)
    most_off = max(abs(steady[label, "obeyed_mean"].value - obeyed.value) for label in variants(steady))
    found.append(
        f"Of {obeyed.images} prompts stock obeys {obeyed.value * obeyed.images:.0f}, and no variant differs by more "
        f"than {most_off * obeyed.images:.0f}; the interval of so few is {width:.0f} points wide."
    )
    return found
