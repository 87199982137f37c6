"""Every named case has a test or a reason, and the committed page says what the committed outcomes say."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.case_table import (
    GROUPS,
    PAGE,
    TESTS,
    TIERS,
    WORST_FIRST,
    case_ids,
    cases,
    page,
    read_outcomes,
    worst_by_case,
)


pytest_plugins = ["pytester"]


def names_of_tests() -> list[str]:
    """Of all tests here, whatever is deselected in this run."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(TESTS.glob("test_*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in nodes if node.name.startswith("test_")]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_V01_nan", ["V01"]),
        ("test_attention.py::test_M03_M04_zero_V05[cuda-M06]", ["M03", "M04"]),
        ("test_x.py::TestIt::test_Q01", ["Q01"]),
        ("test_nan_V01", []),
        ("test_V1_x", []),
        ("test_V011_x", []),
        ("fixture_V01", []),
    ],
)
def test_ids_are_read_from_the_start_of_a_name(name, ids):
    assert case_ids(name) == ids


def test_the_worst_outcome_of_a_cases_tests_counts():
    tests = {"a.py::test_V01_x[1]": "passed", "a.py::test_V01_x[2]": "failed", "a.py::test_V01_V02_y": "skipped"}
    assert worst_by_case(tests | {"a.py::test_z": "failed"}) == {"V01": "failed", "V02": "skipped"}
    assert worst_by_case({"a.py::test_V01_x": "passed"}) == {"V01": "passed"}


def test_the_list_of_cases_is_well_formed():
    rows = cases()
    ids = [row["id"] for row in rows]
    assert len(ids) == len(set(ids)) >= 88
    for row in rows:
        assert set(row) == {"id", "case", "expected", "tiers", "reason"}
        assert case_ids(f"test_{row['id']}") == [row["id"]] and row["id"][0] in GROUPS
        assert row["tiers"] and set(row["tiers"]) <= set(TIERS) and row["case"] and row["expected"]


def test_every_case_of_ours_has_a_test_or_a_reason():
    tested = {case for name in names_of_tests() for case in case_ids(name)}
    assert tested - {row["id"] for row in cases()} == set()
    wanted = {row["id"] for row in cases() if {"C", "I"} & set(row["tiers"]) and not row["reason"]}
    assert sorted(wanted - tested) == []
    # a reason is for what can't be tested yet: it goes when a test comes
    assert {row["id"] for row in cases() if row["reason"]} & tested == set()


def test_the_committed_page_is_what_the_generator_makes():
    assert PAGE.read_text(encoding="utf-8") == page(cases(), read_outcomes()), "run `make cases`"


def test_a_run_that_was_stopped_is_named_so(tmp_path):
    meta = {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today", "commit": "abc"}
    for name, finished in (("gpu", False), ("two_gpus", True)):
        content = {"meta": meta | {"finished": finished}, "cases": {}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    stopped, whole = read_outcomes(tmp_path)["GPU"]["where"]
    assert stopped.endswith("(gpu.json), stopped before its end") and whole.endswith("(two_gpus.json)")


def test_the_page_shows_every_case_with_its_outcomes():
    outcomes = {
        "CPU": {"where": ["a CPU"], "cases": {"V01": "passed", "Q01": "failed"}},
        "GPU": {"where": [], "cases": {"V01": "skipped"}},
    }
    text = page(cases(), outcomes)
    assert all(text.count(f"\n| {row['id']} | ") == 1 for row in cases())
    line = {line.split(" | ")[0]: line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    assert line["| V01"][-3:-1] == ["passed", "skipped"] and line["| Q01"][-3:-1] == ["failed", "–"]
    assert "- CPU: a CPU" in text and "- GPU: not tried yet" in text


@pytest.mark.parametrize("file", sorted((TESTS / "outcomes").glob("*.json")), ids=lambda file: file.stem)
def test_committed_outcomes_have_the_agreed_form(file):
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {"commit", "gpu", "torch", "triton", "date"} <= set(content["meta"])
    assert set(content["cases"].values()) <= set(WORST_FIRST)
    if "tests" in content:
        assert content["cases"] == worst_by_case(content["tests"])


@pytest.fixture
def run_with_outcomes(pytester):
    """Outcomes of a test file's run by itself."""
    pytester.makeconftest(
        f"import sys\nsys.path[:0] = {[str(TESTS.parent), str(TESTS.parent / 'kernels')]!r}\n"
        "from tests.conftest import Outcomes, pytest_addoption, pytest_configure\n"
    )

    def run(source: str) -> dict:
        pytester.makepyfile(source)
        pytester.runpytest_subprocess("--outcomes", "out.json")
        return json.loads((Path(pytester.path) / "out.json").read_text())

    return run


def test_outcomes_of_a_stopped_run_say_so(run_with_outcomes):
    source = """
        import pytest

        def test_a(): pass
        def test_b(): {}
        def test_c(): pass
        """
    assert run_with_outcomes(source.format("assert False"))["meta"]["finished"]
    stopped = run_with_outcomes(source.format("raise KeyboardInterrupt"))
    assert not stopped["meta"]["finished"] and len(stopped["tests"]) == 1


def test_outcomes_of_a_run_are_written(run_with_outcomes):
    content = run_with_outcomes(
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
    assert content["cases"] == {"V01": "failed", "V02": "failed", "V03": "failed", "V04": "skipped"}
    assert len(content["tests"]) == 5 and content["meta"]["failed"] == 2 and content["meta"]["passed"] == 2
