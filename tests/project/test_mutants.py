"""The faults that `make mutants` puts into the sources can be put there, and a test that misses one is told of."""

from __future__ import annotations

import pytest

from tests.project import mutants
from tests.project.mutants import Mutant, mutated
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
