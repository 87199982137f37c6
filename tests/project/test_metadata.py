"""What the package says of itself: found by name and topic, addresses with a release, extras that messages name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from sage_processors.installation import pip_install
from tests.support.repository import ROOT, files


tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAMED = r"""(?:(?:sage-processors|\.|whl)\[|pip_install\(["'])([a-z,]+)["'\]]"""
RELEASE = ROOT / ".github" / "workflows" / "release.yml"


def test_metadata_names_authors_topics_and_no_address_that_is_not_there():
    assert PROJECT["authors"] and len(PROJECT["keywords"]) >= 10 and "urls" not in PROJECT
    assert {"diffusers", "transformers", "int8", "sageattention"} <= set(PROJECT["keywords"])
    lowest = re.search(r"3\.(\d+)", PROJECT["requires-python"])[1]
    assert f"Programming Language :: Python :: 3.{lowest}" in PROJECT["classifiers"]


def test_extras_that_messages_and_pages_name_exist():
    sources = [
        *files("sage_processors", "kernels/sage_kernels", "examples"),
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
    ]
    named = {
        extra
        for source in sources
        for found in re.findall(NAMED, source.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert {"diffusers", "transformers", "app", "ocr"} <= named <= set(PROJECT["optional-dependencies"]), named


def test_nothing_is_installed_from_an_index_by_our_name_before_a_release():
    """Anybody can register a name that nothing was released under."""
    sources = [*files("sage_processors", "kernels", "examples", "demo", "notebooks"), *ROOT.glob("*.md")]
    sources += [path for folder in ("docs", "examples", "demo", "kernels") for path in (ROOT / folder).rglob("*.md")]
    by_name = re.compile(r"pip install(?:\s+-\S+)*\s+[\"']?sage[-_]processors(?![-_.\w])")
    assert len(sources) > 200
    found = {str(x.relative_to(ROOT)): by_name.findall(x.read_text(encoding="utf-8")) for x in sources}
    assert not {name: lines for name, lines in found.items() if lines}
    assert by_name.search('pip install "sage-processors[ocr]"') and by_name.search("pip install sage-processors")
    said = 'pip install -e ".[ocr]" in a checkout of sage-processors, or its wheel file with [ocr]'
    assert pip_install("ocr") == said and pip_install() == said.replace("[ocr]", "").removesuffix(" with ")


def test_a_release_writes_the_address_of_the_repository_it_runs_in(tmp_path):
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load(RELEASE.read_text(encoding="utf-8"))["jobs"]["build"]["steps"]
    script = {step["name"]: step["run"] for step in steps if "name" in step}
    (tmp_path / "demo").mkdir()
    for name in ("pyproject.toml", "demo/pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for tag, code in ((f"v{PROJECT['version']}", 0), ("v99.0", 1)):
        shell = ["bash", "-ec", script["the tag is the version"]]
        assert (
            subprocess.run(shell, cwd=tmp_path, env={"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}).returncode
            == code
        )
    shell = ["bash", "-euc", script["addresses"]]
    subprocess.run(shell, cwd=tmp_path, env={"HOME_PAGE": "https://host/us/it", "PATH": "/usr/bin:/bin"}, check=True)
    for name in ("pyproject.toml", "demo/pyproject.toml"):
        urls = tomllib.loads((tmp_path / name).read_text(encoding="utf-8"))["project"]["urls"]
        assert urls["Source"] == "https://host/us/it" and urls["Issues"] == "https://host/us/it/issues"
