"""The repository holds to what its pre-commit hooks ask."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.project.committed_files import problems
from tests.support.repository import ROOT


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git repository")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_committed_file_is_in_order():
    wrong = {name: found for name in tracked() if (found := problems(name, (ROOT / name).read_bytes()))}
    assert not wrong


def test_hooks_run_commands_of_this_checkout():
    """Local hooks alone: nothing is downloaded, and notebooks keep their results."""
    settings = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"- repo: (.*)", settings) == ["local"]
    entries = re.findall(r"entry: \.venv/bin/python (.*)", settings)
    assert [re.sub(r"^-m (\w+).*", r"\1", entry) for entry in entries[:3]] == ["ruff", "ruff", "mypy"]
    assert entries[3:] == ["tests/project/committed_files.py"] and (ROOT / entries[3]).is_file()
    assert len(re.findall(r"language: ", settings)) == len(re.findall(r"language: system", settings)) == 4
    assert "nbstripout" not in settings
