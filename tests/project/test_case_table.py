"""Every named case has a test or a reason, and the committed page says what the committed outcomes say."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess

import pytest

from sage_kernels.results import SOURCES, append_row, commit, kernel_sources, outcome_meta, read_rows
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


def test_the_list_of_cases_is_well_formed():
    rows = cases()
    ids = [row["id"] for row in rows]
    assert len(ids) == len(set(ids)) >= 88
    for row in rows:
        combined = {"state", "shown_by", "gpu"} if row["id"].startswith("X") else set()
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


@pytest.mark.parametrize("file", sorted((TESTS / "outcomes").glob("*.json")), ids=lambda file: file.stem)
def test_committed_outcomes_have_the_agreed_form(file):
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {"commit", "gpu", "torch", "triton", "date"} <= set(content["meta"])
    assert set(content["cases"].values()) <= set(WORST_FIRST)
    if "tests" in content:
        assert content["cases"] == worst_by_case(content["tests"])
