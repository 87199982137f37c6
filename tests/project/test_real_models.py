"""Tests on real checkpoints: left out or skipped where nobody fetched these, with the command that does."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support import real_models
from tests.support.repository import ROOT


def test_a_checkpoint_that_was_not_fetched_skips_the_test_and_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in real_models.CHECKPOINTS:
        with pytest.raises(pytest.skip.Exception, match="`make real`"):
            real_models.load(name)


def test_targets_of_ci_leave_real_checkpoints_out():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test", "test-all", "test-every"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert "not real" in recipe.group(1), target


def test_windows_are_of_one_length_and_begin_as_the_model_expects():
    class Words:
        def __call__(self, text, add_special_tokens):
            assert not add_special_tokens
            return type("Encoded", (), {"input_ids": [len(word) for word in text.split()]})

    plain, gemma = (real_models.windows(name, Words(), 3, 40) for name in ("smollm2", "gemma3"))
    assert plain.shape == gemma.shape == (3, 40) and plain.dtype == torch.int64
    assert torch.equal(gemma[:, 1:], plain[:, :39]) and (gemma[:, 0] == 2).all()
    assert not torch.equal(plain[0], plain[1])
