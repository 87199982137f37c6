"""--outcomes FILE: what every test of a run came to, as data that is committed."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from tests.project.case_table import worst_by_case
from tests.support.placing import use_gpu


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, help="write every test's outcome, and where it ran, to this JSON file")
    parser.addoption("--on-gpu", action="store_true", help="tests of combinations put their models on the GPU")


def pytest_configure(config):
    use_gpu(config)
    # with xdist, the workers report to this process, which alone writes
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        from sage_processors.files.whole_file import check_output

        try:
            check_output(config.getoption("--outcomes"), "--outcomes")
        except ValueError as error:  # before all tests, not behind them
            raise pytest.UsageError(str(error)) from error
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    """Collects what CI can't run (`make test-gpu`) and what kernels/CASES.md shows, to be committed as data.

    A run that is stopped has no end: failures are written as they happen, all outcomes every WRITE_EVERY tests, with
    `"finished": false` until the run is over. With pytest-xdist the workers report to this process: a test whose
    worker died failed, and one that was collected and never reported on fails the run.
    """

    WRITE_EVERY = 50

    def __init__(self, path: Path):
        from sage_kernels.results import commit, kernel_sources

        self.path, self.tests, self.collected = path, {}, set()
        self.sources, _ = kernel_sources(), commit()  # as they are now, when the tests import them
        self.failures = path.with_suffix(".failures.txt")
        self.failures.unlink(missing_ok=True)  # of the run before

    def pytest_collection_finish(self, session):
        self.collected |= {_name(item.nodeid) for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.collected |= {_name(nodeid) for nodeid in ids}

    def pytest_runtest_logreport(self, report):
        name = _name(report.nodeid)
        if report.when == "call" or report.outcome != "passed":  # set-up and tear-down count when they fail or skip
            self.tests[name] = report.outcome
            if len(self.tests) % self.WRITE_EVERY == 0:
                self.write(finished=False)
        if report.failed:
            with self.failures.open("a") as file:
                file.write(f"{name} ({report.when})\n{report.longreprtext[-3000:]}\n\n")

    def pytest_sessionfinish(self, session, exitstatus):
        over = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if over and (missing := sorted(self.collected - set(self.tests))):
            over, session.exitstatus = False, pytest.ExitCode.INTERNAL_ERROR
            print(f"\n{self.path}: {len(missing)} collected tests have no outcome, such as {missing[0]}")
        self.write(finished=over)

    def write(self, finished: bool):
        from sage_kernels.results import outcome_meta
        from sage_processors.files.whole_file import write_whole

        outcomes = list(self.tests.values())
        counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
        time = datetime.datetime.now().isoformat(timespec="seconds")
        meta = {**outcome_meta(self.sources), **counts, "time": time}
        meta["finished"] = finished
        content = {"meta": meta, "cases": worst_by_case(self.tests), "tests": dict(sorted(self.tests.items()))}
        write_whole(self.path, json.dumps(content, indent=1) + "\n")
