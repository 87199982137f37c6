"""--outcomes FILE: every test of a run with what it came to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sage_kernels.results import kernel_sources
from tests.support.repository import ROOT


pytest_plugins = ["pytester"]


CONFTEST = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "kernels")]!r}
from tests.support.outcomes import pytest_addoption, pytest_configure
"""


@pytest.fixture
def run(pytester):
    """run(source, *arguments): (how a run of this test file ended, what it wrote)."""
    pytester.makeconftest(CONFTEST)

    def run(source: str, *arguments):
        pytester.makepyfile(source)
        done = pytester.runpytest_inprocess("--outcomes", "out.json", *arguments, no_reraise_ctrlc=True)
        return done, json.loads((Path(pytester.path) / "out.json").read_text())

    return run


def test_outcomes_of_a_run_are_written(run):
    _, content = run(
        """
        import pytest

        @pytest.fixture
        def broken():
            raise OSError

        def test_V01_a(): pass
        def test_V01_V02_b(): assert False
        def test_V03_c(broken): pass
        def test_V04_d(): pytest.skip()
        def test_e(): pass
        """
    )
    assert content["meta"]["kernel_sources"] == kernel_sources() and content["meta"]["dirty"] in (True, False, None)
    assert content["cases"] == {"V01": "failed", "V02": "failed", "V03": "failed", "V04": "skipped"}
    assert len(content["tests"]) == 5 and content["meta"]["failed"] == 2 and content["meta"]["passed"] == 2


THREE = """
    import os, pathlib, time

    def test_V01_a(): pass
    def test_V02_b(): os._exit(1)
    def test_V03_c(): pass
    """


def test_a_test_that_nobody_reports_on_fails_the_run(run, pytester):
    """As when a worker's report is lost."""
    hook = """
def pytest_runtest_protocol(item):
    return item.name == "test_V02_b" or None
"""
    pytester.makeconftest(CONFTEST + hook)
    done, content = run(THREE)
    assert done.ret == pytest.ExitCode.INTERNAL_ERROR and not content["meta"]["finished"]
    assert set(content["cases"]) == {"V01", "V03"}
    assert "1 collected tests have no outcome" in done.stdout.str()


def test_Q36_outcomes_are_tried_before_the_tests(pytester, run):
    pytester.makepyfile("def test_a(): open('ran', 'w')")
    done = pytester.runpytest_inprocess("--outcomes", "nowhere/out.json")
    done.stderr.fnmatch_lines(["*--outcomes: got 'nowhere/out.json', but folder nowhere does not exist*"])
    assert done.ret == pytest.ExitCode.USAGE_ERROR and not (pytester.path / "ran").exists()
