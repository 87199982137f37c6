"""Lets results wait in tests' own code, which is no library's."""

from __future__ import annotations

import pytest

from sage_processors.postponed import library
from sage_processors.postponed.region import opened


@pytest.fixture
def library_tests(monkeypatch):
    """The tests' own files count as those of a library."""
    is_library_file = library.is_library_file
    monkeypatch.setattr(library, "PACKAGES", (*library.PACKAGES, "tests"))
    monkeypatch.setattr(library, "_kinds", library._Kinds())
    monkeypatch.setattr(library, "is_library_file", lambda name: "/tests/" in name or is_library_file(name))


@pytest.fixture
def waiting(library_tests):
    """A test's body counts as one block of a library: results wait in it."""
    with opened() as region:
        yield region
