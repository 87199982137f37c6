"""The folder of the benchmarks on the path, as when one of them is run."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support.repository import ROOT


@pytest.fixture(scope="module")
def on_the_path():
    folder = str(ROOT / "kernels" / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def bench(request, on_the_path):
    """The module that the test file is named after: bench_skip for test_bench_skip.py."""
    return importlib.import_module(request.module.__name__.rpartition(".")[2].removeprefix("test_"))
