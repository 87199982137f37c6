"""kernels/NOTES.md: every number that was found is that of a row of results.csv. And the maths stay short."""

from __future__ import annotations

import re
from functools import cache

from sage_kernels.results import read_rows
from tests.support.repository import ROOT


NOTES = ROOT / "kernels" / "NOTES.md"
ROW = re.compile(r"`([0-9a-f]{7,8}) ([^`]+)`")
NUMBER = re.compile(r"(?<![\w.,-])\d+(?:\.\d+)?(?![\w,]|\.\d)")


@cache
def rows_by_commit_and_case() -> dict[tuple[str, str], list[dict[str, str]]]:
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in read_rows(ROOT / "kernels" / "benchmarks" / "results.csv"):
        found.setdefault((row["commit"], row["case"]), []).append(row)
    return found


def findings() -> list[tuple[str, str, str]]:
    """(question, found, rows) of every table that has these columns."""
    lines, header = [], None
    for line in NOTES.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None or set(cells) == {"---"}:
            header = header if cells else None
        elif header is None:
            header = cells
        elif {"found", "rows"} <= set(header):
            assert len(cells) == len(header), line
            lines.append((cells[0], cells[header.index("found")], cells[header.index("rows")]))
    return lines


def test_numbers_that_were_found_are_in_rows():
    for question, found, cited in findings():
        rows = []
        for commit, case in ROW.findall(cited):
            assert (commit, case) in rows_by_commit_and_case(), f"{question}: no row {commit} {case}"
            rows += rows_by_commit_and_case()[commit, case]
        measured = re.sub(r"`[^`]*`|²", "", found)
        assert "%" not in measured, f"{question}: a share is no number of a row: give both numbers"
        values = [float(row[name]) for row in rows for name in ("median", "ratio_vs_cudnn") if row[name]]
        for number in (number for number in NUMBER.findall(measured) if "." in number):
            digits = len(number.split(".")[1])
            assert any(f"{value:.{digits}f}" == number for value in values), f"{question}: {number} is in no row"


def test_the_notes_have_findings_with_rows():
    found = findings()
    assert len(found) > 60 and sum(bool(ROW.search(rows)) for _, _, rows in found) > 40


def test_the_maths_stay_short_and_no_diary():
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 3000
    commits = {commit for commit, _ in rows_by_commit_and_case()}
    assert not commits & set(re.findall(r"\b[0-9a-f]{7}\b", text)) and "saved nowhere" not in text
    assert "saved nowhere" not in NOTES.read_text(encoding="utf-8")
