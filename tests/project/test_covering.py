"""`make test` runs each value of each parameter; which combinations of them, is decided by support/covering.py."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.support.covering import covering
from tests.support.repository import ROOT


TESTS = """
import pytest

@pytest.mark.parametrize("tier", ["reference", "interpreter"])
@pytest.mark.parametrize("seq", [1000, 2000, 3000])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_grid(tier, seq, mask):
    pass

@pytest.mark.parametrize(("seq", "mask"), [(1, 2), (2, 1)])
def test_pairs(seq, mask):
    pass

def test_alone():
    pass
"""
CONFTEST = f"""
import sys
import pytest
sys.path.insert(0, {str(ROOT)!r})
from tests.support.covering import mark_repeats

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_repeats(items)
"""


def test_each_value_is_covered_by_as_few_combinations_as_the_longest_parameter_has():
    grid = [{("a", a), ("b", b), ("c", c)} for a, b, c in itertools.product(range(5), range(3), range(2))]
    found = covering(grid)
    assert set().union(*(grid[i] for i in found)) == set().union(*grid) and len(found) == 5
    assert covering([]) == set() and covering([{("a", 1)}, {("a", 1)}]) == {0}


@pytest.mark.slow("pytest collects twice")
def test_repeats_are_left_out_of_the_quick_tests_of_each_implementation(tmp_path):
    for name, text in {
        "test_it.py": TESTS,
        "conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\nmarkers = slow\n  repeat\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    shown = [
        subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for more in ((), ("-m", "not repeat"), ("-m", "not repeat and not slow"))
    ]
    every, quick, fast = ([line.partition("::")[2] for line in text.splitlines() if "::" in line] for text in shown)
    assert len(every) == 2 * 3 * 2 + 2 + 1 and "test_alone" in quick and sum("pairs" in name for name in quick) == 2
    assert sum("interpreter" in name for name in fast) == 1
    for tier in ("reference", "interpreter"):
        grid = [name for name in quick if tier in name]
        assert len(grid) == 3 and all(any(value in name for name in grid) for value in ("1000", "3000", "causal"))
