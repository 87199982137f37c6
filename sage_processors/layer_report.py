"""What the reports of both sides share: rows, one per attention layer, their totals and how they are printed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# What a comparison says instead of numbers: pictures that stock attention drew twice are the same.
NOTHING_RAN = "no call ran in INT8"


@dataclass
class LayerReport:
    """What really ran in a model.

    Attributes:
        rows: one dict per layer, with at least the keys "calls" (INT8) and "fallbacks" ({reason: exact calls}).
        notes: about the model as a whole.
        linears: the same of the model's linear layers; None without 8-bit ones.
    """

    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    linears: LayerReport | None = None

    @property
    def calls(self) -> int:
        """All INT8 calls."""
        return sum(row["calls"] for row in self.rows)

    @property
    def fallbacks(self) -> dict[str, int]:
        """All exact calls by reason."""
        total: dict[str, int] = {}
        for row in self.rows:
            for reason, number in row["fallbacks"].items():
                total[reason] = total.get(reason, 0) + number
        return total

    def table(self) -> Table:
        """The rows as a rich.table.Table."""
        raise NotImplementedError

    def print(self, console: Console | None = None) -> None:
        """Print the table with rich, to `console` or the terminal."""
        from rich.console import Console

        console = console or Console()
        console.print(self.table())
        for note in self.notes:
            console.print(note, markup=False)
        if self.linears is not None:
            self.linears.print(console)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160, color_system=None, force_terminal=False)
        with console.capture() as capture:
            self.print(console)
        return capture.get()


def empty_table() -> Table:
    """A rich.table.Table to be filled by a report."""
    from rich.table import Table

    return Table(title="INT8 attention: what really ran", title_justify="left")


def ratios(signal: float, noise: float) -> dict[str, Any]:
    """What a probe says of two sums of squares: themselves, sqnr_db (+inf without noise), rel_l2."""
    if noise == 0:
        sqnr, relative = math.inf, 0.0
    else:
        sqnr = 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf
        relative = math.sqrt(noise / signal) if signal > 0 else math.inf
    return {"signal": signal, "noise": noise, "sqnr_db": sqnr, "rel_l2": relative}


def reasons(fallbacks: dict[str, int]) -> str:
    """{reason: exact calls} in a cell of the table."""
    return ", ".join(f"{reason} {number}" for reason, number in fallbacks.items()) or "0"
