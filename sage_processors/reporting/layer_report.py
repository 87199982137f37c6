"""Base of all reports: one row per layer, totals, a verdict, and printing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..files.strict_json import plain_data
from .layer_names import common_prefix, patterns


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# Shown by comparisons instead of numbers: without INT8 calls both pictures come from stock attention.
NOTHING_RAN = "no call ran in INT8"
# Reason of calls that another processor ran. Nobody knows how they ran.
UNKNOWN = "replaced"

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Column:
    """A column of a report's table.

    Attributes: header. line: function from the rows of one line to its text. total: function from all rows to the
        text of the last line.
    """

    header: str
    line: Callable[[Rows], str]
    total: Callable[[Rows], str] = lambda rows: ""


@dataclass
class LayerReport:
    """Report of the calls of a model's layers.

    Printed, it begins with a verdict in words, and equal layers share a line.

    Attributes:
        rows: one dict per layer, with at least the keys "layer", "status", "note", "calls" (INT8) and "fallbacks"
            ({reason: calls that ran in 16 bit}).
        notes: list of texts about the model as a whole.
        linears: report of the model's linear layers; None without 8-bit ones.
        heading: line before the verdict: the preset and what differs from it; "" without a preset.
    """

    rows: Rows
    notes: list[str] = field(default_factory=list)
    linears: LayerReport | None = None
    heading: str = ""

    @property
    def calls(self) -> int:
        """Number of INT8 calls in all layers."""
        return sum(row["calls"] for row in self.rows)

    @property
    def ran(self) -> int:
        """Number of calls in 8 bit of every kind."""
        return self.calls

    @property
    def fallbacks(self) -> dict[str, int]:
        """{reason: calls that ran in 16 bit} over all layers."""
        return total_fallbacks(self.rows)

    @property
    def verdict(self) -> str:
        """Return a summary in one line: "72 % of attention calls in INT8 (80 of 111); 16 bit: short 31"."""
        idle = (row for row in self.rows if not row["calls"] and not row["fallbacks"])
        unseen = counts(row["status"] for row in idle if row["status"] != "active")
        said = share("attention calls", "INT8", self.calls, self.fallbacks)
        return "; ".join([said] + [f"not counted: {unseen}"] * bool(unseen))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON: heading, verdict, calls, fallbacks, rows, notes, linears.

        Every layer has its own row. Numbers that are not finite become None, such as the relative error of a layer
        with an output of 0.
        """
        linears = None if self.linears is None else self.linears.as_dict()
        said = {"heading": self.heading, "verdict": self.verdict, "calls": self.calls, "fallbacks": self.fallbacks}
        data: dict[str, Any] = plain_data(said | {"rows": self.rows, "notes": self.notes})
        return data | {"linears": linears}

    def title(self, what: str) -> str:
        """Return the title of the table of calls; before any call, that of the swapped layers."""
        ran = self.calls or self.fallbacks or any(row.get("compiled_calls") for row in self.rows)
        return f"{what}: {'what really ran' if ran else 'what is swapped; nothing ran yet'}"

    def table(self) -> Table:
        """Return a rich.table.Table with one line for all layers of equal calls, formats and reasons."""
        raise NotImplementedError

    def remarks(self) -> list[str]:
        """Return the notes of the rows, each once, with the layers concerned."""
        return [_remark(note, rows, self.rows) for note, rows in _by(self.rows, lambda row: row["note"]) if note]

    def print(self, console: Console | None = None) -> None:
        """Print verdict, table and notes with rich, to `console` or the terminal."""
        from rich.console import Console

        console = console or Console()
        # In a terminal, rich breaks long lines between words. A file or a pipe has no width to break at.
        options: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": not console.is_terminal}
        reports = [self] if self.linears is None else [self, self.linears]
        if self.heading:
            console.print(self.heading, **options)
        for report in reports:
            console.print(report.verdict, **options)
        for report in reports:
            console.print()
            console.print(report.table())
            for line in (*report.remarks(), *report.notes):
                console.print(line, **options)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None, force_terminal=False)
        with console.capture() as capture:
            self.print(console)
        return capture.get()


def share(what: str, how: str, ran: int, others: dict[str, int]) -> str:
    """Return the verdict: "72 % of `what` in `how` (80 of 111); 16 bit: short 31".

    Says first that nothing ran if that is so.
    Args: ran: number of calls in `how`. others: {reason: other calls}.
    """
    every = ran + sum(others.values())
    if not every:
        return f"Nothing ran: no {what} counted"
    percent = f"{100 * ran / every:.0f}"
    if ran < every and percent == "100":
        percent = "over 99"
    first = f"{percent if percent != '0' else 'under 1'} % of {what} in {how} ({ran} of {every})"
    in_16bit = {reason: number for reason, number in others.items() if reason != UNKNOWN}
    said = [first if ran else f"Nothing ran in {how}: 0 of {every} {what}"]
    said += [f"16 bit: {reasons(in_16bit)}"] * bool(in_16bit)
    if others.get(UNKNOWN):
        said.append(f"by other processors: {others[UNKNOWN]}")
    return "; ".join(said)


def grouped_table(title: str, rows: Rows, kind: Callable[[dict[str, Any]], str], columns: list[Column]) -> Table:
    """Make a rich.table.Table with one line for all equal layers, for 80 columns.

    Layers of the same kind, calls and reasons share a line, with patterns as names. The common prefix of all names,
    and a kind that all layers have, stand above the lines.
    Args: kind: function from a row to words for its status and format.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    prefix = common_prefix([row["layer"] for row in rows])
    kinds = list(dict.fromkeys(kind(row) for row in rows))
    letters = {name: f"{chr(ord('a') + i % 26)}{i // 26 or ''}" for i, name in enumerate(kinds)}
    for name, letter in letters.items():
        said = counts([name for row in rows if kind(row) == name])
        title += f"\n{letter}: {said}" if len(kinds) > 1 else f"\n{said}"
    widest = min(80, max(map(len, title.splitlines())))
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), min_width=widest)
    table.show_edge = table.pad_edge = False
    table.add_column(Name(f"layers of {prefix}" if prefix else "layers"))  # wraps in a table that is too wide
    if len(kinds) > 1:
        table.add_column("", no_wrap=True)
    for column in columns:
        side: Any = "left" if column.header.startswith("16 bit") else "right"
        table.add_column(column.header, justify=side, no_wrap=True)
    for pattern, same in lines(rows, kind):
        which = [letters[kind(same[0])]] * (len(kinds) > 1)
        table.add_row(Name(pattern.removeprefix(f"{prefix}.")), *which, *(column.line(same) for column in columns))
    table.add_section()
    table.add_row("total", *[""] * (len(kinds) > 1), *(column.total(rows) for column in columns))
    return table


def lines(rows: Rows, kind: Callable[[dict[str, Any]], str]) -> list[tuple[str, Rows]]:
    """Group rows of equal kind, calls and reasons into (pattern, rows), in the order of the model."""
    found, place = [], {row["layer"]: i for i, row in reversed(list(enumerate(rows)))}
    for _, same in _by(rows, lambda row: (kind(row), row["calls"], tuple(sorted(row["fallbacks"].items())))):
        by_name: dict[str, Rows] = {}
        for row in same:
            by_name.setdefault(row["layer"], []).append(row)
        for pattern, names in patterns(by_name).items():
            found.append((pattern, [row for name in names for row in by_name[name]]))
    return sorted(found, key=lambda line: min(place[row["layer"]] for row in line[1]))


def _by(rows: Rows, key: Callable[[dict[str, Any]], Any]) -> list[tuple[Any, Rows]]:
    together: dict[Any, Rows] = {}
    for row in rows:
        together.setdefault(key(row), []).append(row)
    return list(together.items())


def _remark(text: str, some: Rows, every: Rows, listed: int = 3) -> str:
    """Return `text` with the layers concerned. listed: most patterns to name."""
    if len(some) == len(every):
        return f"{text} (all {len(every)} layers)"
    prefix = common_prefix([row["layer"] for row in every])
    names = [name.removeprefix(f"{prefix}.") for name in patterns(row["layer"] for row in some)]
    more = [f"and {len(names) - listed} more"] * (len(names) > listed)
    return f"{text} ({len(some)} of {len(every)} layers: {', '.join(names[:listed] + more)})"


def remark_of(text: str, rows: Rows, name: str) -> list[str]:
    """Return [one line on the rows with a non-zero `name`], such as "up to 0.5 of …"; [] without any."""
    some = [row for row in rows if row[name]]
    return [_remark(f"up to {max(row[name] for row in some):.2g} {text}", some, rows)] if some else []


def counts(words: Iterable[str]) -> str:
    """Count words, one per layer: "5 layers protected, 1 layer kept"."""
    numbers: dict[str, int] = {}
    for word in words:
        numbers[word] = numbers.get(word, 0) + 1
    return ", ".join(f"{number} layer{'s' * (number > 1)} {word}" for word, number in numbers.items())


def total_fallbacks(rows: Rows) -> dict[str, int]:
    """Return {reason: calls that ran in 16 bit} over all rows."""
    total: dict[str, int] = {}
    for row in rows:
        for reason, number in row["fallbacks"].items():
            total[reason] = total.get(reason, 0) + number
    return total


def span(rows: Rows, name: str) -> str:
    """Return the value of `name` in these rows, or the range of values: "1-1.5"."""
    texts = [f"{pick(row[name] for row in rows):.4g}" for pick in (min, max)]
    return "-".join(dict.fromkeys(texts))


def summed(name: str) -> Callable[[Rows], str]:
    """Return the function for a column's total: the sum of `name` over all layers."""
    return lambda rows: f"{round(sum(row[name] for row in rows), 1):.15g}"


def column_16bit() -> Column:
    """Return the column of calls that ran in 16 bit, with one reason below the other."""
    return Column(
        "16 bit\neach",
        lambda rows: reasons(rows[0]["fallbacks"], "\n"),
        lambda rows: reasons(total_fallbacks(rows), "\n"),
    )


class Name:
    """A layer's name in a table; breaks at dots and commas if it is too wide."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _pieces(self, width: int) -> list[str]:
        whole = re.findall(r".+?(?:,|\.(?!\d)|$)", self.text)  # a list and its numbers stay together if they fit
        return [
            part for piece in whole for part in (re.findall(r"[^.]*\.?", piece) if len(piece) > width else [piece])
        ]

    def __rich_measure__(self, console: Any, options: Any) -> Any:
        from rich.measure import Measurement

        widest = max(map(len, self._pieces(options.max_width))) + 2
        return Measurement(min(widest, len(self.text)), len(self.text)).clamp(max_width=options.max_width)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        folded = [""]
        for piece in self._pieces(options.max_width - 2):
            if folded[-1].strip() and len(folded[-1]) + len(piece) > options.max_width:
                folded.append("  ")
            folded[-1] += piece
        yield Text("\n".join(folded), overflow="fold")


def ratios(signal: float, noise: float) -> dict[str, Any]:
    """Return the error measures of two sums of squares, of a signal and of its error.

    Keys: signal, noise, sqnr_db (+inf without noise), rel_l2.
    """
    if noise == 0:
        sqnr, relative = math.inf, 0.0
    else:
        sqnr = 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf
        relative = math.sqrt(noise / signal) if signal > 0 else math.inf
    return {"signal": signal, "noise": noise, "sqnr_db": sqnr, "rel_l2": relative}


def reasons(fallbacks: dict[str, int], between: str = ", ") -> str:
    """Return {reason: calls} in words: "short 31, window 2"; "0" without any."""
    return between.join(f"{reason} {number}" for reason, number in fallbacks.items()) or "0"
