"""Every named case has a test or a reason, and the committed page says what the committed outcomes say."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess

import pytest

from sage_kernels.results import SOURCES, append_row, commit, kernel_sources, outcome_meta, read_rows
from tests.project import case_table, compatibility_table
from tests.project.case_table import (
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


def names_of_tests() -> list[str]:
    """Of all tests here, whatever is deselected in this run."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(TESTS.rglob("test_*.py"))]
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
        combined = {"state", "shown_by"} if row["id"].startswith("X") else set()
        assert (
            {"id", "case", "expected", "tiers", "reason"}
            <= set(row)
            <= {"id", "case", "expected", "tiers", "reason"} | combined
        )
        assert case_ids(f"test_{row['id']}") == [row["id"]] and row["id"][0] in GROUPS
        assert row["tiers"] and set(row["tiers"]) <= set(TIERS) and row["case"] and row["expected"]


def test_every_case_of_ours_has_a_test_or_a_reason():
    tested = {case for name in names_of_tests() for case in case_ids(name)}
    assert tested - {row["id"] for row in cases()} == set()
    wanted = {row["id"] for row in cases() if {"C", "I"} & set(row["tiers"]) and not row["reason"]}
    wanted -= {row["id"] for row in cases() if row.get("shown_by")}
    assert sorted(wanted - tested) == []
    # a reason is for what can't be tested yet: it goes when a test comes
    assert {row["id"] for row in cases() if row["reason"]} & tested == set()


def test_the_committed_page_is_what_the_generator_makes():
    assert PAGE.read_text(encoding="utf-8") == page(cases(), read_outcomes()), "run `make cases`"


def test_the_cpu_column_stays_where_nothing_was_run(tmp_path, monkeypatch):
    outcome_file(tmp_path, "cpu", kernel_sources="these")
    text = page(cases(), read_outcomes(tmp_path, "these"))
    monkeypatch.setattr(case_table, "PAGE", tmp_path / "CASES.md")
    (tmp_path / "CASES.md").write_text(text)
    (tmp_path / "cpu.json").unlink()
    assert page(cases(), read_outcomes(tmp_path, "these")) == text and "kernels these," in text
    again = read_outcomes(tmp_path, "others")["CPU"]
    assert again["cases"] == {"V01": "passed, of other sources"} and again["where"][0].endswith(", of other sources")


def test_a_run_that_was_stopped_is_named_so(tmp_path):
    meta = {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today", "commit": "abc"}
    for name, finished in (("gpu", False), ("two_gpus", True)):
        content = {"meta": meta | {"finished": finished}, "cases": {}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    stopped, whole = read_outcomes(tmp_path)["GPU"]["where"]
    assert "(gpu.json), stopped before its end" in stopped and "stopped" not in whole


def outcome_file(folder, name: str, outcome: str = "passed", **meta) -> None:
    about = {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today", "commit": "abc+dirty"}
    (folder / f"{name}.json").write_text(json.dumps({"meta": about | meta, "cases": {"V01": outcome}}))


def test_Q34_outcomes_of_other_sources_are_marked(tmp_path):
    outcome_file(tmp_path, "cpu", kernel_sources="these")
    outcome_file(tmp_path, "gpu", kernel_sources="others")
    found = read_outcomes(tmp_path, sources="these")
    assert found["CPU"]["cases"] == {"V01": "passed"} and found["CPU"]["other"] == []
    assert found["GPU"]["cases"] == {"V01": "passed, of other sources"} and found["GPU"]["other"] == ["gpu.json"]
    (line,) = (line for line in page(cases(), found).splitlines() if line.startswith("| V01 "))
    assert line.split(" | ")[-3:-1] == ["passed", "passed, of other sources"]
    assert "on commit abc+dirty (gpu.json), of other sources" in page(cases(), found)
    outcome_file(tmp_path, "gpu")  # of a time when none was recorded
    assert read_outcomes(tmp_path, sources="these")["GPU"]["other"] == ["gpu.json"]


def test_what_one_run_skipped_another_may_have_shown(tmp_path):
    """On one GPU the tests of two are skipped; they were run elsewhere, if with other sources."""
    outcome_file(tmp_path, "gpu", "skipped", kernel_sources="these")
    outcome_file(tmp_path, "two_gpus", kernel_sources="others")
    assert read_outcomes(tmp_path, "these")["GPU"]["cases"] == {"V01": "passed, of other sources"}


def test_Q34_an_edited_kernel_makes_its_outcomes_those_of_other_sources(tmp_path):
    kernels = tmp_path / "sage_kernels"
    shutil.copytree(SOURCES, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    assert kernel_sources(kernels) == kernel_sources()  # wherever it lies
    outcome_file(tmp_path, "gpu", **outcome_meta(kernel_sources(kernels)))
    assert read_outcomes(tmp_path)["GPU"]["other"] == []
    (kernels / "__pycache__").mkdir()
    (kernels / "__pycache__" / "x.pyc").write_bytes(b"x")
    (kernels / "notes.txt").write_text("x")
    assert kernel_sources(kernels) == kernel_sources()
    hashes = {kernel_sources()}
    file = kernels / "_triton" / "attention" / "kernel.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(
        text.replace('"""', '"""Other words. ', 1).replace("\n\n", "\n# other words\n\n", 1) + "  # and more\n"
    )
    assert kernel_sources(kernels) == kernel_sources()  # words are no code
    for change in (lambda: file.write_text(text.replace("+", "-", 1)), lambda: file.rename(kernels / file.name),
                   lambda: (kernels / "new.py").write_text("")):  # fmt: skip
        change()
        hashes.add(kernel_sources(kernels))
    assert len(hashes) == 4
    assert read_outcomes(tmp_path, kernel_sources(kernels))["GPU"]["cases"]["V01"].endswith(", of other sources")
    # bytes that move from a name to its content, or to the next file, are another hash
    for names in (("ab", "c"), ("a", "bc")):
        folder = tmp_path / names[0]
        folder.mkdir()
        (folder / f"{names[0]}.py").write_text(names[1])
        hashes.add(kernel_sources(folder))
    assert len(hashes) == 6


def test_Q34_sources_that_are_edited_during_a_run_are_nobodys():
    assert outcome_meta(kernel_sources())["kernel_sources"] == kernel_sources()
    assert outcome_meta("before")["kernel_sources"] == "edited during the run"


def test_Q34_make_cases_says_which_outcomes_are_of_other_sources(tmp_path, monkeypatch, capsys):
    (tmp_path / "outcomes").mkdir()
    outcome_file(tmp_path / "outcomes", "cpu", **outcome_meta(kernel_sources()))
    for name in ("gpu", "two_gpus", "sanitizer"):
        outcome_file(tmp_path / "outcomes", name, kernel_sources="others")
    found = read_outcomes(tmp_path / "outcomes")
    monkeypatch.setattr(case_table, "PAGE", tmp_path / "CASES.md")
    monkeypatch.setattr(compatibility_table, "PAGE", tmp_path / "compatibility.md")
    monkeypatch.setattr(case_table, "read_outcomes", lambda: found)
    case_table.main()
    printed = capsys.readouterr().out
    assert (tmp_path / "CASES.md").read_text(encoding="utf-8") == page(cases(), found)
    assert (tmp_path / "compatibility.md").read_text(encoding="utf-8") == compatibility_table.page(cases(), found)
    assert "tests/outcomes/gpu.json: of other sources; renew it with `make test-gpu`" in printed
    assert "two_gpus.json: of other" in printed and "sanitizer.json: of other" in printed and "cpu.json" not in printed


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """(git, folder): runs git in a repository of one commit that holds results.csv's module."""
    monkeypatch.delenv("SAGE_COMMIT", raising=False)
    commit.cache_clear()
    (tmp_path / "kernels").mkdir()
    shutil.copy(SOURCES / "results.py", tmp_path / "kernels")
    (tmp_path / "notes.md").write_text("")

    def git(*arguments) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    yield git, tmp_path / "kernels"
    commit.cache_clear()


def test_Q35_a_row_of_an_edited_checkout_says_so(checkout):
    git, folder = checkout
    name = git("rev-parse", "--short", "HEAD")

    def now() -> str:
        commit.cache_clear()
        return commit(folder)

    assert now() == name and not name.endswith("+dirty")
    (folder.parent / "notes.md").write_text("edited")
    (folder.parent / "results.csv").write_text("a row of this very run")
    assert now() == name
    (folder.parent / "new.py").write_text("")
    assert now() == f"{name}+dirty"
    (folder.parent / "new.py").unlink()
    with (folder / "results.py").open("a") as file:
        file.write("\n")
    assert now() == f"{name}+dirty"
    assert commit(folder) == now()
    git("commit", "-qam", "two")
    assert commit(folder) == f"{name}+dirty"  # what this process has loaded
    assert now() == git("rev-parse", "--short", "HEAD") != name


def test_Q35_a_copy_without_a_repository_is_told_its_commit(checkout, tmp_path, monkeypatch):
    git, folder = checkout
    stranger = folder.parent / "venv"  # not of the repository that it lies in
    stranger.mkdir()
    shutil.copy(SOURCES / "results.py", stranger / "results.py")
    assert commit(stranger) == "unknown"
    commit.cache_clear()
    shutil.rmtree(folder.parent / ".git")
    assert commit(folder) == "unknown"
    monkeypatch.setenv("PATH", "")
    commit.cache_clear()
    assert commit(folder) == "unknown"
    commit.cache_clear()
    monkeypatch.setattr("sage_kernels.results.commit", lambda: "unknown")
    assert outcome_meta("x")["dirty"] is None
    monkeypatch.undo()
    monkeypatch.setenv("SAGE_COMMIT", "abc1234+dirty")
    append_row(tmp_path / "r.csv", suite="decode", case="c", provider="p", metric="time", unit="ms", median=1)
    assert [row["commit"] for row in read_rows(tmp_path / "r.csv")] == ["abc1234+dirty"]
    assert outcome_meta("x")["dirty"] is True


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
