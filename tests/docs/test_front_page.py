"""README's figures, read as a visitor reads them, against results.csv: each beside two kinds of stock, each named."""

from __future__ import annotations

import re

from sage_kernels.results import read_rows
from tests.support.repository import ROOT
from tools.headline import COUNTED_UP, FIGURES, STOCK


README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = read_rows(ROOT / "kernels" / "benchmarks" / "results.csv")
NUMBER = re.compile(r"([\d,]+(?:\.\d+)?) ([\w/]+)")
SAID = re.compile(r"(.+), ([\d,]+(?:\.\d+)? [\w/]+): (\d+\.\d\d)×(?: \((\d+\.\d\d)× in another run\))?")


def table(text: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table of figures."""
    section = text.partition("<!-- figures:begin -->")[2].partition("<!-- figures:end -->")[0]
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if "|" in line]
    return lines[0], lines[2:]


def value(said: str) -> float:
    return float(NUMBER.search(said)[1].replace(",", ""))


def problems(text: str, rows: list[dict[str, str]]) -> list[str]:
    """Return what is wrong with the table of figures."""
    header, lines = table(text)
    if [name for name in ("stock, called the same way", "fastest stock of the same run") if name not in header]:
        return ["a column of stock is missing"]
    found, words = [], {word: provider for provider, word in STOCK.items()}
    for (what, own, *cells), figure in zip(lines, FIGURES, strict=True):
        mine = [r for r in rows if (r["suite"], r["case"], r["metric"]) == (figure.suite, figure.case, figure.metric)]
        needed = [name for name in (figure.same_way, figure.beside) if name]
        runs = [{r["commit"] for r in mine if r["provider"] == name} for name in needed]
        own_rows = [r for r in mine if (r["provider"], r["recipe"]) == ("sage_kernels", figure.recipe)]
        ours = [r for r in own_rows if all(r["commit"] in run for run in runs)][-1]
        at = mine.index(ours)
        run = [r for r in mine[:at] if (r["commit"], r["gpu"]) == (ours["commit"], ours["gpu"])]
        stock = {r["provider"]: float(r["median"]) for r in run if r["provider"].startswith(("torch_", "stock_"))}
        more = figure.metric in COUNTED_UP
        best = (max if more else min)(stock.values())
        if what != figure.what or figure.number(float(ours["median"])) != own:
            found.append(f"{what}: {own} is not the newest row")
        for cell, wanted in zip(cells, (stock.get(figure.same_way), best), strict=True):
            name, number, ratio, worst = SAID.fullmatch(cell).groups()
            lowest = min(ratios_of_the_day(figure, mine, words[name], ours["date"], needed))
            if (worst is None) != (lowest >= 0.9 * float(ratio)) or (worst and abs(float(worst) - lowest) > 0.0051):
                found.append(f"{what}: worst run {worst}, expected {lowest:.3f}")
            if number != figure.number(wanted) or stock[words[name]] != wanted:
                found.append(f"{what}: {cell}, expected {figure.number(wanted)}")
            exact = float(ours["median"]) / wanted if more else wanted / float(ours["median"])
            if abs(float(ratio) - exact) > 0.0051:
                found.append(f"{what}: {ratio}, expected {exact:.3f}")
    return found


def ratios_of_the_day(figure, rows, name: str, date: str, needed: list[str]) -> list[float]:
    """Return the ratios to a stock of all runs of a day that have all that the figure must stand beside."""
    ratios = []
    for at, row in enumerate(rows):
        if (row["provider"], row["recipe"], row["date"]) == ("sage_kernels", figure.recipe, date):
            run = [r for r in rows[:at] if (r["commit"], r["gpu"]) == (row["commit"], row["gpu"])]
            stock = {r["provider"]: float(r["median"]) for r in run}
            if {name, *needed} <= stock.keys():
                pair = float(row["median"]), stock[name]
                ratios.append(pair[0] / pair[1] if figure.metric in COUNTED_UP else pair[1] / pair[0])
    return ratios


def test_every_figure_stands_beside_the_fastest_stock_of_its_run():
    assert not problems(README, ROWS)
