"""The faults that `make mutants` puts into the sources can be put there, and a test that misses one is told of."""

from __future__ import annotations

import pytest

from tests.project import mutants
from tests.project.mutants import Mutant, killer, mutated
from tests.support.repository import ROOT


def test_what_mutants_replace_is_there_once_and_their_tests_are_there():
    found = mutants.mutants()
    for mutant in found:
        assert compile(mutated(mutant), mutant.file, "exec") and mutant.new != mutant.old, mutant.name
        assert mutant.tests and all((ROOT / test).is_file() for test in mutant.tests), mutant.name
    assert len({mutant.name for mutant in found}) == len(found)


def test_a_text_that_moved_away_is_an_error():
    with pytest.raises(ValueError, match="has 'gone' 0 times, expected once"):
        mutated(Mutant("a fault", "tests/project/mutants.json", "gone", "", []))


@pytest.mark.slow("pytest runs three times")
def test_a_mutant_is_killed_by_a_test_that_fails_and_its_file_is_restored(tmp_path):
    (tmp_path / "double.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_double.py").write_text("import double\n\n\ndef test_two():\n    assert double.double(2) == 4\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu", "slow"]\n')
    wrong = Mutant("a fault", "double.py", "2 * x", "3 * x", ["test_double.py"])
    assert killer(wrong, tmp_path) == "test_double.py::test_two"
    assert killer(wrong._replace(new="x + x"), tmp_path) is None
    assert (tmp_path / "double.py").read_text() == "def double(x):\n    return 2 * x\n"
    with pytest.raises(RuntimeError, match="pytest ended with"):
        killer(wrong._replace(tests=["test_nothing.py"]), tmp_path)


def test_tests_that_fail_anyway_kill_nothing(monkeypatch, capsys):
    monkeypatch.setattr(mutants, "first_failure", lambda *_: "test_a.py::test_b")
    assert mutants.main(["states may be strided"]) == 1
    assert capsys.readouterr().out == "fails without any mutant: test_a.py::test_b\n"
