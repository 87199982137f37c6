"""Every row of docs/compatibility.md has a test that found its state, and the page says what the outcomes say."""

from __future__ import annotations

import ast

import pytest

from tests.project import compatibility_table
from tests.project.case_table import case_ids, cases, read_outcomes
from tests.project.compatibility_table import PAGE, SECTIONS, STATES, page
from tests.support.combinations import STATES as FOUND
from tests.support.repository import ROOT


ROWS = [row for row in cases() if "state" in row]


@pytest.fixture(scope="module")
def tests() -> dict[str, set[str]]:
    """{case: names of what its tests ask for}."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for case in case_ids(node.name):
                    found.setdefault(case, set()).update(argument.arg for argument in node.args.args)
    return found


def test_no_combination_is_untested(tests):
    assert len(ROWS) >= 30 and {row["state"] for row in ROWS} == set(STATES) == set(FOUND)
    for row in ROWS:
        shown_by = [case for case in row.get("shown_by", []) if case in tests]
        assert len(shown_by) == len(row.get("shown_by", [])), row["id"]
        # a test of its own is one whose state the fixture `shows` has looked at
        assert "shows" in tests[row["id"]] if row["id"] in tests else shown_by, row["id"]


def test_the_committed_page_is_what_the_generator_makes():
    assert PAGE.read_text(encoding="utf-8") == page(cases(), read_outcomes()), "run `make cases`"


def test_a_state_stands_where_a_test_passed_and_nowhere_else():
    row = {"id": "X01", "case": "a", "expected": "b", "state": "int8"}

    def line(**tried) -> str:
        outcomes = {name: {"where": [], "cases": tried.get(name, {})} for name in ("CPU", "GPU")}
        return next(text for text in page([row], outcomes).splitlines() if text.startswith("| a "))

    assert line(CPU={"X01": "passed"}) == "| a | INT8 | b | X01 | passed | – |"
    assert line(GPU={"X01": "passed, of other sources"}).startswith("| a | INT8 |")
    assert line(CPU={"X01": "skipped"}).startswith("| a | not shown yet |") and line().startswith(
        "| a | not shown yet |"
    )
    assert line(CPU={"X01": "passed"}, GPU={"X01": "failed"}).startswith("| a | not shown: a test failed |")
    row |= {"shown_by": ["P07", "P08"]}
    assert line(CPU={"P07": "passed", "P08": "failed"}).startswith("| a | not shown: a test failed | b | P07 P08 |")


def test_every_section_begins_with_a_row():
    assert set(SECTIONS) <= {row["id"] for row in ROWS} and ROWS[0]["id"] in SECTIONS
    assert compatibility_table.PAGE.is_relative_to(ROOT / "docs")
