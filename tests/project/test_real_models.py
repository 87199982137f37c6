"""Tests on real checkpoints: left out or skipped where nobody fetched these, with the command that does."""

from __future__ import annotations

import re

import pytest

from tests.support import real_models
from tests.support.repository import ROOT


def test_a_checkpoint_that_was_not_fetched_skips_the_test_and_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (*real_models.CHECKPOINTS, real_models.ENCODER):
        with pytest.raises(pytest.skip.Exception, match="`make real`"):
            real_models.load(name)


def test_targets_of_ci_leave_real_checkpoints_out():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "test-all", "test-every"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert "not real" in recipe.group(1), target
