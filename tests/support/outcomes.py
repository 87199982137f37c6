"""--outcomes FILE: what every test of a run came to, as data that is committed."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from tests.project.case_table import worst_by_case


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, help="write every test's outcome, and where it ran, to this JSON file")


def pytest_configure(config):
    # with xdist, the workers report to this process, which alone writes
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        from sage_processors.whole_file import check_output

        try:
            check_output(config.getoption("--outcomes"), "--outcomes")
        except ValueError as error:  # before all tests, not behind them
            raise pytest.UsageError(str(error)) from error
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    """Collects what CI can't run (`make test-gpu`) and what kernels/CASES.md shows, to be committed as data.

    A run that is stopped has no end: failures are written as they happen, all outcomes every WRITE_EVERY tests, with
    `"finished": false` until the run is over.
    """

    WRITE_EVERY = 50

    def __init__(self, path: Path):
        from sage_kernels.results import commit, kernel_sources

        self.path, self.tests = path, {}
        self.sources, _ = kernel_sources(), commit()  # as they are now, when the tests import them
        self.failures = path.with_suffix(".failures.txt")
        self.failures.unlink(missing_ok=True)  # of the run before

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.removeprefix("tests/")
        if report.when == "call" or report.outcome != "passed":  # set-up and tear-down count when they fail or skip
            self.tests[name] = report.outcome
            if len(self.tests) % self.WRITE_EVERY == 0:
                self.write(finished=False)
        if report.failed:
            with self.failures.open("a") as file:
                file.write(f"{name} ({report.when})\n{report.longreprtext[-3000:]}\n\n")

    def pytest_sessionfinish(self, exitstatus):
        self.write(finished=exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))

    def write(self, finished: bool):
        from sage_kernels.results import outcome_meta
        from sage_processors.whole_file import write_whole

        outcomes = list(self.tests.values())
        counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        time = datetime.datetime.now().isoformat(timespec="seconds")
        meta = {**outcome_meta(self.sources), **counts, "time": time}
        meta["finished"] = finished
        content = {"meta": meta, "cases": worst_by_case(self.tests), "tests": dict(sorted(self.tests.items()))}
        write_whole(self.path, json.dumps(content, indent=1) + "\n")
