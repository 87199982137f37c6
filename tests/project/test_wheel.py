"""What is built from this checkout: both packages, typed, with compiled kernels, below 6 MB; and it runs alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from tests.support.repository import ROOT, files, fresh


MAX_BYTES = 6_000_000


def built(folder: Path, *names: str) -> Path:
    """The wheel of a project of this checkout, from a copy so that setuptools leaves nothing in the tree."""
    copy = folder / "source"
    copy.mkdir()
    for name in names:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, copy / place.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(place, copy)
    build = "import setuptools.build_meta as backend; backend.build_wheel('dist')"  # what pip calls
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next((copy / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    names = ("pyproject.toml", "README.md", "LICENSE", "sage_processors", "kernels", "tests", "examples", "demo")
    return built(tmp_path_factory.mktemp("wheel"), *names)


def test_wheel_holds_both_packages_typed_with_compiled_kernels(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(f.relative_to(ROOT)) for f in files("sage_processors")}
    sources |= {str(f.relative_to(ROOT / "kernels")) for f in files("kernels/sage_kernels")}
    prebuilt = ROOT / "kernels" / "sage_kernels" / "prebuilt"
    data = {str(f.relative_to(ROOT / "kernels")) for f in prebuilt.glob("*.zip")}
    assert len(data) >= 2
    assert (
        sources | data | {"sage_processors/py.typed", "sage_processors/__init__.pyi", "sage_kernels/py.typed"}
    ) - names == set()
    outside = {name.partition("/")[0] for name in names} - {"sage_processors", "sage_kernels"}
    assert all(name.endswith(".dist-info") for name in outside), outside
    assert any(name.endswith("/LICENSE") for name in names)


def test_wheel_stays_below_6_megabytes(wheel):
    assert wheel.stat().st_size <= MAX_BYTES
    # what a file adds, so that whoever adds one sees it: the wheel is little more than that
    parts = [zlib.compress(zipfile.ZipFile(wheel).read(name)) for name in zipfile.ZipFile(wheel).namelist()]
    assert 0.9 * wheel.stat().st_size <= sum(map(len, parts)) <= MAX_BYTES


def test_all_packages_of_this_repository_have_one_version():
    projects = [ROOT / folder / "pyproject.toml" for folder in ("", "demo")]
    assert len({re.search(r'^version = "(.*)"', path.read_text(), re.M)[1] for path in projects}) == 1


@pytest.mark.slow("starts two commands of a wheel")
def test_a_missing_model_is_a_message_that_names_the_command(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = """
        import sys
        from sage_processors.cli import run
        sys.stderr = sys.stdout
        for arguments in (["demo", "tiny_flux"], ["rate", "tiny_lm"]):
            sys.argv = ["sage-processors", *arguments]
            try:
                run()
            except SystemExit as stop:
                print(stop.code)
        """
    output = fresh(code, path=(site,), cwd=tmp_path)
    assert output.count("pip install ./demo") == 2 and "Traceback" not in output, output
    assert [line for line in output.splitlines() if line.isdigit()] == ["1", "1"]
