"""Every row of docs/compatibility.md has a test that found its state, and the page is what the generator makes."""

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


def test_every_section_begins_with_a_row():
    assert set(SECTIONS) <= {row["id"] for row in ROWS} and ROWS[0]["id"] in SECTIONS
    assert compatibility_table.PAGE.is_relative_to(ROOT / "docs")
