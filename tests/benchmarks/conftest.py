"""The folder of the benchmarks on the path, as when one of them is run."""

from __future__ import annotations

import sys

import pytest

from tests.support.repository import ROOT


@pytest.fixture(scope="module")
def on_the_path():
    folder = str(ROOT / "kernels" / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)
